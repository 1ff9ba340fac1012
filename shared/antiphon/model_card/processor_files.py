"""Where the settings of a model's processors are, and what becomes of pixels."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from antiphon.model_card.config_json import parse_json, read_json
from antiphon.model_card.vision.base import Size

PROCESSOR, NESTING = "preprocessor_config.json", "processor_config.json"
VIDEO_PROCESSOR = "video_preprocessor_config.json"

T = TypeVar("T")


class _Nesting(msgspec.Struct, frozen=True):
    image_processor: msgspec.Raw = msgspec.Raw(b"null")
    video_processor: msgspec.Raw = msgspec.Raw(b"null")


class ImageProcessorFile(msgspec.Struct, frozen=True):
    """The settings of a model's image processor, as JSON, and the file that has them.

    They are part of processor_config.json, or preprocessor_config.json, or there are none. Those of
    videos have a file of their own beside these, before preprocessor_config.json.
    """

    file: Path
    content: bytes = b""

    def read(self, type_: type[T]) -> T:
        """Decode what is needed of them; without any it is all by default.

        Raises:
            ConfigError: They are malformed.
        """
        return parse_json(self.content or b"{}", type_, self.file)

    def digest(self, config: msgspec.Struct) -> bytes:
        """Digest of all of them, and of what was read of a model's config."""
        return hashlib.sha256(msgspec.json.encode(config) + b"\0" + self.content).digest()


def image_processor_file(folder: Path) -> ImageProcessorFile:
    """Find the settings of a model's image processor, where transformers does."""
    return _nested(folder, "image_processor") or _own(folder / PROCESSOR)


def video_processor_file(folder: Path) -> ImageProcessorFile:
    """Find the settings of a model's video processor, where transformers does."""
    file = folder / VIDEO_PROCESSOR
    own = file if file.is_file() else folder / PROCESSOR
    return _nested(folder, "video_processor") or _own(own)


def _nested(folder: Path, processor: str) -> ImageProcessorFile | None:
    file = folder / NESTING
    if not file.is_file():
        return None
    content = bytes(getattr(read_json(file, _Nesting), processor))
    return None if content == b"null" else ImageProcessorFile(file, content)


def _own(file: Path) -> ImageProcessorFile:
    return ImageProcessorFile(file, file.read_bytes() if file.is_file() else b"")


class PixelFields(msgspec.Struct, frozen=True):
    """What becomes of pixels, in a preprocessor_config.json, with CLIP's defaults."""

    resample: Annotated[int, Meta(ge=0, le=5)] = 3
    do_resize: bool = True
    do_rescale: bool = True
    rescale_factor: float = 1 / 255
    do_normalize: bool = True
    image_mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)


class SquareEdges(msgspec.Struct, frozen=True):
    """A size that is to be a square."""

    height: Size = 384
    width: Size = 384


class ModelKind(msgspec.Struct, frozen=True):
    """Which family a config.json is of."""

    model_type: str = ""
