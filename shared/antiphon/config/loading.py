"""Settings for downloading and loading a model."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from antiphon.config.schema import Config


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
