"""One file on its way to its transcript, part by part.

Source of the thresholds and of what they do: Radford et al. 2022, arXiv:2212.04356, section 4.5.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from antiphon.gateway.http.core.fields import model_of
from antiphon.gateway.http.core.logprobs import TopLogprob, token_logprobs
from antiphon.gateway.http.openai.segments import (
    Segment,
    TimedTokens,
    compression_ratio,
    timed_tokens,
)
from antiphon.gateway.http.openai.words import UNSPACED, TimedPiece, Word, words_of
from antiphon.gateway.requests.generation_request import GenerationRequest, SamplingOptions
from antiphon.wire.base import FinishReason
from antiphon.wire.codec import pack_ids
from antiphon.wire.errors import Cancelled, Overloaded, RateLimited, Unavailable
from antiphon.wire.sampling import (
    AlignmentParams,
    AllowRange,
    DisallowFirst,
    DisallowTokens,
    StopStrings,
    TimestampRules,
    TokenOutputParams,
)
from antiphon.wire.token_outputs import unpack_floats
from antiphon.wire.tokenize import TranscriptionPrompt

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from aiohttp import web

    from antiphon.gateway.http.core.respond import ResponseHandler
    from antiphon.gateway.owner.actions import TextDelta
    from antiphon.gateway.requests.generation_request import MediumSource
    from antiphon.gateway.requests.tokenizer_client import TokenizerClient
    from antiphon.gateway.stream.stream import CollectedResponse
    from antiphon.wire.claim import AudioWindow
    from antiphon.wire.sampling import LogitProcessor
    from antiphon.wire.token_outputs import TokenOutput, TokenOutputsChunk
    from antiphon.wire.tokenize import TranscriptionCard

BEFORE_CHARACTERS: Final = 4096
"""How much of the text so far the next part gets; the tokenizer cuts it to half of the context."""
PAUSE_MIN_S: Final = 0.05
"""Before what was refused for load is submitted again, if the refusal does not say more."""
TAIL_S: Final = 0.1
"""What a file has behind its last whole part is left out if it is shorter: encoders pad with
silence, of which a model makes words."""
TEMPERATURES: Final = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""One after the other, until a text is accepted; the last one is in any case."""
COMPRESSION_MAX: Final = 2.4
"""A text that is compressed to less repeats itself."""
LOGPROB_MIN: Final = -1.0
"""Below it, on average, a text is a guess."""
NO_SPEECH_MAX: Final = 0.6
"""Above it, a guess is of silence, and is left out."""
CONTEXT_TEMPERATURE_MAX: Final = 0.5
"""A text that was sampled at more is not the beginning of the next one."""
ROUNDING: Final = 1e-6
"""Steps of time that are so few less than a whole number are that."""


class TranscriptionOptions(NamedTuple):
    """What a form says of all parts.

    Attributes:
        temperature: 0: see `TEMPERATURES`.
        patience_s: How long a request is submitted again and again, once the file was begun.
        logprobs: Whether those of all text tokens are returned.
        segments: Whether segments are returned.
        words: Whether words are returned, with their times.
    """

    model: str | None
    prompt: str
    temperature: float
    patience_s: float
    logprobs: bool = False
    segments: bool = True
    words: bool = False


class TranscriptDelta(NamedTuple):
    """The next text, and the logprobs of its tokens, if they are wanted."""

    text: str
    logprobs: list[TopLogprob]


class _Attempt(NamedTuple):
    """The output of a part at a temperature: a text for each of its segments, or all of it.

    `following_s` is where the next part begins, `details` its tokens.
    """

    temperature: float
    following_s: float
    timed: Sequence[TimedTokens]
    texts: Sequence[str]
    avg_logprob: float
    logprobs: Sequence[TopLogprob]
    details: TokenOutputsChunk | None = None

    @property
    def compression_ratio(self) -> float:
        return compression_ratio("".join(self.texts).strip())

    @property
    def repeats(self) -> bool:
        return self.compression_ratio > COMPRESSION_MAX

    @property
    def guessed(self) -> bool:
        return self.avg_logprob < LOGPROB_MIN


