"""/api/chat and /api/generate."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from antiphon.gateway.http.core.end_of_thinking import with_end_token
from antiphon.gateway.http.core.ndjson import CONTENT_TYPE
from antiphon.gateway.http.core.operation import Operation
from antiphon.gateway.http.core.reply import json_reply
from antiphon.gateway.http.ollama import parse as reading
from antiphon.gateway.http.ollama import unsupported as refused
from antiphon.gateway.http.ollama.replies import (
    OllamaChatReply,
    OllamaGenerateReply,
    OllamaMessage,
    now,
)
from antiphon.gateway.http.ollama.schema import OllamaChatBody, OllamaGenerateBody
from antiphon.gateway.http.ollama.write import (
    OllamaChatResponseWriter,
    OllamaGenerateResponseWriter,
)
from antiphon.gateway.parsing.formats import formats_of
from antiphon.model_card.served_model import served_names
from antiphon.wire.errors import EngineError, UnknownModel

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from aiohttp import web

    from antiphon.gateway.http.core.respond import ResponseHandler
    from antiphon.gateway.http.core.writer import ResponseWriter
    from antiphon.gateway.http.ollama.parse import ParsedOllamaRequest
    from antiphon.gateway.http.ollama.schema import OllamaBody
    from antiphon.gateway.http.ollama.write import OllamaResponseWriter
    from antiphon.gateway.parsing.formats import Formats
    from antiphon.gateway.requests.tokenizer_client import TokenizerClient
    from antiphon.gateway.stream.stream import RequestStream
    from antiphon.service.service import Runtime
    from antiphon.wire.ids import ModelName

_LOADED = "load"
"""`done_reason` of a request without a prompt: the model is loaded."""


class OllamaGenerationEndpoints:
    def __init__(
        self,
        response_handler: ResponseHandler,
        tokenizers: TokenizerClient,
        runtime: Runtime,
        model: ModelName,
    ) -> None:
        self._response_handler = response_handler
        self._tokenizers = tokenizers
        self._runtime = runtime
        self._model = model
        self._served = served_names(runtime.settings)

    def operations(self) -> list[Operation]:
        hello = {"messages": [{"role": "user", "content": "What is 2 + 3?"}]}
        return [
            Operation(
                "POST",
                "/api/chat",
                self._chat,
                "Generate the assistant's reply to a conversation.",
                body=OllamaChatBody,
                reply=OllamaChatReply,
                streamed_as=CONTENT_TYPE,
                unsupported=refused.CHAT,
                examples=(
                    hello,
                    hello | {"stream": False, "format": "json", "options": {"num_predict": 32}},
                    hello | {"logprobs": True, "top_logprobs": 2, "options": {"temperature": 0}},
                    {"messages": []},
                ),
            ),
            Operation(
                "POST",
                "/api/generate",
                self._generate,
                "Generate text for a prompt.",
                body=OllamaGenerateBody,
                reply=OllamaGenerateReply,
                streamed_as=CONTENT_TYPE,
                unsupported=refused.GENERATE,
                examples=(
                    {"prompt": "What is 2 + 3?", "system": "Be brief.", "stream": False},
                    {"prompt": "Once upon a time", "raw": True, "options": {"num_predict": 8}},
                ),
            ),
        ]

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        formats = await self._formats()
        body, parsed = await self._response_handler.parse_body(
            request,
            OllamaChatBody,
            lambda body: (body, reading.parse_chat(body, formats, self._served)),
            refused.CHAT,
        )
        if parsed is None:
            name = self._checked(body)
            return json_reply(
                OllamaChatReply(
                    model=name,
                    created_at=now(),
                    done=True,
                    done_reason=_LOADED,
                    message=OllamaMessage(),
                )
            )
        return await self._answer(request, body, parsed, OllamaChatResponseWriter)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        formats = await self._formats()
        body, parsed = await self._response_handler.parse_body(
            request,
            OllamaGenerateBody,
            lambda body: (body, reading.parse_generate(body, formats, self._served)),
            refused.GENERATE,
        )
        if parsed is None:
            name = self._checked(body)
            return json_reply(
                OllamaGenerateReply(
                    model=name, created_at=now(), done=True, done_reason=_LOADED, response=""
                )
            )
        with _as_prompt_error():
            return await self._answer(request, body, parsed, OllamaGenerateResponseWriter)

    async def _answer(
        self,
        request: web.Request,
        body: OllamaBody,
        parsed: ParsedOllamaRequest,
        kind: type[OllamaResponseWriter],
    ) -> web.StreamResponse:
        gen_request = await with_end_token(parsed.gen_request, self._tokenizers)

        async def writer(streams: Sequence[RequestStream]) -> ResponseWriter:
            return kind(body.model or self._model, streams[0], parsed)

        return await self._response_handler.answer(
            request, [gen_request], writer, streamed=parsed.stream
        )

    async def _formats(self) -> Formats:
        return await formats_of(
            self._runtime.settings.gateway, self._tokenizers.card, self._tokenizers.is_text
        )

    def _checked(self, body: OllamaBody) -> str:
        """Return the model name that the client used.

        Raises:
            UnknownModel: It is not served.
        """
        other = reading.model_of(body.model, self._served)
        if other is not None:
            raise UnknownModel.of(other, self._served)
        return body.model or self._model


@contextmanager
def _as_prompt_error() -> Generator[None]:
    """Attribute errors in the messages built from a prompt to the prompt."""
    try:
        yield
    except EngineError as error:
        if error.param == "messages":
            error.param = "prompt"
        raise
