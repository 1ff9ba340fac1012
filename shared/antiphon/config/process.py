"""Settings of every process: bus connection, health port, logs, and shutdown."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from antiphon.config.schema import Bytes, Config, Host, Port, Ratio, Requests, Seconds, Secret


class BusConfig(Config):
    """The connection to NATS."""

    url: str = ""
    """URLs of the NATS servers (`nats://host:port`), comma-separated; empty: serve starts a server
    of its own."""
    user: str = ""
    """User name for NATS; empty: no authentication."""
    password: Annotated[str, Secret()] = ""
    """Password for NATS; read from the environment only."""
    ping_interval_s: Seconds = 2.0
    """Interval between pings of the NATS connection, in seconds."""
    connect_timeout_s: Seconds = 2.0
    """Timeout of one connection attempt, in seconds."""
    reconnect_wait_s: Seconds = 0.2
    """Mean delay between reconnection attempts, in seconds; jitter is added."""
    payload_bytes_max: Bytes = 1024 * 1024
    """Maximum message size on NATS, in bytes; a prompt that does not fit into one message gets a
    413."""

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

    host: Host = "127.0.0.1"
    """Address of the health and metrics endpoint."""
    port: Port = 0
    """Port of the health and metrics endpoint; 0 takes a free one and announces it."""


class ServiceConfig(Config):
    """The run loop of every service."""

    heartbeat_s: Seconds = 0.5
    """Interval between heartbeats, in seconds."""
    drain_timeout_s: Seconds = 20.0
    """Maximum time a stopping process waits for accepted requests, in seconds."""
    slots: Requests = 64
    """Maximum number of calls handled concurrently."""
    backlog: Requests = 1024
    """Maximum number of queued calls; further calls are rejected."""


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
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

    log_level: LogLevel = LogLevel.INFO
    """Minimum severity of log messages."""
    log_format: LogFormat = LogFormat.TEXT
    """Format of log lines: text, or one JSON object per line."""
    traces: bool = False
    """Whether spans are sent to the OTLP collector."""
    otlp_endpoint: OtlpEndpoint = "localhost:4317"
    """Endpoint of the OTLP trace collector: gRPC as `host:4317` or `grpc(s)://host:port`, HTTP as
    `http(s)://host:4318`."""
    trace_ratio: Ratio = 1.0
    """Ratio of traced requests, among requests without a trace context of their own."""
