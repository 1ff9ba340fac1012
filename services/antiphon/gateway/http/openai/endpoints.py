"""/v1/chat/completions and /v1/completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.http.core.chat import with_reasoning_tokens
from antiphon.gateway.http.core.endpoints import Endpoints, operation
from antiphon.gateway.http.core.meta_info import GenerateOutputs, weight_version
from antiphon.gateway.http.openai import parse as reading
from antiphon.gateway.http.openai.schema import ChatBody, ChatReply, CompletionBody, TextReply
from antiphon.gateway.http.openai.write import (
    ChatResponseWriter,
    CompletionHeader,
    CompletionResponseWriter,
    PromptEcho,
)
from antiphon.wire.codec import unpack_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiohttp import web

    from antiphon.gateway.http.core.meta_info import PersistReply, RankOf
    from antiphon.gateway.http.core.session_requests import SessionRequests
    from antiphon.gateway.http.core.writer import ResponseWriter
    from antiphon.gateway.http.openai.parse import ParsedOpenAiRequest
    from antiphon.gateway.stream.stream import RequestStream

_HELLO = {"messages": [{"role": "user", "content": "What is 2 + 3?"}]}


@dataclass(frozen=True)
class CompletionsEndpoints(Endpoints):
    in_session: SessionRequests
    rank_of: RankOf

    @operation(
        "POST",
        "/v1/chat/completions /invocations",
        "Create a chat completion. SageMaker uses the path /invocations.",
        body=ChatBody,
        reply=ChatReply,
        examples=(
            _HELLO,
            _HELLO | {"stream": True, "stream_options": {"include_usage": True}},
            _HELLO | {"logprobs": True, "top_logprobs": 2, "temperature": 0, "n": 2},
            _HELLO | {"response_format": {"type": "json_object"}, "max_tokens": 32},
        ),
    )
    async def _chat(self, request: web.Request) -> web.StreamResponse:
        formats = await self.tokenizers.formats()
        parsed = await self.response_handler.parse_body(
            request, ChatBody, lambda body: reading.parse_chat(body, formats)
        )
        parsed = self._with_usage(await with_reasoning_tokens(parsed, self.tokenizers))

        async def writer(streams: Sequence[RequestStream]) -> ResponseWriter:
            header = self._header(parsed, streams)
            return ChatResponseWriter(
                header,
                streams,
                parsed.reply_options,
                cached=self.runtime.settings.gateway.cache_report,
                record=self._record(header, parsed, streams, [None]),
            )

        return await self.response_handler.answer(
            request, parsed.gen_requests, writer, streamed=parsed.stream
        )

    @operation(
        "POST",
        "/v1/completions",
        "Create a text completion.",
        body=CompletionBody,
        reply=TextReply,
        examples=(
            {"prompt": "Once upon a time", "max_tokens": 8},
            {"prompt": ["One", "Two"], "max_tokens": 4, "echo": True, "logprobs": 1},
            {"prompt": [1, 2, 3], "max_tokens": 4, "best_of": 2, "stop": ["\n"]},
            {"prompt": "1, 2, ", "suffix": ", 4", "max_tokens": 4},
        ),
    )
    async def _complete(self, request: web.Request) -> web.StreamResponse:
        parsed, params = await self.response_handler.parse_body(
            request,
            CompletionBody,
            lambda body: (reading.parse_completion(body), body.session_params),
        )
        return await self.in_session.answer(
            request, self._with_usage(parsed), params, self._completion_writer
        )

    def _with_usage(self, parsed: ParsedOpenAiRequest) -> ParsedOpenAiRequest:
        """Apply the server's default for usage in streams, if the request sets none."""
        if parsed.reply_options.usage_last is not None:
            return parsed
        usage_last = self.runtime.settings.gateway.stream_usage
        reply_options = msgspec.structs.replace(parsed.reply_options, usage_last=usage_last)
        return msgspec.structs.replace(parsed, reply_options=reply_options)

    async def _completion_writer(
        self,
        parsed: ParsedOpenAiRequest,
        streams: Sequence[RequestStream],
        keep: PersistReply | None,
    ) -> CompletionResponseWriter:
        header = self._header(parsed, streams)
        echoes = await self._echoes(parsed, streams)
        return CompletionResponseWriter(
            header,
            streams,
            parsed.reply_options,
            cached=self.runtime.settings.gateway.cache_report,
            echoes=echoes,
            record=self._record(header, parsed, streams, [echo.first for echo in echoes], keep),
        )

    def _header(
        self, parsed: ParsedOpenAiRequest, streams: Sequence[RequestStream]
    ) -> CompletionHeader:
        return CompletionHeader(
            id=parsed.reply_options.rid
            or str(parsed.gen_requests[0].key or streams[0].submit.request_id),
            created=streams[0].created_unix_s,
            model=self.model,
            weight_version=weight_version(self.runtime),
        )

    def _record(
        self,
        header: CompletionHeader,
        parsed: ParsedOpenAiRequest,
        streams: Sequence[RequestStream],
        firsts: Sequence[str | None],
        persist: PersistReply | None = None,
    ) -> GenerateOutputs | None:
        """Collects what is returned at the end of choices or stored, if anything is."""
        reply_options = parsed.reply_options
        if not (
            reply_options.return_meta_info or reply_options.return_output_ids_in_sglext or persist
        ):
            return None
        return GenerateOutputs(
            streams,
            [reply_options.recorded] * len(streams),
            firsts=firsts,
            rank_of=self.rank_of,
            weight_version=header.weight_version,
            persist=persist,
        )

    async def _echoes(
        self, parsed: ParsedOpenAiRequest, streams: Sequence[RequestStream]
    ) -> list[PromptEcho]:
        """Return the prompts as text, if requested; token ids are decoded by a tokenizer.

        For a truncated prompt the text is that of the remaining ids.
        """
        if not parsed.reply_options.echo:
            return [PromptEcho() for _ in streams]
        texts = [
            None if stream.truncated else gen_request.prompt
            for gen_request, stream in zip(parsed.gen_requests, streams, strict=True)
        ]
        given = [
            unpack_ids(stream.submit.prompt_ids)
            for stream, text in zip(streams, texts, strict=True)
            if text is None
        ]
        if given:
            gen_request = parsed.gen_requests[0]
            # The text lacks the special tokens that the tokenizer added.
            skips = gen_request.stop.skip_special_tokens or gen_request.prompt is not None
            written = iter(await self.tokenizers.decode(given, skip_special_tokens=skips))
            texts = [text if text is not None else next(written) for text in texts]
        firsts = [""] * len(texts)
        if parsed.reply_options.logprobs:
            ids = [unpack_ids(stream.submit.prompt_ids[:4]) for stream in streams]
            firsts = list(await self.tokenizers.decode(ids, skip_special_tokens=False))
        return [PromptEcho(text or "", first) for text, first in zip(texts, firsts, strict=True)]
