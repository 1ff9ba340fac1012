"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.http.budgets import budgeted
from antiphon.gateway.http.native.record import Record
from antiphon.gateway.http.openai import reading, refused
from antiphon.gateway.http.openai.bodies import ChatBody, CompletionBody
from antiphon.gateway.http.openai.chat_voice import ChatVoice
from antiphon.gateway.http.openai.marks import marked
from antiphon.gateway.http.openai.replies import ChatReply, TextReply
from antiphon.gateway.http.openai.text_voice import CompletionVoice, Echo
from antiphon.gateway.http.openai.voice import Header
from antiphon.gateway.http.operation import Operation
from antiphon.gateway.parsing.formats import formats_of
from antiphon.wire.base import Role
from antiphon.wire.codec import unpack_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiohttp import web

    from antiphon.gateway.ask import Ask
    from antiphon.gateway.encode import TokenizerCalls
    from antiphon.gateway.http.answering import Answering
    from antiphon.gateway.http.native.in_session import InSession
    from antiphon.gateway.http.native.record import Keep, RankOf
    from antiphon.gateway.http.openai.reading import Posted
    from antiphon.gateway.http.voice import Voice
    from antiphon.gateway.parsing.formats import Formats
    from antiphon.gateway.stream import Stream
    from antiphon.service.service import Runtime
    from antiphon.wire.ids import ModelName

_HELLO = {"messages": [{"role": "user", "content": "What is 2 + 3?"}]}


