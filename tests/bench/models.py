"""The models that the benchmarks serve: common shapes, random weights, a tokenizer of 8192.

Speed depends on shapes and not on the weights' values, so nothing is downloaded. A fixed
seed gives the same folders everywhere, in the form that Hugging Face reads and so every peer. One
more has real weights, widened to bf16 from the package that `--model-path smollm2` serves.

    python -m tests.bench.models
"""

from __future__ import annotations

import argparse
import json
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from transformers import PreTrainedConfig

    from antiphon.config.settings import Settings

CACHE = Path.home() / ".cache" / "antiphon-bench"
"""Where models and peers are kept between runs. Nothing in it is committed."""

SEED = 0
VOCABULARY = 8192
CONTEXT_TOKENS = 4096
CLIENTS_MAX = 64
END = "<|endoftext|>"
"""GPT-2's and Qwen2's: readers that take the family's word for it add no second one."""
END_ID = 0
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_TEXT_BYTES_MAX = 12_000_000


class Shape(msgspec.Struct, frozen=True):
    """What decides the cost of a token.

    Attributes:
        biases: Whether the query, key and value projections have them, as in Qwen2.
        vocabulary: Tokens that there are logits for.
        packaged: The short name of a model whose weights are taken, not drawn; empty: none.
        blocks: The type of llama.cpp's blocks, of a GGUF file that all servers are given; empty: a
            folder of bf16.
        weight_bytes: Those that a server must read of a weight.
        context_tokens: Longest prompt and answer together.
        clients_max: Requests that a server is asked to run at once.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    rope_theta: float
    biases: bool = False
    vocabulary: int = VOCABULARY
    packaged: str = ""
    blocks: str = ""
    weight_bytes: float = 2.0
    context_tokens: int = CONTEXT_TOKENS
    clients_max: int = CLIENTS_MAX

    @property
    def weights_count(self) -> int:
        """Numbers that one token is multiplied with; the tied embedding counts once, as output."""
        layer = self._attention_count + 3 * self.hidden * self.intermediate
        return self.layers * layer + self.head_count

    @property
    def _attention_count(self) -> int:
        return 2 * self.hidden * (self.hidden // self.heads) * (self.heads + self.kv_heads)

    def read_count(self, rows: int) -> float:
        """Numbers that a step of so many tokens reads of the weights."""
        assert rows > 0, "a step has tokens"
        return self.weights_count

    @property
    def head_count(self) -> int:
        """Numbers that a token is multiplied with for its logits."""
        return self.vocabulary * self.hidden

    @property
    def key_count(self) -> int:
        """Numbers of keys and values that a query is multiplied with for each earlier token."""
        return 2 * self.layers * self.hidden

    @property
    def kv_bytes(self) -> int:
        """What one token keeps in the cache, in two-byte numbers."""
        return 2 * 2 * self.layers * self.kv_heads * (self.hidden // self.heads)

    def config(self) -> PreTrainedConfig:
        from transformers import LlamaConfig, Qwen2Config  # noqa: PLC0415

        return (Qwen2Config if self.biases else LlamaConfig)(**self._settings())

    def _settings(self) -> dict[str, Any]:
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.context_tokens,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "tie_word_embeddings": True,
            "bos_token_id": END_ID,
            "eos_token_id": END_ID,
            "pad_token_id": END_ID,
        }

    def _with_heads(self) -> dict[str, Any]:
        """The settings of a family whose files give the size of heads: exporters read it."""
        return self._settings() | {"head_dim": self.hidden // self.heads}


class ExpertsShape(Shape, frozen=True, kw_only=True):
    """A mixture of experts as Qwen3's: each `intermediate` wide, `chosen` of them for a token."""

    experts: int
    chosen: int

    @property
    def weights_count(self) -> int:
        return self._count(self.chosen)

    def read_count(self, rows: int) -> float:
        return self._count(self.experts_read(rows))

    def experts_read(self, rows: int) -> float:
        """How many of a layer's; they are chosen evenly, as random weights do."""
        return self.experts * (1 - (1 - self.chosen / self.experts) ** rows)

    def _count(self, experts: float) -> int:
        feed_forward = self.hidden * (self.experts + 3 * self.intermediate * experts)
        return round(self.layers * (self._attention_count + feed_forward) + self.head_count)

    def config(self) -> PreTrainedConfig:
        from transformers import Qwen3MoeConfig  # noqa: PLC0415

        return Qwen3MoeConfig(
            **self._with_heads(),
            moe_intermediate_size=self.intermediate,
            num_experts=self.experts,
            num_experts_per_tok=self.chosen,
            norm_topk_prob=True,
        )


class LatentShape(Shape, frozen=True, kw_only=True):
    """Latent attention as DeepSeek's, between plain feed-forward layers.

    A token keeps `latent` numbers and one key of `rotated`; heads have as many values as `kv_heads`
    times their size, and none of their own are kept.
    """

    latent: int
    rotated: int

    @property
    def _attention_count(self) -> int:
        head = self.hidden // self.heads
        query = self.hidden * self.heads * (head + self.rotated)
        down = self.hidden * (self.latent + self.rotated)
        return query + down + 2 * self.latent * self.heads * head + self.hidden * self.hidden

    @property
    def key_count(self) -> int:
        return self.layers * (2 * self.hidden + self.heads * self.rotated)

    @property
    def kv_bytes(self) -> int:
        return 2 * self.layers * (self.latent + self.rotated)

    def config(self) -> PreTrainedConfig:
        from transformers import DeepseekV2Config  # noqa: PLC0415

        head = self.hidden // self.heads
        return DeepseekV2Config(
            **self._settings(),
            first_k_dense_replace=self.layers,
            num_experts_per_tok=1,  # of those that no layer has
            q_lora_rank=None,
            kv_lora_rank=self.latent,
            qk_nope_head_dim=head,
            qk_rope_head_dim=self.rotated,
            v_head_dim=head,
        )


class HybridShape(Shape, frozen=True, kw_only=True):
    """Attention and a Mamba 2 mixer side by side in each layer, as Falcon-H1's.

    The mixer has heads as wide as those of attention, `inner` numbers together, and states of
    `state` numbers for each.
    """

    inner: int
    state: int

    @property
    def weights_count(self) -> int:
        head = self.hidden // self.heads
        taken = 2 * self.inner + 2 * self.state + self.inner // head
        mixer = self.hidden * (taken + self.inner)
        layer = self._attention_count + mixer + 3 * self.hidden * self.intermediate
        return self.layers * layer + self.head_count

    def config(self) -> PreTrainedConfig:
        from transformers import FalconH1Config  # noqa: PLC0415

        head = self.hidden // self.heads
        return FalconH1Config(
            **self._with_heads(),
            mamba_d_ssm=self.inner,
            mamba_n_heads=self.inner // head,
            mamba_d_head=head,
            mamba_n_groups=1,
            mamba_d_state=self.state,
            mamba_chunk_size=128,
        )


LLAMA_135M = Shape("llama-135m", 576, 30, 9, 3, 1536, 10_000.0)
QWEN_05B = Shape("qwen2.5-0.5b", 896, 24, 14, 2, 4864, 1_000_000.0, biases=True)
SMOLLM2 = Shape(
    "smollm2-135m", 576, 30, 9, 3, 1536, 100_000.0, vocabulary=49_152, packaged="smollm2"
)
# Its table of embeddings has 8 bits.
SMOLLM2_Q4 = replace(
    SMOLLM2, name="smollm2-135m-q4_1", blocks="Q4_1", weight_bytes=0.717, clients_max=16
)
SMOLLM2_Q8 = replace(
    SMOLLM2, name="smollm2-135m-q8_0", blocks="Q8_0", weight_bytes=34 / 32, clients_max=16
)
LLAMA_135M_LONG = replace(LLAMA_135M, name="llama-135m-8k", context_tokens=8192, clients_max=4)
LLAMA_135M_CROWD = replace(LLAMA_135M, name="llama-135m-crowd", context_tokens=256, clients_max=200)
EXPERTS = ExpertsShape("qwen3-moe", 768, 12, 12, 4, 384, 1_000_000.0, experts=32, chosen=4)
LATENT = LatentShape("deepseek-mla", 768, 12, 12, 12, 2048, 10_000.0, latent=256, rotated=32)
HYBRID = HybridShape("falcon-h1", 768, 12, 12, 4, 2048, 10_000.0, inner=768, state=128)
PLAIN = (LLAMA_135M, QWEN_05B, SMOLLM2)
SHAPES = {
    shape.name: shape
    for shape in (
        *PLAIN,
        SMOLLM2_Q4,
        SMOLLM2_Q8,
        LLAMA_135M_LONG,
        LLAMA_135M_CROWD,
        EXPERTS,
        LATENT,
        HYBRID,
    )
}


@dataclass(frozen=True)
class Model:
    shape: Shape
    folder: Path

    @property
    def name(self) -> str:
        return self.shape.name

    @property
    def gguf(self) -> Path | None:
        """The file that all servers are given."""
        return self.folder / "model.gguf" if self.shape.blocks else None


