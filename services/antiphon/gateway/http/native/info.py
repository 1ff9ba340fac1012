"""Information about the server: model, settings, load."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from antiphon.config.fields import fields, groups, value_at
from antiphon.config.sglang_arguments import rows, shown
from antiphon.gateway.http.core.endpoints import Endpoints, operation
from antiphon.gateway.http.core.meta_info import weight_version
from antiphon.gateway.http.core.operation import json_reply
from antiphon.gateway.parsing.formats import parsers_of
from antiphon.wire.errors import EngineError, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from antiphon.gateway.peers import WorkerControl
    from antiphon.gateway.request_metrics import GatewayMetrics
    from antiphon.service.peers import Peer
    from antiphon.wire.heartbeat import WorkerLoad, WorkerStats

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
EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of the Prometheus exposition."""
_SERVER_INFO = "All settings except secrets; the load and the kernels of each worker."
_VERSION = metadata.version("antiphon")
_GIB = 1024**3
_LABELS = ("dp_rank", "worker")
Value = str | int | float | bool | None


class WorkerMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a worker, in GiB."""

    weight_gb: float
    kv_cache_gb: float
    graph_gb: float = 0.0
    token_capacity: int


class Queues(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of queued requests by reason; `paused` counts those of a paused worker."""

    waiting: int
    grammar: int
    paused: int
    retracted: int


class SpeculativeLoad(msgspec.Struct, frozen=True):
    """Speculative decoding in the last minute."""

    accept_length: float
    """Output tokens of a request in one verify step, on average."""
    accept_rate: float
    """Share of the draft tokens that were right."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Load of one worker. Cached tokens are counted in whole pages."""

    dp_rank: int
    worker: str
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_waiting_uncached_tokens: int
    """Prompt tokens of queued requests; some may be in the prefix cache."""
    num_used_tokens: int
    """Tokens held by running requests."""
    num_total_tokens: int
    """Tokens of running and queued requests."""
    num_active_tokens: int
    """Same as `num_used_tokens`: excludes tokens that only the prefix cache holds."""
    num_cached_tokens: int
    """Tokens in the prefix cache."""
    max_total_num_tokens: int
    max_running_requests: int
    token_usage: float
    gen_throughput: float
    """Output tokens per second over the last ten seconds."""
    cache_hit_rate: float
    """Hit rate of prompts prefilled in the last minute."""
    utilization: float
    paused: bool
    weight_version: str
    memory: WorkerMemory | UnsetType = UNSET
    queues: Queues | UnsetType = UNSET
    speculative: SpeculativeLoad | UnsetType | None = UNSET
    """Null if no draft token was verified in the last minute."""
    lora: UnsetType | None = UNSET
    """Always null, as is `disaggregation`."""
    disaggregation: UnsetType | None = UNSET


class Loads(msgspec.Struct, frozen=True, kw_only=True):
    """Load of all workers. `accelerator` is the device of the workers, or `cpu`."""

    timestamp: float
    version: str
    accelerator: str
    num_accelerators: int
    loads: list[Load]


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


class KernelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The backend that computes an operation of the model."""

    operation: str
    backend: str
    refused: dict[str, str]
    """Backends that would be preferred, and why each one does not compute it."""
    draft: bool
    """Whether it is an operation of the draft model."""


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Server information: all settings except secrets, and the load of each worker.

    In addition to these fields it has SGLang's server arguments by their names, and the cache sizes
    its clients read: `max_total_num_tokens`, `max_req_input_len`.
    """

    version: str
    model: ModelInfo
    settings: dict[str, dict[str, Value]]
    metrics_ports: dict[str, int]
    """Metrics port of each process of the model."""
    internal_states: list[Load]
    kernels: dict[str, list[KernelInfo]]
    """The backend of each operation, by worker, as chosen at its start. A worker that does not
    reply within a second is missing."""


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


