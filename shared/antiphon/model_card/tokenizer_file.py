"""Open a model's tokenizer.json, in the same way in all services."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from antiphon.config.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def open_tokenizer(folder: Path) -> Tokenizer:
    """Open the tokenizer of a folder. Blocks for up to a second or two.

    Padding and truncation settings of the file are disabled: padding tokens would be attended to
    like any other, and a prompt that is too long is rejected with an error, not silently truncated.
    """
    file = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_buffer(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer
