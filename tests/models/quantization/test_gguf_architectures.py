"""Lone GGUF files with experts and of Gemma, laid out and described as by llama.cpp's converter.

The layouts were confirmed with llama.cpp 0.3.36 of llama-cpp-python, which computes the same logits
of these very files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gguf
import pytest
import torch
import transformers
from tests.models.families import SIZES, Row
from tests.models.parity import LINEARS, Saved, error, save, texts
from tests.models.stepper import logits_of
from tests.models.test_load_formats import rotated_as_llama_cpp_does, tensors_of
from tests.support.models import load, open_model
from tests.unit.config.described.gguf_files import byte_level, write
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from antiphon.config.errors import ConfigError
from antiphon.config.model import Dtype
from antiphon.model_card.card import read_card
from antiphon.model_card.converted.folder import gguf_folder
from antiphon.model_card.files import find_files
from antiphon.model_worker.model.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

SIZE: Mapping[str, object] = {**SIZES, "vocab_size": 261, "hidden_size": 64}
"""The tokenizer's 261 tokens, which the file describes."""
EXPERTS = {"num_experts_per_tok": 2}
EXPERT = re.compile(r"\.experts\.(\d+)\.")


def one_more(name: str, tensor: Tensor) -> Tensor:
    return tensor + 1 if name.endswith("norm.weight") else tensor


def as_it_is(_: str, tensor: Tensor) -> Tensor:
    return tensor


def rotated(name: str, tensor: Tensor) -> Tensor:
    heads = {"q_proj": 4, "k_proj": 2}
    found = next((heads[part] for part in heads if f".{part}." in name), None)
    return tensor if found is None else rotated_as_llama_cpp_does(tensor, found)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One architecture.

    Attributes:
        name: What llama.cpp calls it.
        changed: How the converter changes a tensor.
        by_transformers: Whether transformers reads such files as well.
    """

    name: str
    row: Row
    changed: Callable[[str, Tensor], Tensor] = as_it_is
    by_transformers: bool = True

    def __str__(self) -> str:
        return self.row.name


CASES = (
    Case(
        name="llama",
        row=Row(
            "mixtral",
            transformers.MixtralForCausalLM,
            {"num_experts": 6, "num_local_experts": 6, **EXPERTS, "sliding_window": None},
            sizes=SIZE,
        ),
        changed=rotated,
        by_transformers=False,
    ),
    Case(
        name="qwen2moe",
        row=Row(
            "qwen2-moe",
            transformers.Qwen2MoeForCausalLM,
            {
                "num_experts": 6,
                **EXPERTS,
                "moe_intermediate_size": 32,
                "shared_expert_intermediate_size": 40,
                "norm_topk_prob": False,
                "tie_word_embeddings": True,
            },
            sizes=SIZE,
        ),
    ),
    Case(
        name="qwen3moe",
        row=Row(
            "qwen3-moe",
            transformers.Qwen3MoeForCausalLM,
            {
                "num_experts": 6,
                **EXPERTS,
                "head_dim": 32,
                "moe_intermediate_size": 32,
                "norm_topk_prob": True,
            },
            sizes=SIZE,
        ),
    ),
    Case(
        name="gemma",
        row=Row("gemma", transformers.GemmaForCausalLM, {"head_dim": 32}, sizes=SIZE),
        changed=one_more,
        by_transformers=False,
    ),
    Case(
        name="gemma2",
        row=Row(
            "gemma2",
            transformers.Gemma2ForCausalLM,
            {
                "head_dim": 32,
                "query_pre_attn_scalar": 32,
                "sliding_window": 20,
                "attn_logit_softcapping": 5.0,
                "final_logit_softcapping": 3.0,
            },
            sizes=SIZE,
        ),
        changed=one_more,
    ),
)


SETTINGS = {
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Settings of a file that only some have, by the config's field."""


def described(case: Case) -> dict[str, object]:
    config = case.row.made()
    said: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    if "gemma" not in case.name:  # whose files leave it out
        said["rope.freq_base"] = float(config.rope_parameters["rope_theta"])
    fields = {name: value for name, value in case.row.fields.items() if value is not None}
    return said | {key: fields[name] for key, name in SETTINGS.items() if name in fields}


