"""What a server says of itself: its model, its settings, its load."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

import msgspec

from antiphon.config.fields import groups, value_at
from antiphon.gateway.http.openai.completions import weight_version
from antiphon.gateway.http.operation import Operation
from antiphon.gateway.http.reply import json_reply
from antiphon.gateway.parsing.formats import parsers_of
from antiphon.wire.errors import EngineError, InvalidRequest

if TYPE_CHECKING:
    from aiohttp import web

    from antiphon.gateway.encode import TokenizerCalls
    from antiphon.gateway.workers import Workers
    from antiphon.service.peers import Peer
    from antiphon.service.service import Runtime
    from antiphon.wire.heartbeat import WorkerLoad
    from antiphon.wire.ids import ModelName

_SECTIONS = {
    "memory": "memory",
    "queues": "queues",
    "spec": "speculative",
    "lora": "lora",
    "disagg": "disaggregation",
}
"""Fields of a load by the names of their sections in a query."""
_ALL, _CORE = "all", "core"
_GIB = 1024**3
UNSET = msgspec.UNSET
UnsetType = msgspec.UnsetType
Value = str | int | float | bool | None


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """GET /model_info. `disaggregation_mode` is the word null: prefill and decode are together."""

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


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker keeps in memory, in GiB."""

    weight_gb: float
    kv_cache_gb: float
    graph_gb: float = 0.0
    token_capacity: int


class Queues(msgspec.Struct, frozen=True, kw_only=True):
    """Answers that wait, and for what: `paused` while the worker runs no steps."""

    waiting: int
    grammar: int
    paused: int
    retracted: int


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's load. Tokens in the cache are counted in whole pages.

    Attributes:
        num_waiting_uncached_tokens: Of what waits; the prefix cache may have some of them.
        num_used_tokens: That requests hold.
        num_total_tokens: With those that wait.
        num_active_tokens: As `num_used_tokens`: what only the prefix cache holds is not among them.
        num_cached_tokens: What it holds.
        gen_throughput: Tokens of answers a second, over the last ten.
        cache_hit_rate: Of the prompts that were begun in the last minute.
        speculative: Null, as `lora` and `disaggregation`: it has none.
    """

    dp_rank: int
    worker: str
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_waiting_uncached_tokens: int
    num_used_tokens: int
    num_total_tokens: int
    num_active_tokens: int
    num_cached_tokens: int
    max_total_num_tokens: int
    max_running_requests: int
    token_usage: float
    gen_throughput: float
    cache_hit_rate: float
    utilization: float
    paused: bool
    weight_version: str
    memory: Memory | UnsetType = UNSET
    queues: Queues | UnsetType = UNSET
    speculative: UnsetType | None = UNSET
    lora: UnsetType | None = UNSET
    disaggregation: UnsetType | None = UNSET


class Loads(msgspec.Struct, frozen=True, kw_only=True):
    """GET /v1/loads. `accelerator` is what the workers compute on, `cpu` where they have none."""

    timestamp: float
    version: str
    accelerator: str
    num_accelerators: int
    loads: list[Load]


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """GET /server_info: every setting that is no secret, and the load of each worker."""

    version: str
    model: ModelInfo
    settings: dict[str, dict[str, Value]]
    internal_states: list[Load]


class Info:
    """Answers from settings and heartbeats."""

    def __init__(
        self, runtime: Runtime, model: ModelName, tokenizers: TokenizerCalls, workers: Workers
    ) -> None:
        self._runtime = runtime
        self._model = model
        self._tokenizers = tokenizers
        self._workers = workers
        self._version = metadata.version("antiphon")

    def operations(self) -> list[Operation]:
        """All of it, and the older names."""
        return [
            Operation(
                method="GET",
                path="/v1/loads",
                answer=self._loads,
                summary="What each worker has to do.",
                reply=Loads,
                query={
                    "dp_rank": "Only this worker, by its place in the list.",
                    "include": "SGLang's sections, by commas: core, memory, queues, spec, lora, "
                    "disagg; all unless said. The core is always told.",
                    "format": "json; for Prometheus there is /metrics.",
                },
            ),
            *(
                Operation(
                    method="GET",
                    path=path,
                    answer=self._model_info,
                    summary="What is served.",
                    reply=ModelInfo,
                    deprecated=path.startswith("/get_"),
                )
                for path in ("/model_info", "/get_model_info")
            ),
            *(
                Operation(
                    method="GET",
                    path=path,
                    answer=self._server_info,
                    summary="Every setting that is no secret, and what each worker has to do.",
                    reply=ServerInfo,
                    deprecated=path.startswith("/get_"),
                )
                for path in ("/server_info", "/get_server_info")
            ),
        ]

    async def _loads(self, request: web.Request) -> web.Response:
        query = request.query
        sections = {part for part in query.get("include", "").split(",") if part}
        if unknown := sorted(sections - _SECTIONS.keys() - {_ALL, _CORE}):
            raise InvalidRequest(f"include: no section '{unknown[0]}'", param="include")
        if query.get("format", "json") != "json":
            raise InvalidRequest("format: json; for Prometheus there is /metrics", param="format")
        loads = self._each()
        if "dp_rank" in query:
            rank = query["dp_rank"]
            loads = [load for load in loads if str(load.dp_rank) == rank]
            if not loads:
                raise InvalidRequest("dp_rank: there is no such worker", param="dp_rank")
        if sections and _ALL not in sections:
            hidden = {field: UNSET for name, field in _SECTIONS.items() if name not in sections}
            loads = [msgspec.structs.replace(load, **hidden) for load in loads]
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
        settings = self._runtime.settings
        return json_reply(
            ServerInfo(
                version=self._version,
                model=await self._describe(),
                settings={
                    group.name: {
                        field.name: value_at(settings, field)
                        for field in group.fields
                        if not field.secret
                    }
                    for group in groups()
                },
                internal_states=self._each(),
            )
        )

    async def _describe(self) -> ModelInfo:
        settings = self._runtime.settings
        try:
            card = await self._tokenizers.card()
        except EngineError:
            card = None  # it is not known until a tokenizer was asked
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
        return [_load(rank, *each) for rank, each in enumerate(self._workers.loads())]


def _load(rank: int, peer: Peer, load: WorkerLoad) -> Load:
    figures = load.figures
    running = sum(not held.ended for held in load.running)
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
        memory=Memory(
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
        speculative=None,
        lora=None,
        disaggregation=None,
    )


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
