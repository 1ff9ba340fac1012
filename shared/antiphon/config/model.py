"""The model that a cluster serves, and the device that runs it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from msgspec import Meta

from antiphon.config.completion_template import check_name
from antiphon.config.quantization import QuantizationMethod
from antiphon.config.schema import Bytes, Config, Cores, Help, Seed, Threads, Tokens


class Dtype(StrEnum):
    """Number format of weights and arithmetic; `auto` takes what the checkpoint says."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class CacheDtype(StrEnum):
    """Number format of keys and values; `auto` takes what the model computes in."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"

    @property
    def eight_bits(self) -> bool:
        """Whether a number is kept in a byte, and has a scale."""
        return self in (CacheDtype.FP8_E4M3, CacheDtype.FP8_E5M2)


class LinearFormat(StrEnum):
    """How the weights of linears are kept; `auto` packs them where the CPU's own kernels run.

    `plain` leaves the multiplication to torch, `packed` lays the same numbers out for our kernels.
    `int8` rounds each output's weights to 255 steps, `int8_dynamic` each token's activations too.
    """

    AUTO = "auto"
    PLAIN = "plain"
    PACKED = "packed"
    INT8 = "int8"
    INT8_DYNAMIC = "int8_dynamic"


class ModelConfig(Config):
    """Where the model is and how it is loaded."""

    path: Annotated[
        str,
        Help(
            "Folder with config.json and weights, a GGUF file, a short name (`antiphon models`) "
            "or a model of the Hugging Face hub (owner/name); `embedded` is the one in the package."
        ),
    ] = "embedded"
    tokenizer_path: Annotated[
        str,
        Help("Folder or model of the hub with tokenizer.json; empty means the model's own."),
    ] = ""
    chat_template: Annotated[
        str, Help("File with a jinja template; empty means the tokenizer's own.")
    ] = ""
    chat_template_name: Annotated[
        str,
        Help(
            "Name of the template for every conversation, of a tokenizer with several; empty takes "
            "tool_use for requests with tools where there is one, else default."
        ),
    ] = ""
    completion_template: Annotated[
        str,
        Help(
            "How text with a gap to fill is written: deepseek_coder, star_coder, qwen_coder, or a "
            "JSON file; empty takes the one whose marks the tokenizer has."
        ),
    ] = ""
    context_tokens: Annotated[
        Tokens | None, Help("Most tokens of prompt and answer; unset means what the model says.")
    ] = None
    dtype: Annotated[Dtype, Help("Number format; auto takes what the checkpoint says.")] = (
        Dtype.AUTO
    )
    linear: Annotated[
        LinearFormat,
        Help(
            "How weights are kept: by torch, packed for the CPU, or rounded to 8 bits at loading; "
            "int8_dynamic rounds activations too. auto packs where the CPU's kernels are built."
        ),
    ] = LinearFormat.AUTO
    quantization: Annotated[
        QuantizationMethod | None,
        Help(
            "How the checkpoint's linears are stored, which must be what it says itself; of plain "
            "numbers, fp8 and torchao's round at loading. Unset: what the checkpoint says."
        ),
    ] = None
    implementation: Annotated[
        Literal["auto", "antiphon", "transformers"],
        Help(
            "Whose layers run: antiphon's own, or the modules of transformers over our cache; auto "
            "takes its own for every family that it has."
        ),
    ] = "auto"
    embedding: Annotated[
        bool,
        Help(
            "Make vectors of texts with a model that would answer them; models that only embed or "
            "score need no word."
        ),
    ] = False
    deterministic: Annotated[
        bool,
        Help(
            "Hold that a request has the same bits whatever runs beside it, however its prompt is "
            "cut or cached; refused where an operation cannot hold it, and beside a worker of "
            "the model with another instruction set or other kernels."
        ),
    ] = False
    device: Annotated[Literal["auto", "cpu"], Help("Where the model runs.")] = "auto"
    threads: Annotated[
        Threads | None,
        Help("Threads of one worker's arithmetic; unset: all cores, or one fewer, and why."),
    ] = None
    cores: Annotated[
        Cores | None,
        Help(
            "Maximum number of cores that a worker computes on; unset: all. With several workers, "
            "serve gives each an even share of the machine."
        ),
    ] = None
    memory_bytes: Annotated[
        Bytes | None,
        Help(
            "Maximum memory of a worker: weights, activations and cache; unset: what is free. With "
            "several workers, serve gives each an even share of the machine."
        ),
    ] = None
    weight_version: Annotated[
        Annotated[str, Meta(min_length=1, max_length=256)],
        Help("What the weights are called; an update of them comes with another name."),
    ] = "default"
    random_seed: Annotated[
        Seed,
        Help(
            "Seed of the generator that draws the seeds of requests that name none; with "
            "deterministic inference it is the seed of each of them. -1 draws from the system."
        ),
    ] = -1

    def __post_init__(self) -> None:
        check_name(self.completion_template)
        if self.chat_template and self.chat_template_name:
            raise ValueError("chat_template_name cannot be combined with chat_template, a file")
