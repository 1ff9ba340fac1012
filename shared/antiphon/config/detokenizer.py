"""Settings of the detokenizer service."""

from __future__ import annotations

from typing import Annotated

from antiphon.config.schema import Config, Help, Requests


class DetokenizerConfig(Config):
    """Detokenization."""

    requests_max: Annotated[Requests, Help("Maximum number of concurrent requests.")] = 8192
