"""The cluster's queue and its placement."""

from __future__ import annotations

from typing import Annotated

from antiphon.config.schema import Beats, Config, Help, Requests, Seconds


class SchedulerConfig(Config):
    """How many requests wait, and when a worker counts as gone."""

    queue_max: Annotated[Requests, Help("Most waiting requests; one more is a 503.")] = 1024
    look_ahead: Annotated[
        Requests, Help("Requests bound to a worker beyond what it runs, so that it never idles.")
    ] = 2
    suspect_beats: Annotated[Beats, Help("Heartbeats missed before no new work is given.")] = 3
    dead_beats: Annotated[Beats, Help("Heartbeats missed before a process counts as dead.")] = 5
    tombstone_s: Annotated[
        Seconds, Help("How long past its deadline a cancelled id stays refused.")
    ] = 10.0
