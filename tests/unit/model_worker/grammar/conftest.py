from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from antiphon import embedded
from antiphon.config.worker import GrammarConfig
from antiphon.model_card.card import read_card
from antiphon.model_card.vocabulary import TokenVocabulary, read_vocabulary
from antiphon.model_worker.grammar.xgrammar_backend import XgrammarCompiler

if TYPE_CHECKING:
    from collections.abc import Callable

CARD = read_card(embedded.path())
END_IDS = frozenset(CARD.eos_ids)


@pytest.fixture(scope="session")
def vocabulary() -> TokenVocabulary:
    return read_vocabulary(embedded.path(), CARD.vocabulary_size)


@pytest.fixture(scope="session")
def compiler_of(vocabulary: TokenVocabulary) -> Callable[..., XgrammarCompiler]:
    """A compiler for the embedded model, with some settings changed."""

    def make(**settings: object) -> XgrammarCompiler:
        config = msgspec.convert(settings, GrammarConfig)
        return XgrammarCompiler(vocabulary, END_IDS, config)

    return make
