"""Responses that are kept for who comes back for them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from antiphon.config.schema import Bytes, Config, Help, Seconds

Replicas = Annotated[int, Meta(ge=1, le=5)]


class ResponsesConfig(Config):
    """Responses of /v1/responses that are kept, on the broker, for who comes back for them."""

    store: Annotated[
        bool,
        Help("Whether responses are kept; it takes JetStream. If not, `store: true` is refused."),
    ] = True
    keep_s: Annotated[Seconds, Help("How long a response is kept.")] = 30 * 24 * 3600.0
    bytes_max: Annotated[
        Bytes, Help("All that is kept in the cluster; beyond it, the oldest go.")
    ] = 1024 * 1024 * 1024
    conversation_bytes_max: Annotated[
        Bytes,
        Help("Longest conversation that is kept, as JSON; a longer one needs `store: false`."),
    ] = 8 * 1024 * 1024
    replicas: Annotated[
        Replicas, Help("On how many servers of a NATS cluster each response lies.")
    ] = 1
