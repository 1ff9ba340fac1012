"""What there is, as Ollama lists it; and what it does with models, which is not done here."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, NoReturn

import msgspec

from antiphon.gateway.http.guard import tenant_of
from antiphon.gateway.http.limits import SMALL_BODY_BYTES_MAX
from antiphon.gateway.http.ollama.reading import model_of, tagged
from antiphon.gateway.http.ollama.replies import written
from antiphon.gateway.http.operation import Operation
from antiphon.gateway.http.reply import json_reply
from antiphon.gateway.parsing.formats import parsers_of
from antiphon.wire.base import Role
from antiphon.wire.errors import InvalidRequest, UnknownModel, Unsupported

if TYPE_CHECKING:
    from aiohttp import web

    from antiphon.gateway.access.access import Access
    from antiphon.gateway.encode import TokenizerCalls
    from antiphon.gateway.http.answering import Answering
    from antiphon.service.service import Runtime
    from antiphon.wire.ids import ModelName
    from antiphon.wire.tokenize import EncodeReply

API_VERSION = "0.13.0"
"""The version of Ollama whose API is spoken: clients ask for it to know what they may say."""
_NEVER = "9999-12-31T23:59:59Z"
_CHOSEN = "the model is chosen at the start: antiphon serve --model-path MODEL"
_KEPT = "the served model cannot be copied or deleted by a request"
_UNSERVED = {
    "/api/pull": ("POST", _CHOSEN),
    "/api/create": ("POST", _CHOSEN),
    "/api/blobs/{digest}": ("POST", _CHOSEN),
    "/api/push": ("POST", "models are not pushed anywhere"),
    "/api/copy": ("POST", _KEPT),
    "/api/delete": ("DELETE", _KEPT),
}


class ShowBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /api/show. `name` is the older name of `model`."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


class OllamaDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What the weights are. Empty: a gateway does not know, it has no weights."""

    parent_model: str = ""
    format: str = ""
    family: str = ""
    families: tuple[str, ...] = ()
    parameter_size: str = ""
    quantization_level: str = ""


class OllamaModel(msgspec.Struct, frozen=True, kw_only=True):
    """One model. `modified_at` is when this gateway began to serve it."""

    name: str
    model: str
    modified_at: str
    digest: str
    details: OllamaDetails = OllamaDetails()


class OllamaModels(msgspec.Struct, frozen=True):
    """GET /api/tags."""

    models: tuple[OllamaModel, ...]


class OllamaProcess(msgspec.Struct, frozen=True, kw_only=True):
    """One model that runs. It is never unloaded."""

    name: str
    model: str
    digest: str
    details: OllamaDetails = OllamaDetails()
    expires_at: str = _NEVER
    context_length: int


class OllamaProcesses(msgspec.Struct, frozen=True):
    """GET /api/ps."""

    models: tuple[OllamaProcess, ...]


class OllamaShown(msgspec.Struct, frozen=True, kw_only=True):
    """POST /api/show. `parameters` are what the model recommends, a line each."""

    parameters: str
    details: OllamaDetails = OllamaDetails()
    model_info: dict[str, str | int]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(msgspec.Struct, frozen=True):
    """GET /api/version."""

    version: str


class Library:
    """Answers from settings, heartbeats, and what tokenizers say of the model."""

    def __init__(
        self,
        answering: Answering,
        tokenizers: TokenizerCalls,
        runtime: Runtime,
        model: ModelName,
        access: Access,
    ) -> None:
        self._answering = answering
        self._tokenizers = tokenizers
        self._runtime = runtime
        self._model = model
        self._access = access
        self._name = tagged(model)
        self._digest = runtime.settings.cluster.model_digest
        self._since = written(datetime.fromtimestamp(runtime.clock.unix_ms() / 1000, UTC))

    def operations(self) -> list[Operation]:
        """All that can be asked of models."""
        return [
            Operation(
                method="GET",
                path="/api/tags",
                answer=self._list,
                summary="The model that is served.",
                reply=OllamaModels,
            ),
            Operation(
                method="GET",
                path="/api/ps",
                answer=self._running,
                summary="The same, while a worker runs it.",
                reply=OllamaProcesses,
            ),
            Operation(
                method="POST",
                path="/api/show",
                answer=self._show,
                summary="What is known of a model.",
                body=ShowBody,
                reply=OllamaShown,
                examples=({},),
            ),
            Operation(
                method="GET",
                path="/api/version",
                answer=self._version,
                summary="The version of Ollama whose API is spoken.",
                reply=OllamaVersion,
            ),
            *(
                Operation(
                    method=method, path=path, answer=self._refuse, summary=f"Refused: {reason}."
                )
                for path, (method, reason) in _UNSERVED.items()
            ),
        ]

    async def _list(self, request: web.Request) -> web.Response:
        if not self._shown(request):
            return json_reply(OllamaModels(()))
        model = OllamaModel(
            name=self._name, model=self._name, modified_at=self._since, digest=self._digest
        )
        return json_reply(OllamaModels((model,)))

    async def _running(self, request: web.Request) -> web.Response:
        if not self._shown(request):
            return json_reply(OllamaProcesses(()))
        beats = [peer.beat for peer in self._runtime.peers.working(Role.WORKER)]
        contexts = [beat.worker.context_tokens for beat in beats if beat.worker is not None]
        running = [
            OllamaProcess(
                name=self._name,
                model=self._name,
                digest=self._digest,
                context_length=max(contexts),
            )
            for _ in contexts[:1]
        ]
        return json_reply(OllamaProcesses(tuple(running)))

    async def _show(self, request: web.Request) -> web.Response:
        name = await self._answering.read(request, ShowBody, _asked, bytes_max=SMALL_BODY_BYTES_MAX)
        other = model_of(name, self._model)
        if other is not None or not self._shown(request):
            raise UnknownModel.of(other or self._model)
        card = await self._tokenizers.card()
        tools, reasoning = parsers_of(self._runtime.settings.gateway, card)
        capabilities = {"completion": True, "tools": tools, "thinking": reasoning}
        return json_reply(
            OllamaShown(
                parameters=_parameters(card),
                # Clients look up the context under the name of the architecture. It is not
                # known here, so the server's own stands in its place.
                model_info={
                    "general.architecture": "antiphon",
                    "general.basename": self._model,
                    "antiphon.context_length": card.context_tokens,
                    "antiphon.vocab_size": card.vocabulary_size,
                },
                capabilities=[each for each, known in capabilities.items() if known],
                modified_at=self._since,
            )
        )

    def _shown(self, request: web.Request) -> bool:
        return self._access.serves(tenant_of(request), self._model)

    async def _version(self, _: web.Request) -> web.Response:
        return json_reply(OllamaVersion(API_VERSION))

    async def _refuse(self, request: web.Request) -> NoReturn:
        resource = request.match_info.route.resource
        assert resource is not None, "a handler was found by its path"
        raise Unsupported(_UNSERVED[resource.canonical][1])


def _asked(body: ShowBody) -> str | None:
    if body.model and body.name and tagged(body.model) != tagged(body.name):
        raise InvalidRequest("name: model says another one", param="name")
    return body.model or body.name


def _parameters(card: EncodeReply) -> str:
    defaults = card.defaults
    said = {
        "temperature": defaults.temperature,
        "top_k": defaults.top_k,
        "top_p": defaults.top_p,
        "min_p": defaults.min_p,
        "repeat_penalty": defaults.repetition_penalty,
    }
    lines = (f"{name:<30} {value}" for name, value in said.items() if value is not None)
    return "\n".join(lines)
