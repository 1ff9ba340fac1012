"""Which workers have grammars, and what the others say."""

from __future__ import annotations

import msgspec
import pytest

from antiphon import embedded
from antiphon.config.settings import Settings
from antiphon.config.worker import GrammarConfig
from antiphon.model_card.card import read_card
from antiphon.model_card.vocabulary import read_vocabulary
from antiphon.model_worker.grammar.backend import no_compiler, open_compiler
from antiphon.model_worker.grammar.source import GrammarSource
from antiphon.resolve.device import HostDevice
from antiphon.resolve.resolved_config import resolve
from antiphon.wire.errors import Unsupported
from antiphon.wire.sampling import GrammarKind

CARD = read_card(embedded.path())
DEVICE = msgspec.convert(
    {"kind": "cpu", "cores": 2, "memory_bytes": 2**34}, HostDevice, from_attributes=True
)


def test_grammars_need_a_token_that_ends_an_answer() -> None:
    endless = msgspec.structs.replace(CARD, eos_ids=())
    decided = resolve(Settings(), endless, DEVICE).grammar
    assert (decided.value, decided.reason) == (
        "none",
        "the model has no end-of-sequence token",
    )
    assert resolve(Settings(), CARD, DEVICE).grammar.value == "xgrammar"


def test_grammars_can_be_switched_off() -> None:
    off = Settings(grammar=GrammarConfig(backend="none"))
    decided = resolve(off, CARD, DEVICE).grammar
    assert (decided.value, decided.reason) == ("none", "grammar.backend")
    with pytest.raises(Unsupported, match=r"has no grammars: grammar\.backend"):
        no_compiler(decided.reason)


def test_a_folder_with_a_tokenizer_has_a_compiler() -> None:
    compiler = open_compiler(
        embedded.path(), CARD.vocabulary_size, frozenset(CARD.eos_ids), GrammarConfig()
    )
    made = compiler.compile(GrammarSource(GrammarKind.REGEX, "a"))
    assert made.size_bytes > 0
    assert made.start(()).accept(read_vocabulary(embedded.path(), 1024).tokens.index(b"a"))
