"""Decodes and resizes media in child processes: what they are given was written by strangers.

A decoder that is led astray by a file ends a process without keys or connections, whose memory and
time are limited.

python -m antiphon.encoder.decode_process RECIPE PARENT_PID MEMORY_BYTES_MAX
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from antiphon.encoder.audio import AudioPreprocessor, DecodedAudio
from antiphon.encoder.cache import DecodeJob
from antiphon.encoder.preprocess import DecodedImage, Preprocessor, PreprocessorConfig
from antiphon.encoder.videos import VideoPreprocessor
from antiphon.model_card.audio import AudioFeatures
from antiphon.service.process_pool import ProcessPool, serve
from antiphon.service.tenant_slots import TenantSlots
from antiphon.wire.errors import (
    DeadlineExceeded,
    EngineError,
    ErrorReply,
    Internal,
    InvalidRequest,
    decode_error,
    encode_error,
)
from antiphon.wire.ids import DEFAULT_TENANT, TenantId

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from antiphon.config.settings import EncoderConfig
    from antiphon.wire.claim import AudioWindow

_MEMORY_BYTES_MAX = 4 * 1024**3
"""Address space beside the medium: an interpreter with numpy and Pillow takes 1 GiB of it, an image
of 64 million pixels 256 MiB, and as much again while it is converted or turned."""
_COPIES = 2
"""Of the medium in its process: as it came, and as it is decoded."""
_JOB_BYTES = 64 * 1024
"""What stands beside a medium in its job, at most."""
_LENGTH_BYTES = 4
"""That of the head of a job, before it. The medium is behind it."""
_IMAGE_S, _VIDEO_S = 20.0, 60.0
"""Maximum time of one medium in a child that is ready."""
_JOBS_MAX = 1024
_IMAGES_BYTES_MAX = 1024**3


class DecodeSettings(msgspec.Struct, frozen=True):
    """Settings with which a child builds the same preprocessor as its parent."""

    recipe: PreprocessorConfig | None
    pixels_max: int
    videos: PreprocessorConfig | None = None
    audio: AudioFeatures | None = None


class _Frames(msgspec.Struct, frozen=True):
    """Row-major, of 8 bits each, and their shape (F, H, W, 3): F frames of H x W pixels."""

    data: memoryview
    shape: tuple[int, ...]

    @classmethod
    def of(cls, pixels: NDArray[np.uint8]) -> _Frames:
        return cls(pixels.reshape(-1).data, pixels.shape)

    @property
    def pixels(self) -> NDArray[np.uint8]:
        return np.frombuffer(self.data, np.uint8).reshape(self.shape)


class _Pixels(msgspec.Struct, frozen=True, tag=True):
    """The frames of a medium, and all of an image that is cut to slices.

    `width` and `height` are those of the image. The data are not copied where they are decoded.
    """

    frames: _Frames
    width: int
    height: int
    overview: _Frames | None = None


class _Features(msgspec.Struct, frozen=True, tag=True):
    """Those of a part of an audio file, float32, row-major."""

    data: memoryview
    shape: tuple[int, int]


class DecodeProcesses:
    """Decodes media, one per process at a time, while its pools are entered.

    Videos have processes of their own: images do not wait behind them. Tenants take turns, and so
    do images of different sizes of a tenant: a small one waits for one large one, however many
    there are.

    Attributes:
        video_slots: A video has one of them from before its fetch to its embedding: as many are in
            memory, as files or as frames, as there are processes for them, and one more; or two, of
            which one is the only one of its tenant.
    """

    def __init__(self, settings: DecodeSettings, config: EncoderConfig) -> None:
        shown = msgspec.json.encode(settings).decode()
        processes = config.decode_processes
        self.video_slots = TenantSlots(processes + 1)

        def pool(job_s: float, medium_bytes_max: int, bytes_max: int) -> ProcessPool:
            return ProcessPool(
                ("-m", "antiphon.encoder.decode_process", shown),
                job_s=job_s,
                processes=processes,
                jobs_max=_JOBS_MAX,
                bytes_max=bytes_max,
                owners_max=_JOBS_MAX,
                memory_bytes_max=_MEMORY_BYTES_MAX + _COPIES * medium_bytes_max,
            )

        self._features = settings.audio
        slots_bytes = (processes + 1) * (config.video_bytes_max + _JOB_BYTES)
        self.images = pool(_IMAGE_S, config.image_bytes_max, _IMAGES_BYTES_MAX)
        self.videos = pool(_VIDEO_S, config.video_bytes_max, slots_bytes)

    async def decode(
        self,
        image: bytes | bytearray,
        job: DecodeJob,
        *,
        timeout_s: float,
        tenant: TenantId = DEFAULT_TENANT,
    ) -> DecodedImage:
        """Decode and resize an image, or the frames of a video, which are not copied here.

        Raises:
            InvalidRequest: It is no image, has another size, or ended its process: by its memory
                or its time.
            EngineError: It is too large, or was not decoded in time.
        """
        video = job.video is not None
        pool, kind = (self.videos, "video") if video else (self.images, "image")
        outcome = await self._outcome(pool, kind, image, job, timeout_s, tenant)
        assert isinstance(outcome, _Pixels), "a job of pixels"
        overview = None if outcome.overview is None else outcome.overview.pixels
        size = outcome.width, outcome.height
        return DecodedImage(outcome.frames.pixels, *size, video=video, overview=overview)

    async def decode_audio(
        self,
        file: bytes | bytearray,
        window: AudioWindow,
        *,
        timeout_s: float,
        tenant: TenantId = DEFAULT_TENANT,
    ) -> DecodedAudio:
        """Decode a part of an audio file, and make its features.

        Raises:
            InvalidRequest: It is no such file, or ended its process: by its memory or its time.
            EngineError: It was not decoded in time.
        """
        job = DecodeJob(audio=window)
        outcome = await self._outcome(self.images, "audio", file, job, timeout_s, tenant)
        assert isinstance(outcome, _Features), "a job of features"
        features = np.frombuffer(outcome.data, np.float32).reshape(outcome.shape)
        assert self._features is not None, "checked by the service"
        frames = self._features.frames_of(window.seconds - window.start_s)
        # A copy: torch warns of memory that is read-only.
        return DecodedAudio(features.copy(), min(frames, self._features.frames))

    async def _outcome(
        self,
        pool: ProcessPool,
        kind: str,
        data: bytes | bytearray,
        job: DecodeJob,
        timeout_s: float,
        tenant: TenantId,
    ) -> _Pixels | _Features:
        began = time.monotonic()
        try:
            head = msgspec.msgpack.encode(job)
            length = len(head).to_bytes(_LENGTH_BYTES, "little")
            size = _size_class(job, len(data))
            result = await pool.run(
                length, head, data, timeout_s=timeout_s, owner=tenant, kind=size
            )
        except Internal as error:
            raise InvalidRequest(f"the {kind} could not be decoded", param="image") from error
        except DeadlineExceeded as error:
            if time.monotonic() - began >= timeout_s:
                raise
            text = f"the {kind} takes too long to decode"
            raise InvalidRequest(text, param="image") from error
        outcome = msgspec.msgpack.decode(result, type=_Pixels | _Features | ErrorReply)
        if isinstance(outcome, ErrorReply):
            raise decode_error(outcome)
        return outcome


def _size_class(job: DecodeJob, size_bytes: int) -> str:
    """What a medium is decoded in turns with: media of up to four times its size, in pixels.

    Without a header by its bytes. The time to decode it goes by that.
    """
    if job.audio is not None:
        return "audio"
    return str((job.width * job.height or size_bytes).bit_length() // 2)


def main(arguments: list[str]) -> None:
    shown, parent_pid, memory_bytes_max = arguments
    settings = msgspec.json.decode(shown, type=DecodeSettings)
    images, videos, audio = None, None, None
    if settings.recipe is not None:
        images = Preprocessor(settings.recipe, pixels_max=settings.pixels_max)
    if settings.audio is not None:
        audio = AudioPreprocessor(settings.audio)
    if settings.videos is not None:
        videos = VideoPreprocessor(settings.videos, pixels_max=settings.pixels_max)

    def work(data: bytes) -> bytes:
        begin = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
        job = msgspec.msgpack.decode(memoryview(data)[_LENGTH_BYTES:begin], type=DecodeJob)
        try:
            size = job.width, job.height
            if job.audio is not None:
                assert audio is not None, "checked by the parent"
                features = audio.decoded(data[begin:], job.audio)
                made = _Features(features.reshape(-1).view(np.uint8).data, features.shape)
                return msgspec.msgpack.encode(made)
            if job.video is None:
                assert images is not None, "checked by the parent"
                image = images.decoded(data[begin:], *size, job.limits)
            else:
                assert videos is not None, "checked by the parent"
                image = videos.decoded(data[begin:], *size, job.video, job.limits)
        except EngineError as error:
            return msgspec.msgpack.encode(encode_error(error))
        overview = None if image.overview is None else _Frames.of(image.overview)
        frames = _Frames.of(image.pixels)
        return msgspec.msgpack.encode(_Pixels(frames, image.width, image.height, overview))

    serve(work, parent_pid, memory_bytes_max)


if __name__ == "__main__":
    main(sys.argv[1:])
