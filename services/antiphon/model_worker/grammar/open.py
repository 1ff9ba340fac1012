"""From a model folder to its compiler of grammars."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.model_card.vocabulary import read_vocabulary
from antiphon.wire.errors import Unsupported

if TYPE_CHECKING:
    from pathlib import Path

    from antiphon.config.grammar import GrammarConfig
    from antiphon.model_worker.grammar.backend import GrammarCompiler


def open_compiler(
    folder: Path, vocab_size: int, end_ids: frozenset[int], config: GrammarConfig
) -> GrammarCompiler:
    """Make the compiler for a tokenizer. Blocks for a second or two.

    Args:
        folder: Where tokenizer.json is.
        vocab_size: Tokens that the model has logits for.
        end_ids: Tokens with which the model ends an answer, at least one.
        config: How grammars are compiled.

    Raises:
        Unsupported: The tokenizer's tokens do not say which bytes they write.
    """
    vocabulary = read_vocabulary(folder, vocab_size)
    # Its library imports transformers: whoever never asks for a grammar does not pay for that.
    from antiphon.model_worker.grammar import xgrammar_backend  # noqa: PLC0415

    return xgrammar_backend.XgrammarCompiler(vocabulary, end_ids, config)


def no_compiler(reason: str = "it runs no model") -> GrammarCompiler:
    """What a worker without grammars has in the place of `open_compiler`.

    Raises:
        Unsupported: Always, with the reason.
    """
    raise Unsupported(f"this worker has no grammars: {reason}", param="grammar")
