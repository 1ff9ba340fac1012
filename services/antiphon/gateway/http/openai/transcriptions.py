"""/v1/audio/transcriptions and /v1/audio/translations.

A file is transcribed in parts as long as the model takes at once, one after the other, each with
the end of the text so far as its prompt.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta

from antiphon.gateway.http.core.endpoints import Endpoints, operation
from antiphon.gateway.http.core.errors import shape_of
from antiphon.gateway.http.core.fields import UnsupportedField, model_of
from antiphon.gateway.http.core.operation import json_reply
from antiphon.gateway.media.audio_header import read_audio_header
from antiphon.gateway.requests.generation_request import (
    GenerationRequest,
    MediumSource,
    SamplingOptions,
)
from antiphon.gateway.requests.tokenizer_client import CARD_TIMEOUT_S
from antiphon.model_card.audio import LANGUAGES
from antiphon.wire.base import FinishReason
from antiphon.wire.claim import AudioWindow
from antiphon.wire.codec import unpack_ids
from antiphon.wire.errors import Cancelled, InvalidRequest, Unsupported
from antiphon.wire.sampling import (
    AllowRange,
    AllowTokens,
    DisallowFirst,
    DisallowTokens,
    Temperature,
    TimestampRules,
    TokenOutputParams,
)
from antiphon.wire.tokenize import TranscriptionPrompt

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence
    from contextlib import AbstractAsyncContextManager

    from antiphon.gateway.http.core.respond import ResponseHandler
    from antiphon.gateway.requests.tokenizer_client import TokenizerClient
    from antiphon.gateway.stream.stream import CollectedResponse
    from antiphon.wire.errors import EngineError
    from antiphon.wire.sampling import LogitProcessor
    from antiphon.wire.tokenize import TranscriptionCard

Format = Literal["json", "text", "srt", "verbose_json", "vtt"]
MS = 1000
_F = TypeVar("_F", bound="TranslationForm")
BEFORE_CHARACTERS = 4096
"""How much of the text so far the next part gets; the tokenizer cuts it to half of the context."""
_STREAMED = ("json", "text")
_NAMES = {name: code for code, name in LANGUAGES.items()}


class TranslationForm(msgspec.Struct, frozen=True, kw_only=True):
    """Translate an audio file (WAV, FLAC, MP3 or Ogg) to English text."""

    model: str | None = None
    prompt: str = ""
    """Text before the audio, whose style and names the transcript follows; its end counts."""
    response_format: Format = "json"
    """`json`, `text`, `srt`, `verbose_json` or `vtt`."""
    temperature: Temperature = 0.0
    """Sampling temperature; 0 is greedy."""

    UNSUPPORTED: ClassVar = {
        "chunking_strategy": UnsupportedField("files are cut into parts of equal length", ("auto",))
    }


class TranscriptionForm(TranslationForm, frozen=True, kw_only=True):
    """Transcribe an audio file (WAV, FLAC, MP3 or Ogg)."""

    language: str | None = None
    """ISO 639-1 code of the language. Unset: it is detected."""
    timestamp_granularities: Annotated[list[Literal["segment", "word"]], Meta(max_length=2)] = []
    """`segment`; requires `verbose_json`."""
    stream: bool = False
    """Whether to return the text as server-sent events; for `json` and `text`."""

    UNSUPPORTED: ClassVar = {
        **TranslationForm.UNSUPPORTED,
        "include": UnsupportedField("logprobs are not returned", ([], "")),
    }


class DurationUsage(msgspec.Struct, frozen=True, kw_only=True, rename={"kind": "type"}):
    """What was used: the duration of the file, in whole seconds."""

    kind: Literal["duration"] = "duration"
    seconds: int


class TranscriptText(msgspec.Struct, frozen=True, kw_only=True):
    """The text of a file."""

    text: str
    usage: DurationUsage


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a transcript between two timestamps, in seconds.

    `seek` is where the part of the file begins that the model had at once, in steps of 10 ms.
    """

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    """Average logprob of the tokens of that part of the file."""
    compression_ratio: float
    """Length of the text relative to its compressed length."""


class Transcript(msgspec.Struct, frozen=True, kw_only=True):
    """The text of a file with its segments (`verbose_json`)."""

    task: Literal["transcribe", "translate"]
    language: str
    duration: float
    text: str
    segments: list[Segment]
    usage: DurationUsage


class TimedTokens(msgspec.Struct, frozen=True):
    """Text tokens between two timestamps, in seconds from the beginning of the file."""

    start: float
    end: float
    ids: tuple[int, ...]


class TextDeltaEvent(msgspec.Struct, frozen=True, kw_only=True, tag="transcript.text.delta"):
    delta: str