@dataclass(eq=False)
class TranscriptionJob:
    """One file on its way to its transcript.

    Attributes:
        whole: The whole of the file.
        asked: What its prompts ask for; without a language that is detected first.
        scored: Whether all segments say how likely silence is.
    """

    request: web.Request
    handler: ResponseHandler
    tokenizers: TokenizerClient
    card: TranscriptionCard
    options: TranscriptionOptions
    file: MediumSource
    whole: AudioWindow
    asked: TranscriptionPrompt
    scored: bool = False
    segments: list[Segment] = field(default_factory=list[Segment])
    words: list[Word] = field(default_factory=list[Word])
    logprobs: list[TopLogprob] = field(default_factory=list[TopLogprob])
    _texts: list[str] = field(default_factory=list[str])
    _context_from: int = 0  # index of the first text that prompts begin with
    _begun: bool = False  # whether anything of the file was computed
    _silence: dict[float, float] = field(default_factory=dict[float, float])  # by the part's start

    @property
    def text(self) -> str:
        return "".join(self._texts).strip()

    @property
    def language(self) -> str:
        """The code of the language, once it is known."""
        return self.asked.language or "en"

    async def run(self) -> None:
        """Transcribe all parts, in order."""
        start_s = 0.0
        while self._has_part(start_s):
            await self._detect(start_s)
            attempt, silent = await self._accepted(start_s)
            if not silent:
                await self._add(attempt, start_s)
            if attempt.temperature > CONTEXT_TEMPERATURE_MAX:
                self._context_from = len(self._texts)
            start_s = start_s + self.card.window_s if silent else attempt.following_s

    async def deltas(self) -> AsyncGenerator[TranscriptDelta]:
        """Transcribe all parts, and yield the text as it comes: nothing of it is taken back."""
        begun, start_s, logprobs = False, 0.0, list[TopLogprob]()
        while self._has_part(start_s):
            await self._detect(start_s)
            gen_request = self._part(start_s, self.options.temperature)
            async with aclosing(self._part_deltas(gen_request)) as deltas:
                async for delta in deltas:
                    found = self._logprobs(delta.details)
                    logprobs += found
                    self.logprobs += found
                    shown = delta.text if begun else delta.text.lstrip()
                    self._texts.append(shown)
                    if shown:
                        begun = True
                        yield TranscriptDelta(shown, logprobs)
                        logprobs = []
            start_s += self.card.window_s

    def _has_part(self, start_s: float) -> bool:
        return not start_s or start_s < self.whole.seconds - TAIL_S

    async def _accepted(self, start_s: float) -> tuple[_Attempt, bool]:
        """The first attempt that neither repeats itself nor guesses, or the last.

        Also whether it is one of silence.
        """
        fixed = self.options.temperature
        temperatures = (fixed,) if fixed else TEMPERATURES
        attempt = await self._attempt(start_s, temperatures[0])
        for temperature in temperatures[1:]:
            silent = await self._is_silent(attempt, start_s)
            if silent or not (attempt.repeats or attempt.guessed):
                return attempt, silent
            attempt = await self._attempt(start_s, temperature)
        return attempt, await self._is_silent(attempt, start_s)

    async def _attempt(self, start_s: float, temperature: float) -> _Attempt:
        answer = await self._answer(self._part(start_s, temperature, scored=True))
        tokens = _tokens(answer)
        logprobs = [each.logprob for each in tokens if each.logprob is not None]
        average = sum(logprobs) / len(logprobs) if logprobs else 0.0
        details = answer.choices[0].details
        if not self.asked.timestamps:
            text, following_s = answer.choices[0].text, start_s + self.card.window_s
            found = self._logprobs(details)
            return _Attempt(temperature, following_s, (), (text,), average, found, details)
        end_s = min(start_s + self.card.window_s, self.whole.seconds)
        ids = [each.token_id for each in tokens]
        timed, following_s = timed_tokens(ids, self.card, start_s, end_s)
        texts = await self.tokenizers.decode([each.ids for each in timed]) if timed else ()
        places = [place for each in timed for place in each.places]
        found = self._logprobs(details, places)
        return _Attempt(temperature, following_s, timed, texts, average, found, details)

    def _logprobs(
        self, details: TokenOutputsChunk | None, places: Sequence[int] | None = None
    ) -> list[TopLogprob]:
        """The logprobs of text tokens, or of those at these places, if they are wanted."""
        if not self.options.logprobs or details is None:
            return []
        if places is None:
            ids = [each.token_id for each in details.details.iter_tokens()]
            places = [place for place, token in enumerate(ids) if 0 <= token < self.card.end_id]
        found = token_logprobs(details)
        return [found[place] for place in places]

    async def _is_silent(self, attempt: _Attempt, start_s: float) -> bool:
        return attempt.guessed and await self._no_speech(start_s) > NO_SPEECH_MAX

    async def _no_speech(self, start_s: float) -> float:
        """The probability that a part is silent."""
        if start_s not in self._silence:
            await self._first_logprobs(start_s)
        return self._silence[start_s]

    async def _detect(self, start_s: float) -> None:
        """Find which language a part has, unless it is known or the only one."""
        if self.asked.language is None and self.card.languages:
            _, *logprobs = await self._first_logprobs(start_s)
            likeliest = max(range(len(logprobs)), key=logprobs.__getitem__)
            code = self.card.languages[likeliest]
            self.asked = msgspec.structs.replace(self.asked, language=code)

    async def _first_logprobs(self, start_s: float) -> tuple[float, ...]:
        """The logprobs of silence and of each language, of what follows a part's very beginning."""
        card = self.card
        silence = card.end_id if card.no_speech_id is None else card.no_speech_id
        details = TokenOutputParams(named_ids=(silence, *card.language_ids))
        beginning = TranscriptionPrompt(timestamps=True)
        gen_request = self._request(
            start_s, beginning, SamplingOptions(details=details), prompt="", tokens_max=0
        )
        following = _tokens(await self._answer(gen_request))[0]
        known = card.no_speech_id is not None
        self._silence[start_s] = math.exp(following.named[0]) if known else 0.0
        return following.named

    async def _answer(self, gen_request: GenerationRequest) -> CollectedResponse:
        due = self._due()
        while True:
            try:
                (answer,) = await self.handler.collect(self.request, [gen_request])
                self._begun = True
                break
            except (Overloaded, RateLimited) as error:
                await self._pause(error, due)
        if answer.choices[0].end.reason is FinishReason.ABORT:
            raise Cancelled("the request was aborted")
        return answer

    async def _part_deltas(self, gen_request: GenerationRequest) -> AsyncGenerator[TextDelta]:
        due, begun = self._due(), False
        while True:
            try:
                async with aclosing(self.handler.deltas(self.request, gen_request)) as deltas:
                    async for delta in deltas:
                        self._begun = begun = True
                        yield delta
            except (Overloaded, RateLimited) as error:
                if begun:
                    raise
                await self._pause(error, due)
            else:
                self._begun = True  # a part without text, too
                return

    def _due(self) -> float:
        """Until when the next request is submitted again; 0: once."""
        now = asyncio.get_running_loop().time()
        return now + self.options.patience_s if self._begun else 0.0

    @staticmethod
    async def _pause(refusal: Overloaded | RateLimited, due: float) -> None:
        """Wait before a request is submitted again, of a file that was begun.

        Raises:
            Overloaded: There is no time left.
            RateLimited: Likewise.
        """
        pause_s = max(PAUSE_MIN_S, refusal.retry_after_s or 0.0)
        if asyncio.get_running_loop().time() + pause_s > due:
            raise refusal
        await asyncio.sleep(pause_s)

    def _part(
        self, start_s: float, temperature: float, *, scored: bool = False
    ) -> GenerationRequest:
        scored = scored or self.options.logprobs
        details = TokenOutputParams(ids=True, logprobs=True) if scored else None
        sampling = SamplingOptions(
            temperature=temperature, processors=self._processors(), details=details
        )
        return self._request(start_s, self.asked, sampling, prompt=self._before)

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
            model=model_of(self.options.model),
            prompt=prompt,
            transcription=asked,
            media=(msgspec.structs.replace(self.file, audio=window),),
            stop=StopStrings(token_texts=self.options.logprobs or self.options.words),
            fields={"media": "file", "media.0": "file"},
            tokens_max=tokens_max,
            sampling=sampling,
            auto_truncate=False,
            continues=self._begun,
        )

    async def _add_words(self, attempt: _Attempt, start_s: float) -> None:
        """Find the times of the words of a part: its output is run again, behind its prompt.

        Raises:
            Unavailable: The worker is of a version that does not know of it.
        """
        if attempt.details is None or not attempt.timed:
            return
        card, details = self.card, attempt.details
        ids = [each.token_id for each in details.details.iter_tokens()]
        if ids[-1] == card.end_id:
            ids.pop()
        end_s = min(start_s + card.window_s, self.whole.seconds)
        alignment = AlignmentParams(
            tokens=len(ids),
            # Of the last step of a file there is less than a token of the encoder.
            source_tokens=max(1, math.floor((end_s - start_s) / card.timestamp_s + ROUNDING)),
            heads=card.alignment_heads,
            filter_width=card.filter_width,
        )
        asked = msgspec.structs.replace(self.asked, output=pack_ids(ids))
        sampling = SamplingOptions(details=TokenOutputParams(ids=True), alignment=alignment)
        answer = await self._answer(
            self._request(start_s, asked, sampling, prompt=self._before, tokens_max=0)
        )
        found = answer.choices[0].details
        times = () if found is None else unpack_floats(found.details.times)
        if len(times) != len(ids):
            raise Unavailable("a worker of an earlier version knows no times of words")
        # What is behind the last segment belongs to the next part.
        until_s = min(end_s, attempt.following_s)
        begins = [min(start_s + time * card.timestamp_s, until_s) for time in times]
        ends = [*begins[1:], begins[-1]]
        for each in attempt.timed:
            pieces = [
                TimedPiece(details.bytes_of(ids[place]), begins[place], ends[place])
                for place in each.places
            ]
            self.words += words_of(pieces, spaced=self.language not in UNSPACED)

    @property
    def _before(self) -> str:
        """The text before a part."""
        so_far = "".join(self._texts[self._context_from :])
        return f"{self.options.prompt} {so_far}"[-BEFORE_CHARACTERS:]

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

    async def _add(self, attempt: _Attempt, start_s: float) -> None:
        if self.options.words:
            await self._add_words(attempt, start_s)
        self._texts += attempt.texts
        self.logprobs += attempt.logprobs
        no_speech_prob = await self._no_speech(start_s) if self.scored else 0.0
        for each, text in zip(attempt.timed, attempt.texts, strict=False):
            self.segments.append(
                Segment(
                    id=len(self.segments),
                    seek=round(100 * start_s),
                    start=round(each.start, 2),
                    end=round(each.end, 2),
                    text=text,
                    tokens=list(each.ids),
                    temperature=attempt.temperature,
                    avg_logprob=attempt.avg_logprob,
                    compression_ratio=attempt.compression_ratio,
                    no_speech_prob=no_speech_prob,
                )
            )


def _tokens(answer: CollectedResponse) -> list[TokenOutput]:
    chunk = answer.choices[0].details
    return [] if chunk is None else list(chunk.details.iter_tokens())
