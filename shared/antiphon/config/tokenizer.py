"""Text to ids: the settings of this service."""

from __future__ import annotations

from typing import Annotated

from antiphon.config.schema import Bytes, Config, Help, Requests, Threads


class TokenizerConfig(Config):
    """Text to ids."""

    threads: Annotated[
        Threads,
        Help("Threads that encode, beside the event loop; as many processes for heavy texts."),
    ] = 1
    batch_max: Annotated[Requests, Help("Most texts encoded in one go.")] = 32
    text_bytes_max: Annotated[Bytes, Help("Longest rendered text.")] = 8 * 1024 * 1024