class TextDoneEvent(msgspec.Struct, frozen=True, kw_only=True, tag="transcript.text.done"):
    text: str
    usage: DurationUsage


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
            job = await self._job(request, form, file, language=language)
            if not form.stream:
                return await _answer(job, form)

            def failed(error: EngineError) -> bytes:
                body = shape_of(request.path).write(error, None)
                return b"data: " + msgspec.json.encode(body) + b"\n\n"

            return await self.response_handler.relay(request, job.events(), failed)

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
    ) -> TranscriptionJob:
        """What is to be done with a file; its header is read, and its limits are checked."""
        model = model_of(form.model)
        self.check_model(model)
        card = (await self.tokenizers.card(CARD_TIMEOUT_S)).transcription
        if card is None:
            raise Unsupported(f"the model {self.model} does not transcribe audio", param="model")
        try:
            header = await asyncio.to_thread(read_audio_header, file)
        except InvalidRequest as error:
            error.param = "file"
            raise
        most = self.runtime.settings.encoder.audio_seconds_max
        if header.seconds > most:
            text = f"the audio takes {header.seconds:g} s; the limit is {most:g} s"
            raise InvalidRequest(text, param="file")
        whole = AudioWindow(format=header.format, seconds=header.seconds)
        asked = TranscriptionPrompt(
            language=language,
            translate=translate,
            timestamps=form.response_format not in _STREAMED,
        )
        return TranscriptionJob(
            request, self.response_handler, self.tokenizers, card, form, file, whole, asked
        )


def _check(form: TranscriptionForm) -> None:
    if "word" in form.timestamp_granularities:
        text = "only segments have timestamps"
        raise Unsupported.at("timestamp_granularities", text)
    if form.timestamp_granularities and form.response_format != "verbose_json":
        text = "requires the response_format verbose_json"
        raise InvalidRequest.at("timestamp_granularities", text)
    if form.stream and form.response_format not in _STREAMED:
        raise Unsupported.at("stream", f"{form.response_format} is returned as a whole")


def _code(language: str) -> str:
    """The code of a language, which may be given by its name."""
    named = language.strip().lower()
    return _NAMES.get(named, named)


async def _answer(job: TranscriptionJob, form: TranslationForm) -> web.Response:
    await job.run()
    if form.response_format == "json":
        return json_reply(TranscriptText(text=job.text, usage=usage_of(job.whole.seconds)))
    if form.response_format == "verbose_json":
        return json_reply(
            Transcript(
                task="translate" if job.asked.translate else "transcribe",
                language=LANGUAGES.get(job.language, job.language),
                duration=job.whole.seconds,
                text=job.text,
                segments=job.segments,
                usage=usage_of(job.whole.seconds),
            )
        )
    if form.response_format == "text":
        return web.Response(text=job.text + "\n")
    return web.Response(text=subtitles(job.segments, form.response_format))


