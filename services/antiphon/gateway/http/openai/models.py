"""GET /v1/models: what is served."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.gateway.http.operation import Operation
from antiphon.gateway.http.reply import json_reply
from antiphon.wire.errors import EngineError, UnknownModel

if TYPE_CHECKING:
    from aiohttp import web

    from antiphon.gateway.encode import TokenizerCalls
    from antiphon.service.service import Runtime
    from antiphon.wire.ids import ModelName


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One model as OpenAI lists it. `max_model_len` is null until a tokenizer was asked."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "antiphon"
    root: str
    parent: None = None
    max_model_len: int | None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All of them."""

    object: str = "list"
    data: tuple[ModelEntry, ...]


class Models:
    """Answers from what is known already; only the context length may cost a call, once."""

    def __init__(self, runtime: Runtime, model: ModelName, tokenizers: TokenizerCalls) -> None:
        self._runtime = runtime
        self._model = model
        self._tokenizers = tokenizers
        self._created = runtime.clock.unix_ms() // 1000

    def operations(self) -> list[Operation]:
        """The list, and one of it."""
        return [
            Operation(
                method="GET",
                path="/v1/models",
                answer=self._list,
                summary="The model that is served.",
                reply=ModelList,
            ),
            Operation(
                method="GET",
                path="/v1/models/{name:.+}",
                answer=self._one,
                summary="One model by its name.",
                reply=ModelEntry,
            ),
        ]

    async def _list(self, _: web.Request) -> web.Response:
        return json_reply(ModelList(data=(await self._entry(),)))

    async def _one(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name != self._model:
            raise UnknownModel.of(name)
        return json_reply(await self._entry())

    async def _entry(self) -> ModelEntry:
        try:
            context_tokens = (await self._tokenizers.card()).context_tokens
        except EngineError:
            context_tokens = None
        return ModelEntry(
            id=self._model,
            created=self._created,
            root=self._model,
            max_model_len=context_tokens,
        )
