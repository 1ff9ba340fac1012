"""Videos whose frames are seen as images are, one by one, each scaled to a square."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Self

import msgspec

from antiphon.config.errors import ConfigError
from antiphon.model_card.config_json import read_json
from antiphon.model_card.processor_files import ModelKind, video_processor_file
from antiphon.model_card.vision.base import Size, check_unscaled
from antiphon.model_card.vision.videos import (
    EvenSampling,  # msgspec reads the fields of structs
    SeenVideo,
    SkippingSampling,
)

if TYPE_CHECKING:
    from pathlib import Path

    from antiphon.wire.claim import PixelLimits, VideoHeader


INTERN, ONEVISION = "internvl", "llava_onevision"
WORDS_MAX = 99
"""The largest number that is written in words."""
_ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
    "nineteen",
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def in_words(number: int) -> str:
    """A number from 0 to `WORDS_MAX` in English."""
    if number < len(_ONES):
        return _ONES[number]
    ten, one = divmod(number, 10)
    return _TENS[ten - 2] + (f"-{_ONES[one]}" if one else "")


class FrameVideos(msgspec.Struct, frozen=True, kw_only=True):
    """A frame is a tile of its own: InternVL, behind its number, LLaVA-OneVision, and SmolVLM.

    Attributes:
        placeholder: Token id of the placeholder, one for each row of an embedding.
        markers: What chat templates write for a video; of several the first one that is there.
        in_templates: Whether they know videos. Those of SmolVLM do not, as published, and
            transformers replaces them: the marker is a text to them, as which it comes to the same.
        frame_tokens: Rows of a frame.
        end_tokens: Rows behind the last frame.
        intro: Text before all of them, with places for their number in words, and the duration.
        before: Text before a frame, with places for its number, from 1 on, and its time; empty:
            none.
        after: Text behind it.
        between: Text between two frames.
        end: Text behind all of them.
        processing: Digest of what decides the embedding beside sampling and the weights.
    """

    placeholder: int
    markers: tuple[str, ...]
    in_templates: bool = True
    sampling: EvenSampling | SkippingSampling
    frame_tokens: Size
    end_tokens: int = 0
    intro: str = ""
    before: str = ""
    after: str = ""
    between: str = ""
    end: str = ""
    processing: bytes

    def within(self, limits: PixelLimits) -> Self:
        """The card of videos whose frames are limited by their request.

        Raises:
            InvalidRequest: No video has so many, or they are numbers of pixels.
        """
        check_unscaled(limits)
        return msgspec.structs.replace(self, sampling=self.sampling.within(limits))

    def seen(self, width: int, height: int, video: VideoHeader) -> SeenVideo:
        """What stands for a video, whose frames may have any size.

        Raises:
            InvalidRequest: It has too many frames.
        """
        del width, height
        indices, pieces = self.sampling.indices(video), list[str | int]()
        if not self.before:
            return SeenVideo((self.rows(len(indices)),), columns=0)
        if self.intro:
            seconds = int(video.frames / video.fps)
            length = f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
            pieces.append(self.intro.format(in_words(len(indices)), length))
        for number, index in enumerate(indices, start=1):
            seconds = int(index / video.fps)
            before = self.before.format(number, f"{seconds // 60:02d}:{seconds % 60:02d}")
            before = before if number == 1 else self.between + before
            pieces += [before, self.frame_tokens, self.after]
        if self.end:
            pieces.append(self.end)
        return SeenVideo(tuple(pieces), columns=0)

    def rows(self, frames: int) -> int:
        """Rows of the embedding of so many frames."""
        return frames * self.frame_tokens + self.end_tokens

    def processed(self, video: VideoHeader) -> bytes:
        """Digest of all that decides a video's embedding beside its bytes."""
        settings = msgspec.json.encode([self.sampling, video])
        return hashlib.sha256(b"frames\0" + self.processing + settings).digest()


class _FrameFile(msgspec.Struct, frozen=True):
    """The settings of InternVL's or LLaVA-OneVision's video processor.

    Whether it says to choose frames, all of a long video would be more than a context.
    """

    num_frames: Size | None = None
    initial_shift: bool | float = True
    """InternVL's: whether frames are the middle ones of their parts."""


FRAME_SAMPLINGS = {INTERN: EvenSampling(), ONEVISION: EvenSampling(frames=32, middle=False)}
"""As in InternVL's own examples, and as LLaVA-OneVision was trained (arXiv:2408.03326)."""


def read_frame_sampling(folder: Path) -> EvenSampling:
    """Read which frames the video processor of such a model chooses.

    Raises:
        ConfigError: The file is malformed, or not supported.
    """
    default = FRAME_SAMPLINGS[read_json(folder / "config.json", ModelKind).model_type]
    found = video_processor_file(folder)
    read = found.read(_FrameFile)
    frames, shift = read.num_frames or default.frames, read.initial_shift
    if default.middle and not isinstance(shift, bool) and shift:
        raise ConfigError(f"{found.file}: initial_shift = {shift}: must be true or false")
    middle = default.middle and bool(shift)
    most = max(frames, default.most)
    return msgspec.structs.replace(default, frames=frames, middle=middle, most=most)
