"""Settings of the scheduler: queue and placement."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from antiphon.config.schema import Beats, Config, Help, Requests, Seconds

Blocks = Annotated[int, Meta(ge=1, extra={"unit": "blocks of 64 tokens"})]
Weight = Annotated[float, Meta(ge=0)]


class SchedulerConfig(Config):
    """Queueing and routing of requests, and liveness of workers."""

    queue_max: Annotated[
        Requests,
        Help(
            "Maximum number of waiting requests, including those assigned to a worker ahead of "
            "time; further requests get a 503."
        ),
    ] = 1024
    look_ahead: Annotated[
        Requests,
        Help("Number of requests assigned to a worker beyond its running ones, to keep it busy."),
    ] = 2
    suspect_beats: Annotated[
        Beats, Help("Number of missed heartbeats after which a worker gets no new requests.")
    ] = 3
    dead_beats: Annotated[
        Beats, Help("Number of missed heartbeats after which a process is considered dead.")
    ] = 5
    owner_silence_s: Annotated[
        Seconds,
        Help(
            "Maximum time without a heartbeat from a gateway, in seconds; after it the gateway's "
            "requests are aborted everywhere."
        ),
    ] = 15.0
    prefill_weight: Annotated[
        Weight,
        Help(
            "Weight of the prompt blocks that a worker would have to compute, when routing; 0 "
            "routes by load alone."
        ),
    ] = 1.0
    request_blocks: Annotated[
        Weight,
        Help("Load weight: cost of one running request, in 64-token prompt blocks, when routing."),
    ] = 4.0
    blocks_max: Annotated[
        Blocks,
        Help(
            "Maximum number of cached blocks tracked by the scheduler, over all workers; beyond "
            "it the least recently used ones are evicted."
        ),
    ] = 500_000
    tombstone_s: Annotated[
        Seconds,
        Help(
            "Time after its deadline for which the ID of an aborted request is still rejected, in "
            "seconds."
        ),
    ] = 10.0
