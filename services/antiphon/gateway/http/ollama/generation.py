"""POST /api/chat and /api/generate."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from antiphon.gateway.http.ndjson import CONTENT_TYPE
from antiphon.gateway.http.ollama import reading, refused
from antiphon.gateway.http.ollama.bodies import OllamaChatBody, OllamaGenerateBody
from antiphon.gateway.http.ollama.replies import (
    OllamaChatReply,
    OllamaGenerateReply,
    OllamaMessage,
    now,
)
from antiphon.gateway.http.ollama.voice import OllamaChatVoice, OllamaGenerateVoice
from antiphon.gateway.http.openai.marks import marked
from antiphon.gateway.http.operation import Operation
from antiphon.gateway.http.reply import json_reply
from antiphon.gateway.parsing.formats import formats_of
from antiphon.service.model import served_names
from antiphon.wire.errors import EngineError, UnknownModel

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from aiohttp import web

    from antiphon.gateway.encode import TokenizerCalls
    from antiphon.gateway.http.answering import Answering
    from antiphon.gateway.http.ollama.bodies import OllamaBody
    from antiphon.gateway.http.ollama.voice import OllamaVoice
    from antiphon.gateway.http.openai.reading import Posted
    from antiphon.gateway.http.voice import Voice
    from antiphon.gateway.parsing.formats import Formats
    from antiphon.gateway.stream import Stream
    from antiphon.service.service import Runtime
    from antiphon.wire.ids import ModelName

_LOADED = "load"
"""Why an answer to nothing is done: the model is there."""


class OllamaGeneration:
    """Reads, and gives each answer its voice."""

    def __init__(
        self,
        answering: Answering,
        tokenizers: TokenizerCalls,
        runtime: Runtime,
        model: ModelName,
    ) -> None:
        self._answering = answering
        self._tokenizers = tokenizers
        self._runtime = runtime
        self._model = model
        self._served = served_names(runtime.settings)

    def operations(self) -> list[Operation]:
        """Both."""
        hello = {"messages": [{"role": "user", "content": "What is 2 + 3?"}]}
        return [
            Operation(
                method="POST",
                path="/api/chat",
                answer=self._chat,
                summary="The assistant's answer to a conversation.",
                body=OllamaChatBody,
                reply=OllamaChatReply,
                streamed_as=CONTENT_TYPE,
                refused=refused.CHAT,
                examples=(
                    hello,
                    hello | {"stream": False, "format": "json", "options": {"num_predict": 32}},
                    hello | {"logprobs": True, "top_logprobs": 2, "options": {"temperature": 0}},
                    {"messages": []},
                ),
            ),
            Operation(
                method="POST",
                path="/api/generate",
                answer=self._generate,
                summary="The answer to a prompt, or what follows a raw one.",
                body=OllamaGenerateBody,
                reply=OllamaGenerateReply,
                streamed_as=CONTENT_TYPE,
                refused=refused.GENERATE,
                examples=(
                    {"prompt": "What is 2 + 3?", "system": "Be brief.", "stream": False},
                    {"prompt": "Once upon a time", "raw": True, "options": {"num_predict": 8}},
                ),
            ),
        ]

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        formats = await self._formats()
        body, posted = await self._answering.read(
            request,
            OllamaChatBody,
            lambda body: (body, reading.chat(body, formats, self._served)),
            refused.CHAT,
        )
        if posted is None:
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
        return await self._answer(request, body, posted, OllamaChatVoice)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        formats = await self._formats()
        body, posted = await self._answering.read(
            request,
            OllamaGenerateBody,
            lambda body: (body, reading.generate(body, formats, self._served)),
            refused.GENERATE,
        )
        if posted is None:
            name = self._checked(body)
            return json_reply(
                OllamaGenerateReply(
                    model=name, created_at=now(), done=True, done_reason=_LOADED, response=""
                )
            )
        with _of_the_prompt():
            return await self._answer(request, body, posted, OllamaGenerateVoice)

    async def _answer(
        self, request: web.Request, body: OllamaBody, posted: Posted, kind: type[OllamaVoice]
    ) -> web.StreamResponse:
        (ask,) = posted.asks
        ask = await marked(ask, self._tokenizers)

        async def voice(streams: Sequence[Stream]) -> Voice:
            return kind(body.model or self._model, streams[0], posted.telling)

        return await self._answering.answer(request, [ask], voice, streamed=posted.stream)

    async def _formats(self) -> Formats:
        return await formats_of(
            self._runtime.settings.gateway, self._tokenizers.card, self._tokenizers.writes
        )

    def _checked(self, body: OllamaBody) -> str:
        """What the client calls the model.

        Raises:
            UnknownModel: It is not served here.
        """
        other = reading.model_of(body.model, self._served)
        if other is not None:
            raise UnknownModel.of(other, self._served)
        return body.model or self._model


@contextmanager
def _of_the_prompt() -> Generator[None]:
    """What is wrong with the messages that were made of a prompt is wrong with the prompt."""
    try:
        yield
    except EngineError as error:
        if error.param == "messages":
            error.param = "prompt"
        raise
