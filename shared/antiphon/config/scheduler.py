"""The cluster's queue and its placement."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from antiphon.config.schema import Beats, Config, Help, Requests, Seconds

Blocks = Annotated[int, Meta(ge=1, extra={"unit": "blocks of 64 tokens"})]
Weight = Annotated[float, Meta(ge=0)]


class SchedulerConfig(Config):
    """How many requests wait, and when a worker counts as gone."""

    queue_max: Annotated[
        Requests,
        Help(
            "Maximum number of waiting requests, those bound ahead to a worker included; one more "
            "is a 503."
        ),
    ] = 1024
    look_ahead: Annotated[
        Requests, Help("Requests bound to a worker beyond what it runs, so that it never idles.")
    ] = 2
    suspect_beats: Annotated[Beats, Help("Heartbeats missed before no new work is given.")] = 3
    dead_beats: Annotated[Beats, Help("Heartbeats missed before a process counts as dead.")] = 5
    owner_silence_s: Annotated[
        Seconds,
        Help("Maximum silence of a gateway before the requests that it owns are ended everywhere."),
    ] = 15.0
    prefill_weight: Annotated[
        Weight,
        Help("What a block of a prompt costs that a worker lacks; 0 places by load alone."),
    ] = 1.0
    request_blocks: Annotated[
        Weight,
        Help("What a request that runs on a worker costs the next one, in blocks of a prompt."),
    ] = 4.0
    blocks_max: Annotated[
        Blocks,
        Help(
            "Maximum number of blocks of the workers' caches that are known here, each worker's "
            "counted; beyond it the least recently used ones are evicted."
        ),
    ] = 500_000
    tombstone_s: Annotated[
        Seconds, Help("How long past its deadline a cancelled id stays refused.")
    ] = 10.0
