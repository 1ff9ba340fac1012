"""Sessions of /generate: what was said in them, kept for the requests that go on from it."""

from __future__ import annotations

from typing import Annotated

from antiphon.config.responses import Replicas
from antiphon.config.schema import Bytes, Config, Help, Seconds


class SessionsConfig(Config):
    """Sessions of /generate, kept on the broker, so that they are open at every gateway."""

    store: Annotated[
        bool,
        Help(
            "Whether sessions lie on the broker; it takes JetStream. If not, each is kept in the "
            "memory of the gateway that opened it, and known there alone."
        ),
    ] = True
    keep_s: Annotated[
        Seconds, Help("How long what was said in a session is kept, used or not.")
    ] = 24 * 3600.0
    bytes_max: Annotated[
        Bytes, Help("All that is kept; beyond it, what was said longest ago goes.")
    ] = 256 * 1024 * 1024
    replicas: Annotated[
        Replicas, Help("On how many servers of a NATS cluster each session lies.")
    ] = 1
