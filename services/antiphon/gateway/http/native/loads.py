"""/v1/loads: load of each worker, as JSON or as Prometheus gauges."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta
from prometheus_client import CollectorRegistry, Gauge, generate_latest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from antiphon.service.peers import Peer
    from antiphon.wire.heartbeat import WorkerLoad

UNSET = msgspec.UNSET
UnsetType = msgspec.UnsetType
EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of the Prometheus exposition."""
_GIB = 1024**3
_LABELS = ("dp_rank", "worker")


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


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Load of one worker. Cached tokens are counted in whole pages."""

    dp_rank: int
    worker: str
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_waiting_uncached_tokens: Annotated[
        int, Meta(description="Prompt tokens of queued requests; some may be in the prefix cache.")
    ]
    num_used_tokens: Annotated[int, Meta(description="Tokens held by running requests.")]
    num_total_tokens: Annotated[int, Meta(description="Tokens of running and queued requests.")]
    num_active_tokens: Annotated[
        int,
        Meta(
            description="Same as `num_used_tokens`: excludes tokens that only the prefix "
            "cache holds."
        ),
    ]
    num_cached_tokens: Annotated[int, Meta(description="Tokens in the prefix cache.")]
    max_total_num_tokens: int
    max_running_requests: int
    token_usage: float
    gen_throughput: Annotated[
        float, Meta(description="Output tokens per second over the last ten seconds.")
    ]
    cache_hit_rate: Annotated[
        float, Meta(description="Hit rate of prompts prefilled in the last minute.")
    ]
    utilization: float
    paused: bool
    weight_version: str
    memory: WorkerMemory | UnsetType = UNSET
    queues: Queues | UnsetType = UNSET
    speculative: Annotated[
        UnsetType | None, Meta(description="Always null, as are `lora` and `disaggregation`.")
    ] = UNSET
    lora: UnsetType | None = UNSET
    disaggregation: UnsetType | None = UNSET


class Loads(msgspec.Struct, frozen=True, kw_only=True):
    """Load of all workers. `accelerator` is the device of the workers, or `cpu`."""

    timestamp: float
    version: str
    accelerator: str
    num_accelerators: int
    loads: list[Load]


def load_of(rank: int, peer: Peer, load: WorkerLoad) -> Load:
    """Convert a worker's heartbeat; `rank` is its index in the list."""
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
