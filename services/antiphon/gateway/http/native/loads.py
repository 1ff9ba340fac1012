"""GET /v1/loads: what each worker has to do, as JSON or as gauges for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from prometheus_client import CollectorRegistry, Gauge, generate_latest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from antiphon.service.peers import Peer
    from antiphon.wire.heartbeat import WorkerLoad

UNSET = msgspec.UNSET
UnsetType = msgspec.UnsetType
EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"
"""What `exposition` is written as."""
_GIB = 1024**3
_LABELS = ("dp_rank", "worker")


class WorkerMemory(msgspec.Struct, frozen=True, kw_only=True):
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
    memory: WorkerMemory | UnsetType = UNSET
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


def load_of(rank: int, peer: Peer, load: WorkerLoad) -> Load:
    """Tell one worker's load by its heartbeat; `rank` is its place in the list."""
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
        speculative=None,
        lora=None,
        disaggregation=None,
    )


def exposition(loads: Sequence[Load]) -> bytes:
    """Write loads as Prometheus reads them: a gauge for each number, a series for each worker."""
    registry = CollectorRegistry()
    gauges: dict[str, Gauge] = {}
    for load in loads:
        for name, value in _numbers(load):
            if name not in gauges:
                told = f"{name} of /v1/loads."
                gauges[name] = Gauge(f"antiphon_load_{name}", told, _LABELS, registry=registry)
            gauges[name].labels(str(load.dp_rank), load.worker).set(value)
    return generate_latest(registry)


def _numbers(told: msgspec.Struct, section: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a load by their names, those of a section behind its own name."""
    for name in told.__struct_fields__:
        value = getattr(told, name)
        if isinstance(value, msgspec.Struct):
            yield from _numbers(value, f"{name}_")
        elif isinstance(value, int | float) and name not in _LABELS:
            yield section + name, float(value)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
