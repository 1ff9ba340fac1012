"""A model's tokenizer.json, opened as everything that serves the model uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from antiphon.config.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def open_tokenizer(folder: Path) -> Tokenizer:
    """Open the tokenizer of a folder. Blocks for up to a second or two.

    The file may say how its author's batches were padded and cut. Here a text is neither: padding
    would be tokens that nobody wrote, attended to as any other, and a text that is too long is
    refused by name, not cut in silence.

    Raises:
        ConfigError: The file is missing or malformed; the text names it.
    """
    file = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_buffer(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer
