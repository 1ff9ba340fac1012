"""The model that a cluster serves, how it is loaded, and the device that runs it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from antiphon.config.errors import ConfigError
from antiphon.config.quantization import QuantizationMethod
from antiphon.config.schema import Bytes, Config, Cores, Seed, Threads, Tokens


class Dtype(StrEnum):
    """Dtype of weights and arithmetic; `auto` takes that of the checkpoint."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class CacheDtype(StrEnum):
    """Dtype of keys and values in the cache; `auto` takes that of the model."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"

    @property
    def eight_bits(self) -> bool:
        return self in (CacheDtype.FP8_E4M3, CacheDtype.FP8_E5M2)


class LinearFormat(StrEnum):
    """Storage format of linear layers; `auto` packs them where the CPU kernels run.

    `plain` leaves the multiplication to torch, `packed` reorders the same weights for the CPU
    kernels. `int8` quantizes each output's weights to 255 values, `int8_dynamic` also quantizes
    each token's activations. `grouped` packs, too, and keeps the codes and scales of weights that
    the checkpoint stores in groups; on a GPU others are plain. `fp8` keeps weights that the
    checkpoint stores in fp8 for the kernel of a GPU, which rounds activations to fp8; others are
    plain. `tiled` leaves the multiplication to a kernel of a GPU that is batch-invariant.
    """

    AUTO = "auto"
    PLAIN = "plain"
    PACKED = "packed"
    INT8 = "int8"
    INT8_DYNAMIC = "int8_dynamic"
    GROUPED = "grouped"
    FP8 = "fp8"
    TILED = "tiled"


class KernelBackend(StrEnum):
    """Whose kernels compute an operation; `auto` takes the first that run on the device."""

    AUTO = "auto"
    CPU = "cpu"
    FLASHINFER = "flashinfer"
    TRITON = "triton"
    TORCH = "torch"


class ModelConfig(Config):
    """The model, its number formats and the resources it may use."""

    path: str = "embedded"
    """Path or name of the model: a folder with config.json and weights, a GGUF file, a short name
    (`antiphon models`), or a Hugging Face model ID (owner/name); `embedded` is the model in the
    package."""
    tokenizer_path: str = ""
    """Folder or Hugging Face model ID with tokenizer.json; empty: the model's tokenizer."""
    chat_template: str = ""
    """File with a Jinja chat template; empty: the tokenizer's chat template."""
    chat_template_name: str = ""
    """Name of the chat template for all conversations, if the tokenizer has several; empty:
    tool_use for requests with tools if it exists, else default."""
    completion_template: str = ""
    """Format of fill-in-the-middle prompts: deepseek_coder, star_coder, qwen_coder, or a JSON file;
    empty: the format whose special tokens the tokenizer has."""
    context_tokens: Tokens | None = None
    """Maximum length of prompt and output together, in tokens; unset: from the model's config."""
    dtype: Dtype = Dtype.AUTO
    """Data type of weights and activations; auto takes the checkpoint's, or bfloat16 where its
    weights are quantized and the CPU kernels run."""
    linear: LinearFormat = LinearFormat.AUTO
    """Storage format of the linear layers: as loaded, multiplied by torch (plain), packed for the
    CPU kernels (packed), packed with the codes and scales of weights that the checkpoint stores in
    groups (grouped), or rounded to 8 bits while loading (int8); int8_dynamic also rounds
    activations. On a GPU grouped keeps codes and scales, fp8 keeps weights in fp8 and rounds
    activations to it, and tiled multiplies so that results do not depend on the batch. auto is
    grouped if the CPU kernels are built, and on a GPU for weights in groups, fp8 on a GPU that
    multiplies it, tiled there for deterministic inference, else plain."""
    quantization: QuantizationMethod | None = None
    """Quantization method of the checkpoint, which must match its config; for unquantized
    checkpoints, fp8 and the torchao methods quantize while loading. Unset: from the checkpoint."""
    implementation: Literal["auto", "antiphon", "transformers"] = "auto"
    """Implementation of the model: antiphon's own layers, or the modules of transformers with
    antiphon's KV cache; auto prefers antiphon's for every supported family."""
    embedding: bool = False
    """Whether a generative model serves embeddings instead of text; models that only embed or score
    do not need it."""
    deterministic: bool = False
    """Enable deterministic inference: results do not depend on batch composition, chunked prefill
    or the prefix cache. The worker does not start if an operation cannot guarantee it, or beside a
    worker of the model with another instruction set or other kernels."""
    device: Annotated[str, Meta(max_length=32)] = "auto"
    """Device that runs the model: cpu, cuda, or cuda:N for one of several GPUs, from which on each
    rank of a worker has one; auto is cpu."""
    attention_backend: KernelBackend = KernelBackend.AUTO
    """Backend of attention over the KV cache: the CPU's kernels (cpu), FlashInfer's on a GPU whose
    modules are built ahead of time (flashinfer), Triton's on a GPU (triton), or torch's functions
    on the CPU (torch); auto takes the first that runs on the device."""
    prefill_attention_backend: KernelBackend = KernelBackend.AUTO
    """Backend of prefill attention; auto takes attention_backend. Prefills and decodes are
    rows of one pass, so both must have the same."""
    decode_attention_backend: KernelBackend = KernelBackend.AUTO
    """Backend of decode attention; auto takes attention_backend."""
    sampling_backend: KernelBackend = KernelBackend.AUTO
    """Backend of random sampling: Triton's on a GPU (triton), or torch's functions on the
    CPU (torch)."""
    expert_backend: KernelBackend = KernelBackend.AUTO
    """Backend of routed experts: Triton's on a GPU (triton), or torch's functions on the CPU
    (torch)."""
    fp8_backend: KernelBackend = KernelBackend.AUTO
    """Backend of linears whose weights stay in fp8: Triton's on a GPU (triton)."""
    threads: Threads | None = None
    """Number of compute threads of one worker; unset: all cores or all but one, with the reason in
    the plan printed at start."""
    cores: Cores | None = None
    """Maximum number of cores a worker computes on; unset: all. With several workers, serve gives
    each an even share of the machine."""
    memory_bytes: Bytes | None = None
    """Maximum memory of a worker for weights, activations and cache, in bytes, of which its ranks
    on a machine have even shares; unset: the free memory. With several workers, serve gives each an
    even share of the machine."""
    weight_version: Annotated[str, Meta(min_length=1, max_length=256)] = "default"
    """Version label of the weights, as the API reports it."""
    random_seed: Seed = -1
    """Seed of the generator that draws seeds for requests without one; with deterministic
    inference, the seed of each such request. -1 draws from the system."""

    def __post_init__(self) -> None:
        check_name(self.completion_template)
        if self.chat_template and self.chat_template_name:
            raise ValueError(
                "chat_template_name cannot be combined with chat_template; set one of them"
            )


