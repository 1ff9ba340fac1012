"""Decodes a part of an audio file, and makes the features of Whisper's encoder. In child processes.

Axes: N samples, F frames, M bands of the mel scale, B bins of a spectrum, C channels.
"""

from __future__ import annotations

import importlib
import io
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

from antiphon.wire.errors import InvalidRequest, Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager
    from fractions import Fraction

    from numpy.typing import NDArray

    from antiphon.model_card.audio import AudioFeatures
    from antiphon.wire.claim import AudioFormat, AudioWindow

    Samples = NDArray[np.float32]

CODECS = {
    "wav": frozenset(
        {
            *("pcm_u8", "pcm_s16le", "pcm_s24le", "pcm_s32le", "pcm_f32le", "pcm_f64le"),
            *("pcm_alaw", "pcm_mulaw"),
        }
    ),
    "flac": frozenset({"flac"}),
    "mp3": frozenset({"mp3"}),
    "ogg": frozenset({"vorbis", "opus", "flac"}),
    "webm": frozenset({"vorbis", "opus"}),
    "mp4": frozenset({"aac", "alac", "mp3", "opus", "flac"}),
}
"""FFmpeg's names of the usual ones, by demuxer. Its others are not exposed to untrusted data."""
_DECODERS = ("mp3float",)
"""FFmpeg's names of decoders that differ from their codec's."""
CHANNELS_MAX = 8
RATE_MIN, RATE_MAX = 1000, 1_048_575
"""Sampling rates of files, in Hz: FLAC's maximum; the filter of a resampler grows with its ratio.
"""
LEAD_S = 1.0
"""How long before its part a file is decoded: what a frame is may depend on those before it."""
TOLERANCE_S = 0.5
"""How much longer or shorter a file may be than its header says: encoders pad with silence."""
_BROKEN = (OSError, ValueError, EOFError, LookupError, RuntimeError, ArithmeticError, MemoryError)
"""Exceptions beside FFmpeg's own that PyAV raises on bytes that are not audio."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodedAudio:
    """The features (M, F) of a part of an audio file.

    Of these `frames` are of the audio, and the others of the silence behind it.
    """

    features: NDArray[np.float32]
    frames: int


class AudioPreprocessor:
    """Decodes and resamples a part of a file, and makes features of it. Has no mutable state."""

    def __init__(self, recipe: AudioFeatures) -> None:
        self._recipe = recipe

    def decoded(self, data: bytes | bytearray, window: AudioWindow) -> NDArray[np.float32]:
        """The features of a part of a file, (M, F); beyond its end there is silence.

        Raises:
            InvalidRequest: It is not audio of the format and duration that its header says, or has
                samples that are no numbers.
            Unsupported: The package that decodes audio is not installed.
        """
        return self.features(self._samples(data, window))

    def features(self, samples: Samples) -> NDArray[np.float32]:
        """The logarithms of mel spectra of samples (N,) and of silence behind them, (M, F).

        Source: Radford et al. 2022, arXiv:2212.04356, section 2.2; the mel scale and its triangles
        of equal area are those of Slaney's Auditory Toolbox (1998).
        """
        recipe, half = self._recipe, self._recipe.n_fft // 2
        padded = np.zeros(recipe.samples, np.float64)
        padded[: len(samples)] = samples[: recipe.samples]
        padded = np.pad(padded, half, mode="reflect")
        frames = np.lib.stride_tricks.sliding_window_view(padded, recipe.n_fft)
        frames = frames[:: recipe.hop_length][: recipe.frames]  # (F, n_fft)
        window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(recipe.n_fft) / recipe.n_fft)
        power = np.abs(np.fft.rfft(frames * window, axis=1)) ** 2  # (F, B)
        logs = np.log10(np.maximum(self._filters @ power.T, 1e-10))  # (M, F)
        logs = np.maximum(logs, logs.max() - 8.0)
        return ((logs + 4.0) / 4.0).astype(np.float32)

    @cached_property
    def _filters(self) -> NDArray[np.float64]:
        """The weight of each bin of a spectrum in each band, (M, B)."""
        recipe = self._recipe
        bins = np.fft.rfftfreq(recipe.n_fft, 1 / recipe.sampling_rate)  # Hz
        highest = _mel(np.array(recipe.sampling_rate / 2))
        edges = _hertz(np.linspace(0.0, float(highest), recipe.feature_size + 2))
        low, middle, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
        rising, falling = (bins - low) / (middle - low), (high - bins) / (high - middle)
        return np.maximum(0.0, np.minimum(rising, falling)) * 2.0 / (high - low)

    def _samples(self, data: bytes | bytearray, window: AudioWindow) -> Samples:
        """The samples of a part of a file, in one channel: (N,), at most as many as fit."""
        rate, wanted = self._recipe.sampling_rate, self._recipe.samples
        left, spare = round((window.seconds - window.start_s) * rate), round(TOLERANCE_S * rate)
        pieces, found = [np.zeros(0, np.float32)], 0
        for samples in file_samples(data, window.format, window.start_s, rate):
            pieces.append(samples)
            found += len(samples)
            if found > min(left, wanted) + spare:
                break
        if found < min(left, wanted) - spare:
            raise InvalidRequest("the audio ends before its header says")
        if left <= wanted and found > left + spare:
            raise InvalidRequest("the audio is longer than its header says")
        samples = np.concatenate(pieces)[:wanted]
        if not np.isfinite(samples).all():
            raise InvalidRequest("the audio has samples that are not finite numbers")
        return samples


def _mel(hertz: NDArray[np.float64]) -> NDArray[np.float64]:
    """Linear up to 1,000 Hz, which are 15 mel, and logarithmic above: 27 mel for a factor 6.4."""
    above = 15.0 + 27.0 * np.log(np.maximum(hertz, 1.0) / 1000.0) / np.log(6.4)
    return np.where(hertz < 1000.0, 3.0 * hertz / 200.0, above)


def _hertz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    above = 1000.0 * np.exp((mel - 15.0) * np.log(6.4) / 27.0)
    return np.where(mel < 15.0, 200.0 * mel / 3.0, above)


def file_samples(
    data: bytes | bytearray, kind: AudioFormat, start_s: float, rate: int
) -> Iterator[Samples]:
    """Decode a file from `start_s` on, at a `rate` in Hz, its channels averaged: pieces of (N,).

    Raises:
        InvalidRequest: It is not audio of this format and a known codec.
        Unsupported: The package that decodes audio is not installed.
    """
    try:
        library = cast("_AudioLibrary", importlib.import_module("av"))
    except ImportError as error:
        raise Unsupported("audio requires the extra antiphon[encoder]") from error
    try:
        # What is in a file is looked into when it is opened, by decoders, too.
        allowed = {"codec_whitelist": ",".join((*CODECS[kind], *_DECODERS))}
        with library.open(io.BytesIO(data), format=kind, options=allowed) as container:
            stream = next(iter(container.streams.audio), None)
            context = None if stream is None else stream.codec_context
            name = "none" if context is None else context.codec.canonical_name
            if stream is None or context is None or name not in CODECS[kind]:
                known = ", ".join(sorted(CODECS[kind]))
                raise InvalidRequest(f"the audio has the codec {name}; known are {known}")
            channels = context.channels
            if not 0 < channels <= CHANNELS_MAX:
                text = f"the audio has {channels} channels; the limit is {CHANNELS_MAX}"
                raise InvalidRequest(text)
            if not RATE_MIN <= context.sample_rate <= RATE_MAX:
                text = f"the audio has {context.sample_rate} samples a second"
                raise InvalidRequest(f"{text}; the limits are {RATE_MIN} and {RATE_MAX}")
            yield from _resampled(library, container, stream, start_s, rate)
    except (library.error.FFmpegError, *_BROKEN) as error:
        raise InvalidRequest(f"the audio cannot be decoded: {error}") from error


def _resampled(
    library: _AudioLibrary,
    container: _AudioContainer,
    stream: _AudioStream,
    start_s: float,
    rate: int,
) -> Iterator[Samples]:
    base, origin = float(stream.time_base), stream.start_time or 0
    if start_s > LEAD_S:
        container.seek(origin + int((start_s - LEAD_S) / base), stream=stream)
    # Channels by turns: of eight planes, PyAV 18 reads a ninth, which ends the process.
    resampler = library.AudioResampler(format="flt", rate=rate)
    skipped: int | None = None
    for frame in chain(container.decode(stream), (None,)):  # the last gives what is left
        if skipped is None:
            if frame is None:
                return
            began_s = ((frame.pts or 0) - origin) * base
            skipped = round((start_s - began_s) * rate)
        for made in resampler.resample(frame):
            channels = made.to_ndarray().reshape(made.samples, -1)  # (N, C)
            samples = channels.mean(axis=1, dtype=np.float64).astype(np.float32)
            behind = samples[min(max(skipped, 0), len(samples)) :]
            skipped -= len(samples) - len(behind)
            if len(behind):
                yield behind


class _AudioFrame(Protocol):
    pts: int | None
    samples: int

    def to_ndarray(self) -> NDArray[np.float32]: ...


class _AudioCodec(Protocol):
    canonical_name: str


class _AudioCodecContext(Protocol):
    codec: _AudioCodec
    channels: int
    sample_rate: int


class _AudioStream(Protocol):
    codec_context: _AudioCodecContext | None
    time_base: Fraction
    start_time: int | None


class _AudioStreams(Protocol):
    audio: Sequence[_AudioStream]


class _AudioContainer(Protocol):
    streams: _AudioStreams

    def decode(self, stream: _AudioStream, /) -> Iterator[_AudioFrame]: ...

    def seek(self, offset: int, *, stream: _AudioStream) -> None: ...


class _Resampler(Protocol):
    def resample(self, frame: _AudioFrame | None) -> Sequence[_AudioFrame]: ...


class _AudioErrors(Protocol):
    FFmpegError: type[Exception]


class _AudioLibrary(Protocol):
    """What is used of PyAV."""

    error: _AudioErrors

    def open(
        self,
        file: io.BytesIO,
        *,
        format: str,  # noqa: A002  # PyAV's name
        options: dict[str, str],
    ) -> AbstractContextManager[_AudioContainer]: ...

    def AudioResampler(self, *, format: str, rate: int) -> _Resampler: ...  # noqa: A002, N802
