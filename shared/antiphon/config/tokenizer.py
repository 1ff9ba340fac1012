"""Settings of the tokenizer service."""

from __future__ import annotations

from typing import Annotated

from antiphon.config.schema import Bytes, Config, Help, Requests, Threads


class TokenizerConfig(Config):
    """Tokenization."""

    threads: Annotated[
        Threads,
        Help("Number of encoding threads besides the event loop, and of processes for long texts."),
    ] = 1
    batch_max: Annotated[Requests, Help("Maximum number of texts encoded in one batch.")] = 32
    text_bytes_max: Annotated[Bytes, Help("Maximum size of a rendered prompt, in bytes.")] = (
        8 * 1024 * 1024
    )
