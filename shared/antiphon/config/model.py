"""The model that a cluster serves, and the device that runs it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from antiphon.config.schema import Config, Help, Seed, Threads, Tokens


class Dtype(StrEnum):
    """Number format of weights and cache; `auto` takes what the checkpoint says."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class ModelConfig(Config):
    """Where the model is and how it is loaded."""

    path: Annotated[
        str, Help("Folder with config.json and safetensors; `embedded` is the one in the package.")
    ] = "embedded"
    tokenizer_path: Annotated[
        str, Help("Folder with tokenizer.json; empty means the model's own.")
    ] = ""
    chat_template: Annotated[
        str, Help("File with a jinja template; empty means the tokenizer's own.")
    ] = ""
    context_tokens: Annotated[
        Tokens | None, Help("Most tokens of prompt and answer; unset means what the model says.")
    ] = None
    dtype: Annotated[Dtype, Help("Number format; auto takes what the checkpoint says.")] = (
        Dtype.AUTO
    )
    device: Annotated[Literal["auto", "cpu"], Help("Where the model runs.")] = "auto"
    threads: Annotated[
        Threads | None, Help("Threads of one worker's arithmetic; unset: one fewer than the cores.")
    ] = None
    random_seed: Annotated[Seed, Help("Seed of requests that name none; -1 draws one each.")] = -1
