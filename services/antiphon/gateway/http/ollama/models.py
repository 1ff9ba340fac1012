"""Ollama's model routes: listing is supported, management is not."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from antiphon.gateway.http.core.auth import tenant_of
from antiphon.gateway.http.core.endpoints import Endpoints, operation
from antiphon.gateway.http.core.limits import SMALL_BODY_BYTES_MAX
from antiphon.gateway.http.core.operation import Operation, json_reply, refusal
from antiphon.gateway.http.core.writer import NDJSON, line
from antiphon.gateway.http.ollama.parse import model_of, tagged
from antiphon.gateway.http.ollama.schema import OllamaOptions, written
from antiphon.gateway.parsing.formats import parsers_of
from antiphon.gateway.requests.generation_request import set_fields
from antiphon.wire.base import Role
from antiphon.wire.errors import EngineError, InvalidRequest, UnknownModel, Unsupported
from antiphon.wire.sampling import SamplingDefaults

if TYPE_CHECKING:
    from antiphon.gateway.access.access import Access
    from antiphon.wire.ids import ModelName
    from antiphon.wire.tokenize import EncodeReply

API_VERSION = "0.13.0"
"""Version of the Ollama API that is implemented; clients read it to choose features."""
_FAMILY = "antiphon"
_DONE = "success"
_DIGEST_CHARACTERS = 12
"""Digest length shown by the command line client, which requires at least this many."""
_LEVELS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_ITEM_BYTES = {"float32": 4}
_NEVER = "9999-12-31T23:59:59Z"
_CHOSEN = "the model is set at startup: antiphon serve --model-path MODEL"
_KEPT = "the served model cannot be copied or deleted by a request"
_UNSERVED = {
    "/api/create": ("POST", _CHOSEN),
    "/api/blobs/{digest}": ("POST", _CHOSEN),
    "/api/push": ("POST", "models cannot be pushed"),
    "/api/copy": ("POST", _KEPT),
    "/api/delete": ("DELETE", _KEPT),
}


class NamedBody(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    """Name of the model."""
    name: str | None = None
    """Deprecated: use `model`."""


class ShowBody(NamedBody, frozen=True, kw_only=True):
    """Show model information. `name` is a deprecated alias of `model`."""

    verbose: bool | None = None
    """Accepted and ignored."""


class PullBody(NamedBody, frozen=True, kw_only=True):
    """Pull a model. `name` is a deprecated alias of `model`."""

    stream: bool | None = None
    insecure: bool | None = None


class PullStatus(msgspec.Struct, frozen=True):
    """Progress of a pull."""

    status: str


class OllamaDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Format of the weights.

    `parameter_size` and `quantization_level` come from the model folder.
    """

    parent_model: str = ""
    format: str = ""
    family: str = ""
    families: tuple[str, ...] = ()
    parameter_size: str = ""
    quantization_level: str = ""


class OllamaModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model. `modified_at` is the start time of this gateway."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails = OllamaDetails()


class OllamaModels(msgspec.Struct, frozen=True):
    """List of models."""

    models: tuple[OllamaModel, ...]


class OllamaProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A running model. It is never unloaded."""

    name: str
    model: str
    size: int
    size_vram: int = 0
    digest: str
    details: OllamaDetails = OllamaDetails()
    expires_at: str = _NEVER
    context_length: int


class OllamaProcesses(msgspec.Struct, frozen=True):
    """List of running models."""

    models: tuple[OllamaProcess, ...]


class OllamaShowReply(msgspec.Struct, frozen=True, kw_only=True):
    """Model information. `parameters` are the model's recommended values, one per line."""

    parameters: str
    details: OllamaDetails = OllamaDetails()
    model_info: dict[str, str | int]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(msgspec.Struct, frozen=True):
    """Version of the API."""

    version: str


