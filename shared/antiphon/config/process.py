"""How a process lives: its bus connection, health port, logs, and the way it stops."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from antiphon.config.schema import Bytes, Config, Help, Host, Port, Ratio, Requests, Seconds, Secret


class BusConfig(Config):
    """The connection to NATS."""

    url: Annotated[
        str, Help("Servers, comma-separated (`nats://host:port`); empty: serve starts its own.")
    ] = ""
    user: Annotated[str, Help("NATS user; empty means no authentication.")] = ""
    password: Annotated[str, Help("Its password; comes by environment only."), Secret()] = ""
    ping_interval_s: Annotated[Seconds, Help("How often the link is probed.")] = 2.0
    connect_timeout_s: Annotated[Seconds, Help("How long one connection attempt may take.")] = 2.0
    reconnect_wait_s: Annotated[Seconds, Help("Mean pause between attempts; jittered.")] = 0.2
    payload_bytes_max: Annotated[
        Bytes, Help("Largest message on the broker; a prompt that does not fit in one is a 413.")
    ] = 1024 * 1024

    def __post_init__(self) -> None:
        # The address is written to files and shown in logs; the password may not come along.
        if "@" in self.url:
            raise ValueError("url holds a user; give bus.user, and ANTIPHON_BUS__PASSWORD")
        if any(url.strip().startswith(("ws://", "wss://")) for url in self.url.split(",")):
            raise ValueError("url speaks of WebSocket; services speak NATS over TCP (nats://)")


class HealthConfig(Config):
    """Where a process answers `/healthz`, `/readyz` and `/metrics`."""

    host: Annotated[Host, Help("Address to listen on.")] = "127.0.0.1"
    port: Annotated[Port, Help("Port to listen on; 0 takes any and announces it.")] = 0


class ServiceConfig(Config):
    """The run loop of every service."""

    heartbeat_s: Annotated[Seconds, Help("Pause between heartbeats.")] = 0.5
    drain_timeout_s: Annotated[
        Seconds, Help("How long a stopping process waits for what it has accepted.")
    ] = 20.0
    slots: Annotated[Requests, Help("Most calls handled at once.")] = 64
    backlog: Annotated[Requests, Help("Most calls waiting; one more is refused.")] = 1024


class LogFormat(StrEnum):
    """How a log line is written."""

    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    """The lowest severity that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


OtlpEndpoint = Annotated[
    str,
    Meta(pattern=r"^((grpcs?|https?)://)?(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?(/\S*)?$"),
]


class TelemetryConfig(Config):
    """Logs and traces."""

    log_level: Annotated[LogLevel, Help("Lowest severity that is logged.")] = LogLevel.INFO
    log_format: Annotated[LogFormat, Help("Form of a log line.")] = LogFormat.TEXT
    traces: Annotated[bool, Help("Whether spans are sent to the OTLP collector.")] = False
    otlp_endpoint: Annotated[
        OtlpEndpoint,
        Help(
            "OTLP collector of traces: gRPC as `host:4317` or `grpc(s)://host:port`, HTTP as "
            "`http(s)://host:4318`."
        ),
    ] = "localhost:4317"
    trace_ratio: Annotated[
        Ratio, Help("Share of requests traced, of those that bring no trace of their own.")
    ] = 1.0
