"""Settings of every process: bus connection, health port, logs, and shutdown."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from antiphon.config.schema import Bytes, Config, Help, Host, Port, Ratio, Requests, Seconds, Secret


class BusConfig(Config):
    """The connection to NATS."""

    url: Annotated[
        str,
        Help(
            "URLs of the NATS servers (`nats://host:port`), comma-separated; empty: serve starts "
            "a server of its own."
        ),
    ] = ""
    user: Annotated[str, Help("User name for NATS; empty: no authentication.")] = ""
    password: Annotated[
        str, Help("Password for NATS; read from the environment only."), Secret()
    ] = ""
    ping_interval_s: Annotated[
        Seconds, Help("Interval between pings of the NATS connection, in seconds.")
    ] = 2.0
    connect_timeout_s: Annotated[
        Seconds, Help("Timeout of one connection attempt, in seconds.")
    ] = 2.0
    reconnect_wait_s: Annotated[
        Seconds, Help("Mean delay between reconnection attempts, in seconds; jitter is added.")
    ] = 0.2
    payload_bytes_max: Annotated[
        Bytes,
        Help(
            "Maximum message size on NATS, in bytes; a prompt that does not fit into one message "
            "gets a 413."
        ),
    ] = 1024 * 1024

    def __post_init__(self) -> None:
        # The address is written to files and logs; the password must not be.
        if "@" in self.url:
            raise ValueError(
                "url must not contain a user; set bus.user and ANTIPHON_BUS__PASSWORD instead"
            )
        if any(url.strip().startswith(("ws://", "wss://")) for url in self.url.split(",")):
            raise ValueError("url: WebSocket is not supported; use NATS over TCP (nats://)")


class HealthConfig(Config):
    """The endpoint for `/healthz`, `/readyz` and `/metrics` of each process."""

    host: Annotated[Host, Help("Address of the health and metrics endpoint.")] = "127.0.0.1"
    port: Annotated[
        Port, Help("Port of the health and metrics endpoint; 0 takes a free one and announces it.")
    ] = 0


class ServiceConfig(Config):
    """The run loop of every service."""

    heartbeat_s: Annotated[Seconds, Help("Interval between heartbeats, in seconds.")] = 0.5
    drain_timeout_s: Annotated[
        Seconds, Help("Maximum time a stopping process waits for accepted requests, in seconds.")
    ] = 20.0
    slots: Annotated[Requests, Help("Maximum number of calls handled concurrently.")] = 64
    backlog: Annotated[
        Requests, Help("Maximum number of queued calls; further calls are rejected.")
    ] = 1024


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

    log_level: Annotated[LogLevel, Help("Minimum severity of log messages.")] = LogLevel.INFO
    log_format: Annotated[
        LogFormat, Help("Format of log lines: text, or one JSON object per line.")
    ] = LogFormat.TEXT
    traces: Annotated[bool, Help("Whether spans are sent to the OTLP collector.")] = False
    otlp_endpoint: Annotated[
        OtlpEndpoint,
        Help(
            "Endpoint of the OTLP trace collector: gRPC as `host:4317` or `grpc(s)://host:port`, "
            "HTTP as `http(s)://host:4318`."
        ),
    ] = "localhost:4317"
    trace_ratio: Annotated[
        Ratio,
        Help("Ratio of traced requests, among requests without a trace context of their own."),
    ] = 1.0