class LoadFormat(StrEnum):
    """File format of the weights; `auto` takes the first of these that the folder has."""

    AUTO = "auto"
    SAFETENSORS = "safetensors"
    PT = "pt"
    GGUF = "gguf"
    DUMMY = "dummy"


class LoadConfig(Config):
    """Download, verification and loading of the weights."""

    format: LoadFormat = LoadFormat.AUTO
    """Format of the weights: safetensors, PyTorch (.bin, .pt) or GGUF; auto takes the first one
    found, in this order. dummy reads no files and generates reproducible random weights."""
    revision: str = ""
    """Branch, tag or commit of a Hugging Face model; empty: main."""
    download_folder: str = ""
    """Folder for downloaded models; empty: the Hugging Face cache (see HF_HOME) for models of the
    hub, ~/.cache/antiphon for models with a short name."""
    offline: bool = False
    """Whether only cached models are used and nothing is downloaded; HF_HUB_OFFLINE=1 has the same
    effect for models of the hub."""
    config_overrides: str = "{}"
    """JSON object whose fields replace those of the model's config.json."""
    checksum: str = ""
    """Source of the checksums that model files are verified against: a JSON file of SHA-256 sums, a
    Hugging Face model ID, or `hub` for the model of model.path; empty: no verification."""
    mmap: bool = True
    """Whether weight files are memory-mapped; without it they are copied, for file systems where
    mmap is slow."""

    def __post_init__(self) -> None:
        try:
            msgspec.json.decode(self.config_overrides, type=dict[str, msgspec.Raw])
        except msgspec.DecodeError as error:
            raise ValueError(f"config_overrides: must be a JSON object: {error}") from error


class CompletionTemplate(msgspec.Struct, frozen=True):
    """The markers before the prompt, between prompt and suffix, and after the suffix."""

    name: str
    marks: tuple[str, str, str]

    def write(self, prompt: str, suffix: str) -> str:
        before, between, behind = self.marks
        return f"{before}{prompt}{between}{suffix}{behind}"


# ruff: noqa: RUF001  # these bars are part of some markers
TEMPLATES = (
    CompletionTemplate("deepseek_coder", ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")),
    CompletionTemplate("star_coder", ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")),
    CompletionTemplate("qwen_coder", ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")),
)
"""Templates by SGLang's names."""

_FILE = ".json"


def check_name(name_or_file: str) -> None:
    """Raise `ValueError` with the names for anything but the name of a template or a file."""
    names = [template.name for template in TEMPLATES]
    if name_or_file and name_or_file not in names and not name_or_file.endswith(_FILE):
        raise ValueError(
            f"completion_template = {name_or_file!r}: must be {', '.join(names)} or a {_FILE} file"
        )


def read_template(name_or_file: str) -> CompletionTemplate:
    for template in TEMPLATES:
        if template.name == name_or_file:
            return template
    try:
        content = Path(name_or_file).expanduser().read_bytes()
        file = msgspec.json.decode(content, type=_TemplateFile)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"model.completion_template: {name_or_file}: {error}") from error
    begin, middle, end = file.fim_begin_token, file.fim_middle_token, file.fim_end_token
    inside = file.fim_position == "MIDDLE"
    return CompletionTemplate(file.name, (begin, middle, end) if inside else (begin, end, middle))


class _TemplateFile(msgspec.Struct, frozen=True):
    """A template file in SGLang's format; `fim_position` is the position of the middle marker."""

    name: str
    fim_begin_token: str
    fim_middle_token: str
    fim_end_token: str
    fim_position: Literal["MIDDLE", "END"]
