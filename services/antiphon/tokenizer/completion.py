"""Chooses the fill-in-the-middle template of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.config.completion_template import TEMPLATES, read_template
from antiphon.config.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from antiphon.config.completion_template import CompletionTemplate


def choose_completion_template(
    tokenizer: Tokenizer, name_or_file: str
) -> CompletionTemplate | None:
    """Return the configured template, or the only one whose markers are all special tokens here.

    Args:
        tokenizer: Its added tokens are matched; text is never split within one.
        name_or_file: A name or a file; empty: detect it by the tokenizer.

    Raises:
        ConfigError: The template cannot be read, or this tokenizer lacks one of its markers.
    """
    tokens = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    if name_or_file:
        template = read_template(name_or_file)
        missing = [mark for mark in template.marks if mark not in tokens]
        if missing:
            text = f"the tokenizer has no token {', '.join(missing)}"
            raise ConfigError(f"model.completion_template: {template.name}: {text}")
        return template
    found = [template for template in TEMPLATES if tokens.issuperset(template.marks)]
    return found[0] if len(found) == 1 else None
