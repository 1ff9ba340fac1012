"""Settings of `antiphon serve`, which starts all services on one machine."""

from __future__ import annotations

from typing import Annotated

from antiphon.config.schema import Config, Help, Port, Processes, Seconds


class SupervisorConfig(Config):
    """Processes started and monitored by `antiphon serve`."""

    workers: Annotated[
        Processes,
        Help(
            "Number of model workers, each with the whole model. They share cores, free memory, "
            "cache.bytes_max and batching.running_max evenly; other settings apply to each worker."
        ),
    ] = 1
    tokenizers: Annotated[
        Processes,
        Help("Number of tokenizers. Together they use no more threads than there are cores."),
    ] = 1
    detokenizers: Annotated[Processes, Help("Number of detokenizers.")] = 1
    start_timeout_s: Annotated[
        Seconds, Help("Maximum time until all services are ready, in seconds.")
    ] = 60.0
    stop_timeout_s: Annotated[Seconds, Help("Maximum time for a process to exit, in seconds.")] = (
        25.0
    )
    hang_timeout_s: Annotated[
        Seconds,
        Help(
            "Maximum time without a response on its health port, in seconds, before a process is "
            "restarted."
        ),
    ] = 60.0
    nats_port: Annotated[
        Port | None,
        Help(
            "Port of the NATS server started by serve; it must be free, and 0 takes any. Unset: "
            "4222 if free, else any."
        ),
    ] = None
    run_path: Annotated[
        str, Help("Folder for the merged settings and the logs; empty: a temporary folder.")
    ] = ""
    metrics_port_base: Annotated[
        Port,
        Help(
            "First port for health and metrics of the processes; each process takes the next free "
            "one. 0 takes any."
        ),
    ] = 30100
