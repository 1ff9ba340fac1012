"""`antiphon serve`: one machine, every service."""

from __future__ import annotations

from typing import Annotated

from antiphon.config.schema import Config, Help, Port, Processes, Seconds


class SupervisorConfig(Config):
    """How the processes of one machine are started and watched."""

    workers: Annotated[
        Processes,
        Help(
            "Number of model workers, each with the whole model. They share cores, free memory, "
            "cache.bytes_max and batching.running_max evenly; other settings hold for each worker."
        ),
    ] = 1
    tokenizers: Annotated[
        Processes,
        Help("Number of tokenizers. The threads of all together are no more than the cores."),
    ] = 1
    detokenizers: Annotated[Processes, Help("Number of detokenizers.")] = 1
    start_timeout_s: Annotated[Seconds, Help("How long all services may take to be ready.")] = 60.0
    stop_timeout_s: Annotated[Seconds, Help("How long a process may take to leave.")] = 25.0
    hang_timeout_s: Annotated[
        Seconds,
        Help("Maximum time without an answer on its health port before a process is restarted."),
    ] = 60.0
    nats_port: Annotated[
        Port | None,
        Help(
            "Port of the NATS server that serve starts; it must be free, and 0 takes any. Unset: "
            "4222 if that is free, else any."
        ),
    ] = None
    run_path: Annotated[
        str, Help("Folder for the merged settings and the logs; empty: a temporary one.")
    ] = ""
    metrics_port_base: Annotated[
        Port,
        Help(
            "First port for the health and metrics of the processes; each takes the next that is "
            "free. 0 takes any."
        ),
    ] = 30100