@dataclass(eq=False)
class TranscriptionJob:
    """One file on its way to its transcript.

    Attributes:
        whole: The file.
        asked: What its prompts ask for; without a language that is detected first.
    """

    request: web.Request
    handler: ResponseHandler
    tokenizers: TokenizerClient
    card: TranscriptionCard
    form: TranslationForm
    file: bytes
    whole: AudioWindow
    asked: TranscriptionPrompt
    segments: list[Segment] = field(default_factory=list[Segment])
    _texts: list[str] = field(default_factory=list[str])

    @property
    def text(self) -> str:
        return "".join(self._texts).strip()

    @property
    def language(self) -> str:
        """The code of the language, once it is known."""
        return self.asked.language or "en"

    async def run(self) -> None:
        """Transcribe all parts, in order."""
        for start_s in self._starts():
            await self._detect(start_s)
            answer = await self._answer(self._part(start_s))
            if self.asked.timestamps:
                await self._add_segments(answer, start_s)
            else:
                self._texts.append(answer.choices[0].text)

    async def events(self) -> AsyncGenerator[bytes]:
        """Transcribe all parts as server-sent events."""
        for start_s in self._starts():
            await self._detect(start_s)
            async with aclosing(self.handler.texts(self.request, self._part(start_s))) as deltas:
                async for delta in deltas:
                    shown = delta if self.text else delta.lstrip()
                    self._texts.append(shown)
                    if shown:
                        yield _event(TextDeltaEvent(delta=shown))
        yield _event(TextDoneEvent(text=self.text, usage=usage_of(self.whole.seconds)))

    def _starts(self) -> list[float]:
        parts = math.ceil(self.whole.seconds / self.card.window_s)
        return [part * self.card.window_s for part in range(max(1, parts))]

    async def _detect(self, start_s: float) -> None:
        """Let the model say which language a part has, unless it is known or the only one."""
        if self.asked.language is not None or not self.card.languages:
            return
        processors = (AllowTokens(token_ids=self.card.language_ids),)
        sampling = SamplingOptions(
            temperature=0.0, processors=processors, details=TokenOutputParams(ids=True)
        )
        asked = TranscriptionPrompt()
        gen_request = self._request(start_s, asked, sampling, prompt="", tokens_max=1)
        (found,) = _ids(await self._answer(gen_request))
        code = self.card.languages[self.card.language_ids.index(found)]
        self.asked = msgspec.structs.replace(self.asked, language=code)

    async def _answer(self, gen_request: GenerationRequest) -> CollectedResponse:
        (answer,) = await self.handler.collect(self.request, [gen_request])
        if answer.choices[0].end.reason is FinishReason.ABORT:
            raise Cancelled("the request was aborted")
        return answer

    def _part(self, start_s: float) -> GenerationRequest:
        before = f"{self.form.prompt} {''.join(self._texts)}"[-BEFORE_CHARACTERS:]
        details = None
        if self.asked.timestamps:
            details = TokenOutputParams(ids=True, logprobs=True)
        sampling = SamplingOptions(
            temperature=self.form.temperature, processors=self._processors(), details=details
        )
        return self._request(start_s, self.asked, sampling, prompt=before)

    def _request(
        self,
        start_s: float,
        asked: TranscriptionPrompt,
        sampling: SamplingOptions,
        *,
        prompt: str,
        tokens_max: int | None = None,
    ) -> GenerationRequest:
        window = msgspec.structs.replace(self.whole, start_s=start_s)
        return GenerationRequest(
            api="transcriptions",
            model=model_of(self.form.model),
            prompt=prompt,
            transcription=asked,
            media=(MediumSource(self.file, "file", audio=window),),
            fields={"media": "file", "media.0": "file"},
            tokens_max=tokens_max,
            sampling=sampling,
            auto_truncate=False,
        )

    def _processors(self) -> tuple[LogitProcessor, ...]:
        """What must not be sampled: see `TranscriptionCard`."""
        card, made = self.card, list["LogitProcessor"]()
        if card.suppressed:
            made.append(DisallowTokens(token_ids=card.suppressed))
        if card.first_suppressed:
            made.append(DisallowFirst(token_ids=card.first_suppressed))
        if self.asked.timestamps:
            made.append(
                TimestampRules(
                    first_id=card.first_timestamp_id,
                    end_id=card.end_id,
                    initial_max=card.first_timestamp_max,
                )
            )
        else:
            made.append(AllowRange(first=0, last=card.first_timestamp_id - 1))
        return tuple(made)

    async def _add_segments(self, answer: CollectedResponse, start_s: float) -> None:
        end_s = min(start_s + self.card.window_s, self.whole.seconds)
        found = timed_tokens(_ids(answer), self.card, start_s, end_s)
        texts = await self.tokenizers.decode([each.ids for each in found]) if found else ()
        average = _average_logprob(answer)
        for each, text in zip(found, texts, strict=True):
            self._texts.append(text)
            self.segments.append(
                Segment(
                    id=len(self.segments),
                    seek=round(100 * start_s),
                    start=round(each.start, 2),
                    end=round(each.end, 2),
                    text=text,
                    tokens=list(each.ids),
                    temperature=self.form.temperature,
                    avg_logprob=average,
                    compression_ratio=compression_ratio(text),
                )
            )


def _ids(answer: CollectedResponse) -> tuple[int, ...]:
    chunk = answer.choices[0].details
    return () if chunk is None else tuple(unpack_ids(chunk.details.token_ids))


def _average_logprob(answer: CollectedResponse) -> float:
    chunk = answer.choices[0].details
    tokens = [] if chunk is None else list(chunk.details.iter_tokens())
    logprobs = [each.logprob for each in tokens if each.logprob is not None]
    return sum(logprobs) / len(logprobs) if logprobs else 0.0


def _event(event: msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


def timed_tokens(
    ids: Sequence[int], card: TranscriptionCard, start_s: float, end_s: float
) -> list[TimedTokens]:
    """Cut the output of a part of a file, from `start_s` to `end_s`, at its timestamps.

    Special tokens are left out. A segment without an end lasts to that of the part.
    """
    found, begin, text = list[TimedTokens](), start_s, list[int]()
    for token in ids:
        if token >= card.first_timestamp_id:
            steps = token - card.first_timestamp_id
            at = min(start_s + steps * card.timestamp_s, end_s)
            if text:
                found.append(TimedTokens(begin, at, tuple(text)))
                text = []
            begin = at
        elif token < card.end_id:
            text.append(token)
    if text:
        found.append(TimedTokens(begin, end_s, tuple(text)))
    return found


def usage_of(seconds: float) -> DurationUsage:
    return DurationUsage(seconds=math.ceil(seconds))


def compression_ratio(text: str) -> float:
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0


def subtitles(segments: Sequence[Segment], form: Literal["srt", "vtt"]) -> str:
    """Segments as SubRip or WebVTT."""
    blocks = ["WEBVTT\n"] if form == "vtt" else []
    mark = "." if form == "vtt" else ","
    for number, each in enumerate(segments, start=1):
        times = f"{_clock(each.start, mark)} --> {_clock(each.end, mark)}"
        # Both formats end a block at an empty line, and mark times by an arrow.
        text = " ".join(each.text.split()).replace("-->", "->")
        blocks.append(f"{number}\n{times}\n{text}\n" if form == "srt" else f"{times}\n{text}\n")
    return "\n".join(blocks)


def _clock(seconds: float, mark: str) -> str:
    whole, ms = divmod(round(seconds * MS), MS)
    minutes, second = divmod(whole, 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour:02}:{minute:02}:{second:02}{mark}{ms:03}"