class Completions:
    """Reads, and gives each answer its voice."""

    def __init__(
        self,
        answering: Answering,
        tokenizers: TokenizerCalls,
        runtime: Runtime,
        model: ModelName,
        in_session: InSession,
        rank_of: RankOf,
    ) -> None:
        self._answering = answering
        self._tokenizers = tokenizers
        self._runtime = runtime
        self._model = model
        self._in_session = in_session
        self._rank_of = rank_of

    def operations(self) -> list[Operation]:
        """Both kinds of completion."""
        return [
            Operation(
                method="POST",
                path="/v1/chat/completions",
                answer=self._chat,
                summary="The assistant's answer to a conversation.",
                body=ChatBody,
                reply=ChatReply,
                refused=refused.CHAT,
                examples=(
                    _HELLO,
                    _HELLO | {"stream": True, "stream_options": {"include_usage": True}},
                    _HELLO | {"logprobs": True, "top_logprobs": 2, "temperature": 0, "n": 2},
                    _HELLO | {"response_format": {"type": "json_object"}, "max_tokens": 32},
                ),
            ),
            Operation(
                method="POST",
                path="/invocations",
                answer=self._chat,
                summary="The same, at the path that SageMaker calls.",
                body=ChatBody,
                reply=ChatReply,
                refused=refused.CHAT,
            ),
            Operation(
                method="POST",
                path="/v1/completions",
                answer=self._complete,
                summary="Texts that go on from prompts.",
                body=CompletionBody,
                reply=TextReply,
                refused=refused.COMPLETION,
                examples=(
                    {"prompt": "Once upon a time", "max_tokens": 8},
                    {"prompt": ["One", "Two"], "max_tokens": 4, "echo": True, "logprobs": 1},
                    {"prompt": [1, 2, 3], "max_tokens": 4, "best_of": 2, "stop": ["\n"]},
                    {"prompt": "1, 2, ", "suffix": ", 4", "max_tokens": 4},
                ),
            ),
        ]

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        gateway = self._runtime.settings.gateway
        formats = await formats_of(gateway, self._tokenizers.card, self._tokenizers.writes)
        posted = await self._answering.read(
            request, ChatBody, lambda body: reading.chat(body, formats), refused.CHAT
        )
        posted = self._with_usage(await self._with_mark(posted, formats))

        async def voice(streams: Sequence[Stream]) -> Voice:
            header = self._header(posted, streams)
            return ChatVoice(
                header,
                streams,
                posted.telling,
                cached=self._cached,
                record=self._record(header, posted, streams, [None]),
            )

        return await self._answering.answer(request, posted.asks, voice, streamed=posted.stream)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        posted, params = await self._answering.read(
            request,
            CompletionBody,
            lambda body: (reading.completion(body), body.session_params),
            refused.COMPLETION,
        )
        posted = self._with_usage(posted)
        if params is not None:
            (ask,) = posted.asks

            async def voice_in_session(whole: Ask, streams: Sequence[Stream], keep: Keep) -> Voice:
                asked = msgspec.structs.replace(posted, asks=(whole,))
                return await self._text_voice(asked, streams, keep)

            return await self._in_session.answer(
                request, ask, params, voice_in_session, streamed=posted.stream
            )

        async def voice(streams: Sequence[Stream]) -> Voice:
            return await self._text_voice(posted, streams)

        return await self._answering.answer(request, posted.asks, voice, streamed=posted.stream)

    def _with_usage(self, posted: Posted) -> Posted:
        """End the stream with usage if the server does so and the request does not say."""
        if posted.telling.usage_last is not None:
            return posted
        usage_last = self._runtime.settings.gateway.stream_usage
        telling = msgspec.structs.replace(posted.telling, usage_last=usage_last)
        return msgspec.structs.replace(posted, telling=telling)

    async def _text_voice(
        self, posted: Posted, streams: Sequence[Stream], keep: Keep | None = None
    ) -> CompletionVoice:
        header = self._header(posted, streams)
        echoes = await self._echoes(posted, streams)
        return CompletionVoice(
            header,
            streams,
            posted.telling,
            cached=self._cached,
            echoes=echoes,
            record=self._record(header, posted, streams, [echo.first for echo in echoes], keep),
        )

    async def _with_mark(self, posted: Posted, formats: Formats) -> Posted:
        """Find out which token ends the thinking, where a form or a budget needs it."""
        (ask,) = posted.asks
        ask = await marked(ask, self._tokenizers)
        if posted.budget is not None:
            ask = await budgeted(
                ask,
                posted.budget,
                formats.reasoning,
                self._tokenizers,
                param="max_thinking_tokens",
            )
        return msgspec.structs.replace(posted, asks=(ask,))

    @property
    def _cached(self) -> bool:
        return self._runtime.settings.gateway.cache_report

    def _header(self, posted: Posted, streams: Sequence[Stream]) -> Header:
        return Header(
            id=posted.telling.name or str(posted.asks[0].key or streams[0].submit.request_id),
            created=int(time.time()),
            model=self._model,
            weight_version=weight_version(self._runtime),
        )

    def _record(
        self,
        header: Header,
        posted: Posted,
        streams: Sequence[Stream],
        firsts: Sequence[str | None],
        keep: Keep | None = None,
    ) -> Record | None:
        """Notes what is told at the end of choices, or kept, where anything is."""
        telling = posted.telling
        if not (telling.meta_info or telling.output_ids or keep):
            return None
        return Record(
            streams,
            [telling.recorded] * len(streams),
            firsts=firsts,
            rank_of=self._rank_of,
            weight_version=header.weight_version,
            keep=keep,
        )

    async def _echoes(self, posted: Posted, streams: Sequence[Stream]) -> list[Echo]:
        """The prompts as text, where they are told: ids are written by a tokenizer.

        Of a truncated prompt the text is that of the ids which are left.
        """
        if not posted.telling.echo:
            return [Echo() for _ in streams]
        texts = [
            None if stream.truncated else ask.prompt
            for ask, stream in zip(posted.asks, streams, strict=True)
        ]
        given = [
            unpack_ids(stream.submit.prompt_ids)
            for stream, text in zip(streams, texts, strict=True)
            if text is None
        ]
        if given:
            ask = posted.asks[0]
            # Text did not have the special tokens that the tokenizer added.
            skips = ask.stop.skip_special_tokens or ask.prompt is not None
            written = iter(await self._tokenizers.decode(given, skip_special_tokens=skips))
            texts = [text if text is not None else next(written) for text in texts]
        firsts = [""] * len(texts)
        if posted.telling.logprobs:
            ids = [unpack_ids(stream.submit.prompt_ids[:4]) for stream in streams]
            firsts = list(await self._tokenizers.decode(ids, skip_special_tokens=False))
        return [Echo(text or "", first) for text, first in zip(texts, firsts, strict=True)]


def weight_version(runtime: Runtime) -> str:
    """What the weights of the workers are called."""
    beats = (peer.beat for peer in runtime.peers.of(Role.WORKER))
    named = (beat.worker.weight_version for beat in beats if beat.worker is not None)
    return next((name for name in named if name), "default")
