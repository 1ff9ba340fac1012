"""How a model comes to this machine and into memory."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from antiphon.config.schema import Config, Help


class LoadFormat(StrEnum):
    """What the weights are in; `auto` takes the first of these that the folder holds."""

    AUTO = "auto"
    SAFETENSORS = "safetensors"
    PT = "pt"
    GGUF = "gguf"
    DUMMY = "dummy"


class LoadConfig(Config):
    """Where weights come from and how they are read."""

    format: Annotated[
        LoadFormat,
        Help(
            "Format of the weights: safetensors, torch's own (.bin, .pt) or GGUF; auto looks for "
            "them in this order. dummy reads none and draws them, the same ones each time."
        ),
    ] = LoadFormat.AUTO
    revision: Annotated[
        str, Help("Branch, tag or commit of a model of the Hugging Face hub; empty: main.")
    ] = ""
    download_folder: Annotated[
        str,
        Help(
            "Where fetched models are kept; empty: the hub's own cache (see HF_HOME) for its "
            "models, ~/.cache/antiphon for those with a short name."
        ),
    ] = ""
    offline: Annotated[
        bool,
        Help(
            "Use only models that are in the cache, and fetch none; HF_HUB_OFFLINE=1 does so for "
            "models of the hub."
        ),
    ] = False
    config_overrides: Annotated[
        str, Help("JSON object whose fields replace those of the model's config.json.")
    ] = "{}"
    checksum: Annotated[
        str,
        Help(
            "What the files are compared with: a JSON file of SHA-256 sums, a model of the hub, "
            "or `hub` for the one of model.path; empty: nothing."
        ),
    ] = ""
    mmap: Annotated[
        bool, Help("Map files into memory; off copies them, for file systems that map badly.")
    ] = True

    def __post_init__(self) -> None:
        try:
            msgspec.json.decode(self.config_overrides, type=dict[str, msgspec.Raw])
        except msgspec.DecodeError as error:
            raise ValueError(f"config_overrides is no JSON object: {error}") from error