@dataclass(frozen=True)
class OllamaModelsEndpoints(Endpoints):
    access: Access
    since_unix_ms: int  # start time of this gateway

    def operations(self) -> list[Operation]:
        return [
            *super().operations(),
            *(
                Operation(method, path, refusal(Unsupported, reason), f"Not supported: {reason}.")
                for path, (method, reason) in _UNSERVED.items()
            ),
        ]

    @operation("GET", "/api/tags", "List the served model.", reply=OllamaModels)
    async def _list(self, request: web.Request) -> web.Response:
        if not self._shown(request):
            return json_reply(OllamaModels(()))
        model = OllamaModel(modified_at=self._since, **await self._described())
        return json_reply(OllamaModels((model,)))

    @operation(
        "GET",
        "/api/ps",
        "List the served model if a worker is running it.",
        reply=OllamaProcesses,
    )
    async def _running(self, request: web.Request) -> web.Response:
        if not self._shown(request):
            return json_reply(OllamaProcesses(()))
        beats = [peer.heartbeat for peer in self.runtime.peers.accepting_work(Role.WORKER)]
        contexts = [beat.worker.context_tokens for beat in beats if beat.worker is not None]
        if not contexts:
            return json_reply(OllamaProcesses(()))
        running = OllamaProcess(context_length=max(contexts), **await self._described())
        return json_reply(OllamaProcesses((running,)))

    @operation(
        "POST",
        "/api/show",
        "Show model information.",
        body=ShowBody,
        reply=OllamaShowReply,
        examples=({},),
    )
    async def _show(self, request: web.Request) -> web.Response:
        name = await self.response_handler.parse_body(
            request, ShowBody, _requested_name, bytes_max=SMALL_BODY_BYTES_MAX
        )
        other = model_of(name, self.served)
        if not self._shown(request):
            raise UnknownModel.of(other or self.model, ())
        if other is not None:
            raise UnknownModel.of(other, self.served)
        card = await self.tokenizers.card()
        tools, reasoning = parsers_of(self.runtime.settings.gateway, card)
        capabilities = {"completion": True, "tools": tools, "thinking": reasoning}
        return json_reply(
            OllamaShowReply(
                parameters=_parameters(card),
                details=await self._details(),
                # Clients look up the context length under the architecture's name.
                model_info={
                    "general.architecture": (family := card.model_type or _FAMILY),
                    "general.basename": self.model,
                    "general.parameter_count": self._parameter_count(),
                    f"{family}.context_length": card.context_tokens,
                    f"{family}.vocab_size": card.vocabulary_size,
                },
                capabilities=[each for each, known in capabilities.items() if known],
                modified_at=self._since,
            )
        )

    @operation(
        "GET",
        "/api/version",
        "Version of the Ollama API that is implemented.",
        reply=OllamaVersion,
    )
    async def _version(self, _: web.Request) -> web.Response:
        return json_reply(OllamaVersion(API_VERSION))

    @operation(
        "POST",
        "/api/pull",
        "Pull a model. Succeeds for the served model; other models are not downloaded.",
        body=PullBody,
        reply=PullStatus,
        streamed_as=NDJSON,
        examples=({"stream": False},),
    )
    async def _pull(self, request: web.Request) -> web.Response:
        """Nothing is downloaded; clients pull before they run a model."""
        body = await self.response_handler.small_body(request, PullBody)
        other = model_of(_requested_name(body), self.served)
        if other is not None or not self._shown(request):
            raise UnknownModel(
                f"model '{other or self.model}' is not served and cannot be downloaded: "
                f"{_CHOSEN}; this server serves {', '.join(self.served)}",
                param="model",
            )
        if body.stream is False:
            return json_reply(PullStatus(_DONE))
        steps = ("pulling manifest", "verifying sha256 digest", _DONE)
        lines = b"".join(line(msgspec.json.encode(PullStatus(step))) for step in steps)
        return web.Response(body=lines, content_type=NDJSON)

    async def _described(self) -> dict[str, Any]:
        return {
            "name": tagged(self.model),
            "model": tagged(self.model),
            "size": self._weight_bytes(),
            "digest": _digest(self.runtime.settings.cluster.model_digest, self.model),
            "details": await self._details(),
        }

    async def _details(self) -> OllamaDetails:
        """Describe the weights: their family from the tokenizer, their size from workers."""
        try:
            family = (await self.tokenizers.card()).model_type or _FAMILY
        except EngineError:
            family = _FAMILY  # unknown until a tokenizer has replied
        model = self.runtime.settings.model
        stored = str(model.quantization or "")
        return OllamaDetails(
            format="safetensors",
            family=family,
            families=(family,),
            parameter_size=_short(self._parameter_count()),
            quantization_level=stored.upper() or _LEVELS.get(str(model.dtype), "BF16"),
        )

    def _weight_bytes(self) -> int:
        """Weight bytes of the model in a worker's memory; 0 while there is no worker."""
        beats = [peer.heartbeat for peer in self.runtime.peers.with_role(Role.WORKER)]
        figures = [beat.worker.figures for beat in beats if beat.worker is not None]
        return max((each.weight_bytes for each in figures), default=0)

    def _parameter_count(self) -> int:
        """Approximate number of parameters, from the weight bytes and the configured dtype."""
        model = self.runtime.settings.model
        item_bytes = 1 if model.quantization else _ITEM_BYTES.get(str(model.dtype), 2)
        return self._weight_bytes() // item_bytes

    @property
    def _since(self) -> str:
        return written(datetime.fromtimestamp(self.since_unix_ms / 1000, UTC))

    def _shown(self, request: web.Request) -> bool:
        return self.access.may_use_model(tenant_of(request), self.model)


def _digest(configured: str, model: ModelName) -> str:
    """Digest of the weights: configured, else of the model name. Clients truncate it."""
    if len(configured) >= _DIGEST_CHARACTERS:
        return configured
    return hashlib.sha256(f"{configured}{model}".encode()).hexdigest()


def _short(count: int) -> str:
    """Format a number of parameters: 135M, 7.2B."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            text = f"{count / size:.1f}".removesuffix(".0")
            return f"{text}{unit}"
    return str(count)


def _requested_name(body: NamedBody) -> str | None:
    if body.model and body.name and tagged(body.model) != tagged(body.name):
        raise InvalidRequest.at("name", "differs from model; send only one of them")
    return body.model or body.name


def _parameters(card: EncodeReply) -> str:
    defaults = set_fields(card.defaults, SamplingDefaults)
    names = {field.name: field.encode_name for field in msgspec.structs.fields(OllamaOptions)}
    return "\n".join(f"{names[name]:<30} {value}" for name, value in defaults.items())
