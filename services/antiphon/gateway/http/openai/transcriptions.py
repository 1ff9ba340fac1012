"""/v1/audio/transcriptions and /v1/audio/translations.

A file is transcribed in parts as long as the model takes at once, one after the other, each with
the end of the text so far as its prompt.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeVar

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, UnsetType

from antiphon.gateway.http.core.endpoints import Endpoints, operation
from antiphon.gateway.http.core.errors import shape_of
from antiphon.gateway.http.core.fields import NOTHING, UnsupportedField, model_of
from antiphon.gateway.http.core.logprobs import TopLogprob
from antiphon.gateway.http.core.operation import json_reply
from antiphon.gateway.http.openai.segments import Segment, subtitles
from antiphon.gateway.http.openai.transcription_job import TranscriptionJob, TranscriptionOptions
from antiphon.gateway.http.openai.words import Word
from antiphon.gateway.media.audio_header import read_audio_header
from antiphon.gateway.requests.generation_request import MediumSource
from antiphon.gateway.requests.tokenizer_client import CARD_TIMEOUT_S
from antiphon.model_card.audio import LANGUAGES
from antiphon.wire.claim import AudioWindow
from antiphon.wire.errors import InvalidRequest, Unsupported
from antiphon.wire.sampling import Temperature
from antiphon.wire.tokenize import TranscriptionPrompt

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence
    from contextlib import AbstractAsyncContextManager

    from antiphon.gateway.media.audio_header import AudioFileHeader
    from antiphon.wire.errors import EngineError

Format = Literal["json", "text", "srt", "verbose_json", "vtt"]
_F = TypeVar("_F", bound="TranslationForm")
_STREAMED = ("json", "text")
_SPEAKERS = UnsupportedField("speakers are not identified", NOTHING)
_NAMES = {name: code for code, name in LANGUAGES.items()}


class TranslationForm(msgspec.Struct, frozen=True, kw_only=True):
    """Translate an audio file (WAV, FLAC, MP3, Ogg, WebM or MP4) to English text."""

    model: str | None = None
    prompt: str = ""
    """Text before the audio, whose style and names the transcript follows; its end counts."""
    response_format: Format = "json"
    """`json`, `text`, `srt`, `verbose_json` or `vtt`."""
    temperature: Temperature = 0.0
    """Sampling temperature. 0 is greedy, and rises where the text of a part repeats itself or has a
    low probability, unless it is streamed."""

    UNSUPPORTED: ClassVar = {
        "chunking_strategy": UnsupportedField("files are cut into parts of equal length", ("auto",))
    }


class TranscriptionForm(TranslationForm, frozen=True, kw_only=True):
    """Transcribe an audio file (WAV, FLAC, MP3, Ogg, WebM or MP4)."""

    language: Annotated[str, Meta(max_length=100)] | None = None
    """ISO 639-1 code of the language. Unset: it is detected."""
    timestamp_granularities: Annotated[list[Literal["segment", "word"]], Meta(max_length=2)] = []
    """`segment`, which is the default, and `word`; requires `verbose_json`."""
    include: Annotated[list[Literal["logprobs"]], Meta(max_length=1)] = []
    """`logprobs`, of the tokens of the text; requires `json`."""
    stream: bool = False
    """Whether to return the text as server-sent events; for `json` and `text`."""

    UNSUPPORTED: ClassVar = {
        **TranslationForm.UNSUPPORTED,
        "keywords": UnsupportedField("words that guide the transcript are in prompt", NOTHING),
        "known_speaker_names": _SPEAKERS,
        "known_speaker_references": _SPEAKERS,
        "languages": UnsupportedField("a file has one language, that is in language", NOTHING),
    }


class DurationUsage(msgspec.Struct, frozen=True, kw_only=True, rename={"kind": "type"}):
    """What was used: the duration of the file, in whole seconds."""

    kind: Literal["duration"] = "duration"
    seconds: int


class TranscriptText(msgspec.Struct, frozen=True, kw_only=True):
    """The text of a file."""

    text: str
    logprobs: list[TopLogprob] | UnsetType = UNSET
    usage: DurationUsage


class Transcript(msgspec.Struct, frozen=True, kw_only=True):
    """The text of a file with its segments, and its words if asked for (`verbose_json`)."""

    task: Literal["transcribe", "translate"]
    language: str
    duration: float
    text: str
    segments: list[Segment] | UnsetType = UNSET
    words: list[Word] | UnsetType = UNSET
    usage: DurationUsage


class TextDeltaEvent(msgspec.Struct, frozen=True, kw_only=True, tag="transcript.text.delta"):
    delta: str
    logprobs: list[TopLogprob] | UnsetType = UNSET


class TextDoneEvent(msgspec.Struct, frozen=True, kw_only=True, tag="transcript.text.done"):
    text: str
    logprobs: list[TopLogprob] | UnsetType = UNSET


@dataclass(frozen=True)
class TranscriptionEndpoints(Endpoints):
    @operation(
        "POST",
        "/v1/audio/transcriptions",
        "Transcribe an audio file. The form's `file` has its bytes.",
        body=TranscriptionForm,
        form=True,
        reply=TranscriptText,
        alternative_types=("text/plain",),
    )
    async def _transcribe(self, request: web.Request) -> web.StreamResponse:
        async with self._form(request, TranscriptionForm) as (form, file):
            _check(form)
            language = None if form.language is None else _code(form.language)
            job = await self._job(
                request,
                form,
                file,
                language=language,
                streamed=form.stream,
                logprobs=bool(form.include),
                granularities=form.timestamp_granularities,
            )
            if not form.stream:
                return await _answer(job, form)

            def failed(error: EngineError) -> bytes:
                body = shape_of(request.path).write(error, None)
                return b"data: " + msgspec.json.encode(body) + b"\n\n"

            return await self.response_handler.relay(request, _events(job), failed)

    @operation(
        "POST",
        "/v1/audio/translations",
        "Translate an audio file to English text. The form's `file` has its bytes.",
        body=TranslationForm,
        form=True,
        reply=TranscriptText,
        alternative_types=("text/plain",),
    )
    async def _translate(self, request: web.Request) -> web.StreamResponse:
        async with self._form(request, TranslationForm) as (form, file):
            job = await self._job(request, form, file, translate=True)
            return await _answer(job, form)

    def _form(
        self, request: web.Request, kind: type[_F]
    ) -> AbstractAsyncContextManager[tuple[_F, bytes]]:
        most = self.runtime.settings.media.file_bytes_max
        return self.response_handler.form(request, kind, file_bytes_max=most)

    async def _job(
        self,
        request: web.Request,
        form: TranslationForm,
        file: bytes,
        *,
        language: str | None = None,
        translate: bool = False,
        streamed: bool = False,
        logprobs: bool = False,
        granularities: Sequence[str] = (),
    ) -> TranscriptionJob:
        """What is to be done with a file; its header is read, and its limits are checked."""
        model = model_of(form.model)
        self.check_model(model)
        card = (await self.tokenizers.card(CARD_TIMEOUT_S)).transcription
        if card is None:
            raise Unsupported(f"the model {self.model} does not transcribe audio", param="model")
        if "word" in granularities and not card.alignment_heads:
            text = "tokenizers of an earlier version know no times of words"
            raise Unsupported.at("timestamp_granularities", text)
        most = self.runtime.settings.encoder.audio_seconds_max
        try:
            header, digest = await asyncio.to_thread(_read, file, most)
        except InvalidRequest as error:
            error.param = "file"
            raise
        whole = AudioWindow(format=header.format, seconds=header.seconds)
        asked = TranscriptionPrompt(
            language=language,
            translate=translate,
            # By them a part begins where the one before has ended.
            timestamps=form.response_format not in _STREAMED
            or (not streamed and header.seconds > card.window_s),
        )
        patience_s = self.runtime.settings.gateway.request_timeout_s
        return TranscriptionJob(
            request,
            self.response_handler,
            self.tokenizers,
            card,
            TranscriptionOptions(
                form.model,
                form.prompt,
                form.temperature,
                patience_s,
                logprobs,
                segments=not granularities or "segment" in granularities,
                words="word" in granularities,
            ),
            MediumSource(file, "file", digest=digest),
            whole,
            asked,
            scored=form.response_format == "verbose_json",
        )


def _read(file: bytes, seconds_max: float) -> tuple[AudioFileHeader, bytes]:
    """The header and the SHA-256 of a file. Called in a thread."""
    return read_audio_header(file, seconds_max), hashlib.sha256(file).digest()


def _check(form: TranscriptionForm) -> None:
    if form.timestamp_granularities and form.response_format != "verbose_json":
        text = "requires the response_format verbose_json"
        raise InvalidRequest.at("timestamp_granularities", text)
    if form.include and form.response_format != "json":
        raise InvalidRequest.at("include", "requires the response_format json")
    if form.stream and form.response_format not in _STREAMED:
        raise Unsupported.at("stream", f"{form.response_format} is returned as a whole")


def _code(language: str) -> str:
    """The code of a language, which may be given by its name."""
    named = language.strip().lower()
    return _NAMES.get(named, named)


async def _events(job: TranscriptionJob) -> AsyncGenerator[bytes]:
    async with aclosing(job.deltas()) as deltas:
        async for delta in deltas:
            logprobs = delta.logprobs if job.options.logprobs else UNSET
            yield _event(TextDeltaEvent(delta=delta.text, logprobs=logprobs))
    yield _event(TextDoneEvent(text=job.text, logprobs=_logprobs(job)))


def _event(event: msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


async def _answer(job: TranscriptionJob, form: TranslationForm) -> web.Response:
    await job.run()
    if form.response_format == "json":
        usage = usage_of(job.whole.seconds)
        return json_reply(TranscriptText(text=job.text, logprobs=_logprobs(job), usage=usage))
    if form.response_format == "verbose_json":
        return json_reply(
            Transcript(
                task="translate" if job.asked.translate else "transcribe",
                language=LANGUAGES.get(job.language, job.language),
                duration=job.whole.seconds,
                text=job.text,
                segments=job.segments if job.options.segments else UNSET,
                words=job.words if job.options.words else UNSET,
                usage=usage_of(job.whole.seconds),
            )
        )
    if form.response_format == "text":
        return web.Response(text=job.text + "\n")
    return web.Response(text=subtitles(job.segments, form.response_format))


def _logprobs(job: TranscriptionJob) -> list[TopLogprob] | UnsetType:
    return job.logprobs if job.options.logprobs else UNSET


def usage_of(seconds: float) -> DurationUsage:
    return DurationUsage(seconds=math.ceil(seconds))