@dataclass(frozen=True)
class InfoEndpoints(Endpoints):
    workers: WorkerControl
    metrics_ports: Callable[[], Mapping[str, int]]
    metrics: GatewayMetrics

    @operation(
        "GET",
        "/v1/loads",
        "Load of each worker.",
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
    )
    async def _loads(self, request: web.Request) -> web.Response:
        with self.metrics.get_loads.time():
            return self._loads_of(request)

    def _loads_of(self, request: web.Request) -> web.Response:
        query = request.query
        sections = {part for part in query.get("include", "").split(",") if part}
        if unknown := sorted(sections - _SECTIONS.keys() - {_ALL, _CORE}):
            raise InvalidRequest.at("include", f"unknown section '{unknown[0]}'")
        form = query.get("format", _JSON)
        if form not in (_JSON, _PROMETHEUS):
            raise InvalidRequest.at("format", "must be json or prometheus")
        loads = self._each()
        if "dp_rank" in query:
            rank = query["dp_rank"]
            loads = [load for load in loads if str(load.dp_rank) == rank]
            if not loads:
                raise InvalidRequest.at("dp_rank", "no worker has this index")
        if sections and _ALL not in sections:
            hidden = {field: UNSET for name, field in _SECTIONS.items() if name not in sections}
            loads = [msgspec.structs.replace(load, **hidden) for load in loads]
        if form == _PROMETHEUS:
            return web.Response(body=exposition(loads), headers={"Content-Type": EXPOSITION})
        devices = [load.figures.device for _, load in self.workers.loads()]
        return json_reply(
            Loads(
                timestamp=self.runtime.clock.unix_ms() / 1000,
                version=_VERSION,
                accelerator=", ".join(sorted(set(filter(None, devices)))),
                num_accelerators=len(devices),
                loads=loads,
            )
        )

    @operation(
        "GET",
        "/get_load",
        "Load of each worker. Deprecated: use /v1/loads.",
        reply=list[OlderLoad],
        deprecated=True,
    )
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

    @operation("GET", "/version", "Version of the server.", reply=Version)
    async def _show_version(self, _: web.Request) -> web.Response:
        return json_reply(Version(_VERSION))

    @operation(
        "GET",
        "/tokenizer_info",
        "Tokenizer information: vocabulary size and context length.",
        reply=TokenizerInfo,
    )
    async def _tokenizer_info(self, _: web.Request) -> web.Response:
        settings, card = self.runtime.settings, await self.tokenizers.card()
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

    @operation("GET", "/model_info", "Model information.", reply=ModelInfo)
    @operation("GET", "/get_model_info", "Model information.", reply=ModelInfo, deprecated=True)
    async def _model_info(self, _: web.Request) -> web.Response:
        return json_reply(await self._describe())

    @operation("GET", "/server_info", _SERVER_INFO, reply=ServerInfo)
    @operation("GET", "/get_server_info", _SERVER_INFO, reply=ServerInfo, deprecated=True)
    async def _server_info(self, _: web.Request) -> web.Response:
        settings, model = self.runtime.settings, await self._describe()
        loads = self._each()
        kernels: dict[str, list[KernelInfo]] = {
            worker: [
                KernelInfo(
                    operation=each.op, backend=each.backend, refused=each.refused, draft=each.draft
                )
                for each in choices
            ]
            for worker, choices in (await self.workers.kernels()).items()
        }
        nested = msgspec.to_builtins(
            ServerInfo(
                version=_VERSION,
                model=model,
                settings={
                    group.name: {
                        field.name: value_at(settings, field)
                        for field in group.fields
                        if not field.secret
                    }
                    for group in groups()
                },
                metrics_ports=dict(self.metrics_ports()),
                internal_states=loads,
                kernels=kernels,
            )
        )
        # Nested names take precedence: `model` and the like are ours.
        return web.json_response(self._flat(model, loads) | nested)

    def _flat(self, model: ModelInfo, loads: Sequence[Load]) -> dict[str, Value]:
        """SGLang's server arguments except secrets, by name, and the values it adds to them."""
        settings = self.runtime.settings
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
        settings = self.runtime.settings
        try:
            card = await self.tokenizers.card()
        except EngineError:
            card = None  # unknown until a tokenizer has replied
        tools, reasoning = parsers_of(settings.gateway, card)
        return ModelInfo(
            model_path=settings.model.path,
            is_generation=card is None or card.pooling is None,
            served_model_name=self.model,
            tokenizer_path=settings.model.tokenizer_path or settings.model.path,
            weight_version=weight_version(self.runtime),
            load_format=str(settings.load.format),
            reasoning_parser=reasoning,
            tool_call_parser=tools,
            model_type=None if card is None else card.model_type or None,
            architectures=[card.architecture] if card is not None and card.architecture else None,
            max_model_len=None if card is None else card.context_tokens,
            vocabulary_size=None if card is None else card.vocabulary_size,
            has_image_understanding=card is not None and card.sees,
            has_audio_understanding=card is not None
            and (card.takes_audio or card.transcription is not None),
        )

    def _each(self) -> list[Load]:
        return [load_of(rank, *each) for rank, each in enumerate(self.workers.loads())]


