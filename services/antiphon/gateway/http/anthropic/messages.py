"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.http.anthropic import reading, refused
from antiphon.gateway.http.anthropic.bodies import CountBody, MessagesBody
from antiphon.gateway.http.anthropic.replies import CountReply, MessageReply
from antiphon.gateway.http.anthropic.voice import MessagesVoice
from antiphon.gateway.http.budgets import budgeted
from antiphon.gateway.http.guard import tenant_of
from antiphon.gateway.http.openai.marks import marked
from antiphon.gateway.http.operation import Operation
from antiphon.gateway.http.reply import json_reply
from antiphon.gateway.http.server import REQUEST_ID, warn
from antiphon.gateway.parsing.formats import formats_of
from antiphon.service.deadline import deadline_in
from antiphon.service.model import served_names
from antiphon.wire.codec import id_count
from antiphon.wire.errors import InvalidRequest, UnknownModel
from antiphon.wire.ids import new_request_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiohttp import web

    from antiphon.gateway.ask import Ask
    from antiphon.gateway.encode import TokenizerCalls
    from antiphon.gateway.http.answering import Answering
    from antiphon.gateway.http.voice import Voice
    from antiphon.gateway.parsing.formats import Formats
    from antiphon.gateway.stream import Stream
    from antiphon.service.service import Runtime
    from antiphon.wire.ids import ModelName

_VERSION_HEADER = "anthropic-version"
_VERSIONS = ("2023-06-01", "2026-10-21")
"""They differ in what Anthropic's own models refuse. How tokens are drawn may be said in both."""
_COUNT_S = 30.0

_ASKED = [{"role": "user", "content": "What is 2 + 3?"}]
_HELLO: dict[str, object] = {"max_tokens": 8, "messages": _ASKED}
_TOOL = {"name": "add", "input_schema": {"type": "object", "description": "Two numbers."}}
_FORM = {"type": "json_schema", "schema": {"type": "object"}}


class Messages:
    """Reads, and gives each answer its voice; counts what would be read."""

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

    def operations(self) -> list[Operation]:
        """Answers, and the size of what they would answer to."""
        return [
            Operation(
                method="POST",
                path="/v1/messages",
                answer=self._answer,
                summary="The assistant's answer to a conversation, as Anthropic's API has it.",
                body=MessagesBody,
                reply=MessageReply,
                refused=refused.MESSAGES,
                examples=(
                    _HELLO,
                    _HELLO | {"stream": True, "stop_sequences": ["!"], "system": "Be brief."},
                    _HELLO | {"tools": [_TOOL], "tool_choice": {"type": "any"}},
                    _HELLO | {"output_config": {"format": _FORM}, "temperature": 0},
                ),
            ),
            Operation(
                method="POST",
                path="/v1/messages/count_tokens",
                answer=self._count,
                summary="How many tokens a conversation has.",
                body=CountBody,
                reply=CountReply,
                refused=refused.COUNT,
                examples=({"messages": _ASKED, "system": "Be brief."},),
            ),
        ]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        formats = await self._formats()

        def make(body: MessagesBody) -> reading.Posted:
            _check_version(request)
            return reading.messages(body, formats)

        posted = await self._answering.read(
            request, MessagesBody, make, refused.MESSAGES, warns_beyond=MessagesBody
        )
        warn(request, posted.warnings)
        ask = await marked(posted.ask, self._tokenizers)
        if posted.budget is not None:
            ask = await budgeted(
                ask,
                posted.budget,
                ask.thinking.format if ask.thinking else None,
                self._tokenizers,
                param="thinking.budget_tokens",
            )

        async def voice(streams: Sequence[Stream]) -> Voice:
            return MessagesVoice(streams[0], posted.telling, self._model)

        return await self._answering.answer(request, (ask,), voice, streamed=posted.stream)

    async def _count(self, request: web.Request) -> web.Response:
        formats = await self._formats()

        def make(body: CountBody) -> tuple[Ask, list[str]]:
            _check_version(request)
            warnings = reading.left_out(body)
            return reading.prompt(body, formats), warnings

        ask, warnings = await self._answering.read(
            request, CountBody, make, refused.COUNT, warns_beyond=MessagesBody
        )
        warn(request, warnings)
        served = served_names(self._runtime.settings)
        if ask.model is not None and ask.model not in served:
            raise UnknownModel.of(ask.model, served)
        request[REQUEST_ID] = request_id = new_request_id()
        deadline = deadline_in(_COUNT_S, self._runtime.clock)
        ask = msgspec.structs.replace(ask, tenant=tenant_of(request))
        encoded = await self._tokenizers.encode(ask, request_id, deadline, None)
        return json_reply(CountReply(id_count(encoded.token_ids)))

    async def _formats(self) -> Formats:
        return await formats_of(
            self._runtime.settings.gateway, self._tokenizers.card, self._tokenizers.writes
        )


def _check_version(request: web.Request) -> None:
    said = request.headers.get(_VERSION_HEADER)
    if said is not None and said not in _VERSIONS:
        text = f"'{said}' is not served; {' and '.join(_VERSIONS)} are"
        raise InvalidRequest(text, param=_VERSION_HEADER)
