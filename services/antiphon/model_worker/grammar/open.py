"""Opens the grammar compiler of a model folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.model_card.vocabulary import read_vocabulary
from antiphon.wire.errors import Unsupported

if TYPE_CHECKING:
    from pathlib import Path

    from antiphon.config.worker import GrammarConfig
    from antiphon.model_worker.grammar.backend import GrammarCompiler


def open_compiler(
    folder: Path, vocab_size: int, end_ids: frozenset[int], config: GrammarConfig
) -> GrammarCompiler:
    """Create the compiler for a tokenizer. Blocks for a second or two.

    Args:
        folder: Contains tokenizer.json.
        vocab_size: Tokens that the model has logits for.
        end_ids: EOS tokens of the model, at least one.
        config: Settings of grammar compilation.

    Raises:
        Unsupported: The bytes of the tokenizer's tokens cannot be derived.
    """
    vocabulary = read_vocabulary(folder, vocab_size)
    # xgrammar imports transformers, which workers that never get a grammar need not load.
    from antiphon.model_worker.grammar import xgrammar_backend  # noqa: PLC0415

    return xgrammar_backend.XgrammarCompiler(vocabulary, end_ids, config)


def no_compiler(reason: str = "it runs no model") -> GrammarCompiler:
    """Stands in for `open_compiler` on a worker without grammars.

    Raises:
        Unsupported: Always, with the reason.
    """
    raise Unsupported(f"this worker has no grammars: {reason}", param="grammar")
