"""Settings of /generate sessions: their stored tokens, which later requests continue."""

from __future__ import annotations

from typing import Annotated

from antiphon.config.responses import Replicas
from antiphon.config.schema import Bytes, Config, Help, Seconds


class SessionsConfig(Config):
    """Sessions of /generate, kept in JetStream and available at every gateway."""

    store: Annotated[
        bool,
        Help(
            "Whether sessions are stored on NATS, which requires JetStream. Otherwise each "
            "session lives in the memory of the gateway that opened it and is unknown to other "
            "gateways."
        ),
    ] = True
    keep_s: Annotated[
        Seconds,
        Help(
            "Retention time of the contents of a session, in seconds, whether they are used or not."
        ),
    ] = 24 * 3600.0
    bytes_max: Annotated[
        Bytes,
        Help(
            "Maximum size of all stored sessions, in bytes; beyond it the oldest contents are "
            "deleted."
        ),
    ] = 256 * 1024 * 1024
    replicas: Annotated[Replicas, Help("Number of replicas of each session in a NATS cluster.")] = 1