def written(case: Case, folder: Path, file: Path, *, changed: bool = True) -> Path:
    """The safetensors of a folder as llama.cpp's converter writes them."""
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == case.name)
    names = gguf.get_tensor_name_map(arch, case.row.made().num_hidden_layers)
    stacks: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors_of(folder).items():
        expert = EXPERT.search(name)
        own = names.get_name(EXPERT.sub(".experts.", name), try_suffixes=(".weight", ".bias"))
        assert own is not None, name
        data = case.changed(name, tensor) if changed else tensor
        stacks.setdefault(own, {})[int(expert[1]) if expert else -1] = data
    contents = {
        own: (parts[-1] if -1 in parts else torch.stack([parts[n] for n in sorted(parts)]))
        for own, parts in stacks.items()
    }
    return write(
        file,
        architecture=case.name,
        shape=described(case),
        tokenizer=byte_level(),
        # One row is written without its axis.
        tensors={
            own: (data[0] if data.shape[0] == 1 else data).float().numpy()
            for own, data in contents.items()
        },
    )


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def saved(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save(case.row, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def file(case: Case, saved: Saved, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(case, saved.folder, tmp_path_factory.mktemp("gguf") / "model.gguf")


@pytest.mark.parametrize("linear", LINEARS)
def test_lone_file_has_the_logits_of_the_model_it_was_made_from(
    saved: Saved, file: Path, tmp_path: Path, linear: str
) -> None:
    files = find_files(file, described_in=gguf_folder([file], tmp_path))
    model = open_model(files, dtype="float32", linear=linear)
    ours = logits_of(model, texts()[-1], chunk=23)
    assert error(ours, saved.of_prompt) < saved.row.limit


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.by_transformers], indirect=True, ids=str
)
def test_transformers_reads_the_same_numbers(case: Case, saved: Saved, file: Path) -> None:
    model = case.row.architecture(case.row.made()).eval()
    read: Any = load_gguf_checkpoint(file, return_tensors=True, model_to_load=model)
    missing, unexpected = model.load_state_dict(read["tensors"], strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    with torch.inference_mode():
        theirs = model(torch.tensor([texts()[-1]])).logits[0]
    assert error(theirs, saved.of_prompt) < saved.row.limit


def test_plan_counts_the_tensors_of_the_file(saved: Saved, file: Path, tmp_path: Path) -> None:
    card = read_card(find_files(file, described_in=gguf_folder([file], tmp_path)))
    whole = read_card(saved.folder)
    assert card.weights.count == whole.weights.count
    assert card.kv_bytes(Dtype.FLOAT32) == whole.kv_bytes(Dtype.FLOAT32)
    assert card.experts == whole.experts
    assert card.tied is whole.tied


@pytest.mark.parametrize(
    "case", [case for case in CASES if "num_experts" in case.row.fields], indirect=True, ids=str
)
def test_experts_of_another_number_are_refused(
    case: Case, saved: Saved, file: Path, tmp_path: Path
) -> None:
    assert saved.row is case.row
    folder = gguf_folder([file], tmp_path)
    files = find_files(file, described_in=folder, overrides='{"num_experts": 5}')
    with pytest.raises(ModelLoadError, match=r"exps\.weight holds 6 experts, and the model has 5"):
        load(files)


@pytest.mark.parametrize("architecture", ["qwen2", "gemma2", "deepseek2"])
def test_experts_of_other_architectures_are_refused_by_name(
    architecture: str, tmp_path: Path
) -> None:
    shape = described(CASES[0])
    file = write(
        tmp_path / "a.gguf", architecture=architecture, shape=shape, tokenizer=byte_level()
    )
    expected = (
        f"architecture '{architecture}' cannot be read from a GGUF file alone, only llama, qwen2,"
        if architecture == "deepseek2"
        else f"architecture '{architecture}' with experts cannot be read from a GGUF file alone, "
        "only llama, qwen2moe, qwen3moe"
    )
    with pytest.raises(ConfigError, match=expected):
        gguf_folder([file], tmp_path)
