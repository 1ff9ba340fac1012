"""Settings of stored responses."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from antiphon.config.schema import Bytes, Config, Help, Seconds

Replicas = Annotated[int, Meta(ge=1, le=5)]


class ResponsesConfig(Config):
    """Stored responses of /v1/responses, kept in JetStream."""

    store: Annotated[
        bool,
        Help(
            "Whether responses are stored, which requires JetStream. Otherwise `store: true` is "
            "rejected."
        ),
    ] = True
    keep_s: Annotated[Seconds, Help("Retention time of a stored response, in seconds.")] = (
        30 * 24 * 3600.0
    )
    bytes_max: Annotated[
        Bytes,
        Help(
            "Maximum size of all stored responses in the cluster, in bytes; beyond it the oldest "
            "are deleted."
        ),
    ] = 1024 * 1024 * 1024
    conversation_bytes_max: Annotated[
        Bytes,
        Help(
            "Maximum size of a stored conversation as JSON, in bytes; longer conversations "
            "require `store: false`."
        ),
    ] = 8 * 1024 * 1024
    replicas: Annotated[
        Replicas, Help("Number of replicas of each stored response in a NATS cluster.")
    ] = 1
