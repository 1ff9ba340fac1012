"""GET /, /v1/models and /health: what is served, and whether it can be asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from antiphon.wire.base import Role, State
from antiphon.wire.errors import EngineError, Unavailable, UnknownModel

if TYPE_CHECKING:
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

    def routes(self) -> list[web.RouteDef]:
        """What a client asks before it asks for text."""
        return [
            web.get("/", self._hello),
            web.get("/health", self._health),
            web.get("/v1/models", self._list),
            web.get("/v1/models/{name:.+}", self._one),
        ]

    async def _hello(self, _: web.Request) -> web.Response:
        return web.Response(text=f"Antiphon is running and serves {self._model}.\n")

    async def _health(self, _: web.Request) -> web.Response:
        missing = self._missing()
        if missing:
            raise Unavailable(f"not ready: {', '.join(missing)}", retry_after_s=1.0)
        return web.json_response({"status": "ok"})

    async def _list(self, _: web.Request) -> web.Response:
        return _json(ModelList(data=(await self._entry(),)))

    async def _one(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name != self._model:
            raise UnknownModel.of(name)
        return _json(await self._entry())

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

    def _missing(self) -> list[str]:
        """Which of the services that an answer needs do not take work."""
        peers = self._runtime.peers
        missing = [
            str(role)
            for role in (Role.TOKENIZER, Role.WORKER, Role.DETOKENIZER)
            if not peers.working(role)
        ]
        if not any(peer.beat.leads is not None for peer in peers.working(Role.SCHEDULER)):
            missing.append(Role.SCHEDULER)
        if self._runtime.health.state is not State.READY:
            missing.append(Role.GATEWAY)
        return missing


def _json(body: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