def made(shape: Shape, cache: Path = CACHE) -> Model:
    folder = cache / "models" / shape.name
    if not (folder / "ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if shape.blocks:
            _write_blocks(shape, folder, cache)
        elif shape.packaged:
            _widen(shape.packaged, folder, cache)
        else:
            _write_tokenizer(folder, shape.context_tokens)
            _write_weights(shape, folder)
        (folder / "ready").touch()
    return Model(shape, folder)


def fetched(name: str, cache: Path, *, stderr: bool = False) -> Settings:
    """Return the settings of a packaged model, fetched first if it is not there."""
    from rich.console import Console  # noqa: PLC0415

    from antiphon.cli.serve import fetch_models  # noqa: PLC0415
    from antiphon.config.settings import Settings  # noqa: PLC0415

    base = Settings()
    settings = replace(
        base,
        model=replace(base.model, path=name),
        load=replace(base.load, download_folder=str(cache)),
    )
    fetch_models(settings, Console(stderr=stderr))
    return settings


def standard_library() -> Iterator[str]:
    """Yield the text of the standard library's modules, in one order, about 12 MB of it."""
    left = _TEXT_BYTES_MAX
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("**/*.py")):
        if "site-packages" in file.parts or "test" in file.parts:
            continue
        text = file.read_text(errors="replace")
        left -= len(text)
        if left < 0:
            return
        yield text


def train_tokenizer(texts: Iterable[str], size: int, special: Sequence[str] = ()) -> Tokenizer:
    """Train byte-level BPE with GPT-2's pieces, the one form that every peer reads alike."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _write_tokenizer(folder: Path, context_tokens: int) -> None:
    tokenizer = train_tokenizer(standard_library(), VOCABULARY, [END])
    assert tokenizer.get_vocab_size() == VOCABULARY, "the text has too few merges"
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_tokens,
        "chat_template": CHAT_TEMPLATE,
    }
    _write(folder / "tokenizer_config.json", settings)


def _write(file: Path, settings: dict[str, object]) -> None:
    file.write_text(json.dumps(settings, indent=2) + "\n")


def _write_weights(shape: Shape, folder: Path) -> None:
    # Only here: a run over models that exist needs none of it.
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(shape.config(), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    file = folder / "config.json"
    # Where transformers 4 and older readers look.
    _write(file, json.loads(file.read_text()) | {"rope_theta": shape.rope_theta})


def _widen(name: str, folder: Path, cache: Path) -> None:
    """Write a packaged GGUF file as a folder of bf16, which every peer reads."""
    from safetensors.torch import save_file  # noqa: PLC0415
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    from antiphon.model_card.served_model import model_files  # noqa: PLC0415
    from antiphon.model_worker.model.formats.gguf import read_gguf_files  # noqa: PLC0415

    files = model_files(fetched(name, cache))
    _copy_description(files.folder, folder)
    wanted = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).state_dict()
    stored = read_gguf_files(files.weights, wanted, mapped=True)
    tensors = {
        each: tensor.decode(tensor.data.read()).bfloat16().contiguous()
        for each, tensor in stored.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _copy_description(source: Path, folder: Path) -> None:
    """Copy config.json and the tokenizer, in the form that every peer reads."""
    for file in source.iterdir():
        shutil.copy(file, folder)
    file = folder / "tokenizer_config.json"
    more = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    _write(file, json.loads(file.read_text()) | more)


def _write_blocks(shape: Shape, folder: Path, cache: Path) -> None:
    """Write a packaged GGUF file, its matrices quantized again if its blocks are of another type.

    Only the speed is compared, so that a second rounding does not matter.
    """
    import gguf  # noqa: PLC0415

    from antiphon.model_card.served_model import model_files  # noqa: PLC0415

    files = model_files(fetched(shape.packaged, cache))
    _copy_description(files.folder, folder)
    (packaged,) = files.weights
    plain, wanted = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType[shape.blocks]
    file, reader = folder / "model.gguf", gguf.GGUFReader(packaged)
    if shape.blocks in packaged.name:
        shutil.copy(packaged, file)
        return
    writer = gguf.GGUFWriter(file, reader.fields[gguf.Keys.General.ARCHITECTURE].contents())
    for name, field in reader.fields.items():
        if name != gguf.Keys.General.ARCHITECTURE and not name.startswith("GGUF."):
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        if tensor.tensor_type == plain:
            writer.add_tensor(tensor.name, tensor.data)
            continue
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, gguf.quantize(numbers, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.models")
    parser.add_argument("names", nargs="*", choices=[*SHAPES, []], default=[])
    parser.add_argument("--cache", type=Path, default=CACHE)
    arguments = parser.parse_args()
    for name in arguments.names or SHAPES:
        print(made(SHAPES[name], arguments.cache).folder)


if __name__ == "__main__":
    main()