def load_of(rank: int, peer: Peer, load: WorkerLoad) -> Load:
    """Convert a worker's heartbeat; `rank` is its index in the list."""
    figures = load.figures
    running = load.live
    used = (load.pages_total - load.pages_free) * load.page_tokens
    total = load.pages_total * load.page_tokens
    return Load(
        dp_rank=rank,
        worker=peer.process.instance,
        num_running_reqs=max(0, running - load.waiting),
        num_waiting_reqs=load.waiting,
        num_total_reqs=running,
        num_waiting_uncached_tokens=figures.waiting_tokens,
        num_used_tokens=used,
        num_total_tokens=used + figures.waiting_tokens,
        num_active_tokens=used,
        num_cached_tokens=figures.pages_cached * load.page_tokens,
        max_total_num_tokens=total,
        max_running_requests=load.running_max,
        token_usage=_share(used, total),
        gen_throughput=figures.output_tokens_s,
        cache_hit_rate=_share(figures.cached_tokens, figures.prompt_tokens),
        utilization=_share(running, load.running_max),
        paused=load.paused,
        weight_version=load.weight_version,
        memory=WorkerMemory(
            weight_gb=figures.weight_bytes / _GIB,
            kv_cache_gb=figures.cache_bytes / _GIB,
            token_capacity=total,
        ),
        queues=Queues(
            waiting=load.waiting,
            grammar=figures.grammars,
            paused=load.waiting if load.paused else 0,
            retracted=figures.retracted,
        ),
        speculative=_speculative(figures),
        lora=None,
        disaggregation=None,
    )


def _speculative(figures: WorkerStats) -> SpeculativeLoad | None:
    if not figures.verify_rows:
        return None
    return SpeculativeLoad(
        accept_length=1 + figures.drafts_accepted / figures.verify_rows,
        accept_rate=_share(figures.drafts_accepted, figures.drafts_proposed),
    )


def exposition(loads: Sequence[Load]) -> bytes:
    """Format loads for Prometheus: one gauge per number, one series per worker."""
    registry = CollectorRegistry()
    gauges: dict[str, Gauge] = {}
    for load in loads:
        for name, value in _numbers(load):
            if name not in gauges:
                description = f"{name} of /v1/loads."
                gauges[name] = Gauge(
                    f"antiphon_load_{name}", description, _LABELS, registry=registry
                )
            gauges[name].labels(str(load.dp_rank), load.worker).set(value)
    return generate_latest(registry)


def _numbers(section_values: msgspec.Struct, section: str = "") -> Iterator[tuple[str, float]]:
    """Return the numbers of a load by name, those of a section prefixed with its name."""
    for name in section_values.__struct_fields__:
        value = getattr(section_values, name)
        if isinstance(value, msgspec.Struct):
            yield from _numbers(value, f"{name}_")
        elif isinstance(value, int | float) and name not in _LABELS:
            yield section + name, float(value)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
