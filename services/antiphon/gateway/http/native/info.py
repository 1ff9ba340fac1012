"""Information about the server: model, settings, load."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Annotated

import msgspec
from aiohttp import web
from msgspec import Meta

from antiphon.config.fields import fields, groups, value_at
from antiphon.config.sglang.arguments import rows
from antiphon.config.sglang.values import shown
from antiphon.gateway.http.core.meta_info import weight_version
from antiphon.gateway.http.core.operation import Operation
from antiphon.gateway.http.core.reply import json_reply
from antiphon.gateway.http.native.loads import EXPOSITION, Load, Loads, exposition, load_of
from antiphon.gateway.parsing.formats import parsers_of
from antiphon.wire.errors import EngineError, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from antiphon.gateway.metrics import GatewayMetrics
    from antiphon.gateway.requests.tokenizer_client import TokenizerClient
    from antiphon.gateway.worker_control import WorkerControl
    from antiphon.service.service import Runtime
    from antiphon.wire.ids import ModelName

_SECTIONS = {
    "memory": "memory",
    "queues": "queues",
    "spec": "speculative",
    "lora": "lora",
    "disagg": "disaggregation",
}
"""Load fields by their section name in a query."""
_ALL, _CORE = "all", "core"
_JSON, _PROMETHEUS = "json", "prometheus"
Value = str | int | float | bool | None


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Model information. `disaggregation_mode` is the string "null": there is no disaggregation."""

    model_path: str
    served_model_name: str
    tokenizer_path: str
    is_generation: bool = True
    preferred_sampling_params: None = None
    weight_version: str
    load_format: str
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    has_image_understanding: bool = False
    has_audio_understanding: bool = False
    model_type: str | None
    architectures: list[str] | None
    disaggregation_mode: str = "null"
    max_model_len: int | None
    vocabulary_size: int | None


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Server information: all settings except secrets, and the load of each worker.

    In addition to these fields it has SGLang's server arguments by their names, and the cache sizes
    its clients read: `max_total_num_tokens`, `max_req_input_len`.
    """

    version: str
    model: ModelInfo
    settings: dict[str, dict[str, Value]]
    metrics_ports: Annotated[
        dict[str, int], Meta(description="Metrics port of each process of the model.")
    ]
    internal_states: list[Load]


class OlderLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Load of a worker, in the format of older SGLang routers."""

    dp_rank: int
    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int


class Version(msgspec.Struct, frozen=True):
    """Version of the server."""

    version: str


class TokenizerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Tokenizer information."""

    tokenizer_path: str
    vocab_size: int
    model_max_length: int
    tool_call_parser: str | None
    reasoning_parser: str | None


class InfoEndpoints:
    """Handlers that read settings and heartbeats."""

    def __init__(
        self,
        runtime: Runtime,
        model: ModelName,
        tokenizers: TokenizerClient,
        workers: WorkerControl,
        metrics_ports: Callable[[], Mapping[str, int]],
        metrics: GatewayMetrics,
    ) -> None:
        self._runtime = runtime
        self._model = model
        self._tokenizers = tokenizers
        self._workers = workers
        self._metrics_ports = metrics_ports
        self._metrics = metrics
        self._version = metadata.version("antiphon")

    def operations(self) -> list[Operation]:
        """Return the operations, including deprecated names."""
        return [
            Operation(
                method="GET",
                path="/v1/loads",
                handler=self._loads,
                summary="Load of each worker.",
                reply=Loads,
                query={
                    "dp_rank": "Return only the worker with this index.",
                    "include": (
                        "Comma-separated sections to return: core, memory, queues, spec, "
                        "lora, disagg. Defaults to all; core is always included."
                    ),
                    "format": "`json` (default), or `prometheus` for gauges labeled by worker.",
                },
                alternative_types=(EXPOSITION,),
            ),
            Operation(
                method="GET",
                path="/get_load",
                handler=self._older_loads,
                summary="Load of each worker. Deprecated: use /v1/loads.",
                reply=list[OlderLoad],
                deprecated=True,
            ),
            Operation(
                method="GET",
                path="/version",
                handler=self._show_version,
                summary="Version of the server.",
                reply=Version,
            ),
            Operation(
                method="GET",
                path="/tokenizer_info",
                handler=self._tokenizer_info,
                summary="Tokenizer information: vocabulary size and context length.",
                reply=TokenizerInfo,
            ),
            *(
                Operation(
                    method="GET",
                    path=path,
                    handler=self._model_info,
                    summary="Model information.",
                    reply=ModelInfo,
                    deprecated=path.startswith("/get_"),
                )
                for path in ("/model_info", "/get_model_info")
            ),
            *(
                Operation(
                    method="GET",
                    path=path,
                    handler=self._server_info,
                    summary="All settings except secrets, and the load of each worker.",
                    reply=ServerInfo,
                    deprecated=path.startswith("/get_"),
                )
                for path in ("/server_info", "/get_server_info")
            ),
        ]

    async def _older_loads(self, _: web.Request) -> web.Response:
        return json_reply(
            [
                OlderLoad(
                    dp_rank=load.dp_rank,
                    num_reqs=load.num_total_reqs,
                    num_waiting_reqs=load.num_waiting_reqs,
                    num_tokens=load.num_total_tokens,
                )
                for load in self._each()
            ]
        )

    async def _show_version(self, _: web.Request) -> web.Response:
        return json_reply(Version(self._version))

    async def _tokenizer_info(self, _: web.Request) -> web.Response:
        settings, card = self._runtime.settings, await self._tokenizers.card()
        tools, reasoning = parsers_of(settings.gateway, card)
        return json_reply(
            TokenizerInfo(
                tokenizer_path=settings.model.tokenizer_path or settings.model.path,
                vocab_size=card.vocabulary_size,
                model_max_length=card.context_tokens,
                tool_call_parser=tools,
                reasoning_parser=reasoning,
            )
        )

    async def _loads(self, request: web.Request) -> web.Response:
        with self._metrics.get_loads.time():
            return self._loads_of(request)

    def _loads_of(self, request: web.Request) -> web.Response:
        query = request.query
        sections = {part for part in query.get("include", "").split(",") if part}
        if unknown := sorted(sections - _SECTIONS.keys() - {_ALL, _CORE}):
            raise InvalidRequest(f"include: unknown section '{unknown[0]}'", param="include")
        form = query.get("format", _JSON)
        if form not in (_JSON, _PROMETHEUS):
            raise InvalidRequest("format: must be json or prometheus", param="format")
        loads = self._each()
        if "dp_rank" in query:
            rank = query["dp_rank"]
            loads = [load for load in loads if str(load.dp_rank) == rank]
            if not loads:
                raise InvalidRequest("dp_rank: no worker has this index", param="dp_rank")
        if sections and _ALL not in sections:
            hidden = {
                field: msgspec.UNSET for name, field in _SECTIONS.items() if name not in sections
            }
            loads = [msgspec.structs.replace(load, **hidden) for load in loads]
        if form == _PROMETHEUS:
            return web.Response(body=exposition(loads), headers={"Content-Type": EXPOSITION})
        devices = [load.figures.device for _, load in self._workers.loads()]
        return json_reply(
            Loads(
                timestamp=self._runtime.clock.unix_ms() / 1000,
                version=self._version,
                accelerator=", ".join(sorted(set(filter(None, devices)))),
                num_accelerators=len(devices),
                loads=loads,
            )
        )

    async def _model_info(self, _: web.Request) -> web.Response:
        return json_reply(await self._describe())

    async def _server_info(self, _: web.Request) -> web.Response:
        settings, model = self._runtime.settings, await self._describe()
        loads = self._each()
        nested = msgspec.to_builtins(
            ServerInfo(
                version=self._version,
                model=model,
                settings={
                    group.name: {
                        field.name: value_at(settings, field)
                        for field in group.fields
                        if not field.secret
                    }
                    for group in groups()
                },
                metrics_ports=dict(self._metrics_ports()),
                internal_states=loads,
            )
        )
        # Nested names take precedence: `model` and the like are ours.
        return web.json_response(self._flat(model, loads) | nested)

    def _flat(self, model: ModelInfo, loads: Sequence[Load]) -> dict[str, Value]:
        """SGLang's server arguments except secrets, by name, and the values it adds to them."""
        settings = self._runtime.settings
        flat: dict[str, Value] = {}
        for row in rows():
            field = fields()[row.path] if row.path is not None else None
            if field is None or not field.secret:
                flat[row.name] = shown(row, None if field is None else value_at(settings, field))
        longest = model.max_model_len
        return flat | {
            "model_path": model.model_path,
            "tokenizer_path": model.tokenizer_path,
            "served_model_name": model.served_model_name,
            "weight_version": model.weight_version,
            "max_total_num_tokens": max((load.max_total_num_tokens for load in loads), default=0),
            # At least one token is left for the output.
            "max_req_input_len": None if longest is None else longest - 1,
        }

    async def _describe(self) -> ModelInfo:
        settings = self._runtime.settings
        try:
            card = await self._tokenizers.card()
        except EngineError:
            card = None  # unknown until a tokenizer has replied
        tools, reasoning = parsers_of(settings.gateway, card)
        return ModelInfo(
            model_path=settings.model.path,
            is_generation=card is None or card.pooling is None,
            served_model_name=self._model,
            tokenizer_path=settings.model.tokenizer_path or settings.model.path,
            weight_version=weight_version(self._runtime),
            load_format=str(settings.load.format),
            reasoning_parser=reasoning,
            tool_call_parser=tools,
            model_type=None if card is None else card.model_type or None,
            architectures=[card.architecture] if card is not None and card.architecture else None,
            max_model_len=None if card is None else card.context_tokens,
            vocabulary_size=None if card is None else card.vocabulary_size,
        )

    def _each(self) -> list[Load]:
        return [load_of(rank, *each) for rank, each in enumerate(self._workers.loads())]
