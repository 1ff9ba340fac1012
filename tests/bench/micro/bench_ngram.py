"""What the n-gram drafter costs: `pytest tests/bench/micro/bench_ngram.py`.

An index of 400,000 tokens, drawn from 20,000 with the frequencies of words. A token is hashed for
each of four widths and written to six arrays, which was expected to take less than 5 us. A draft
reads up to 16 occurrences, for 1 us each, and makes up to 8 nodes, for 2 us each. Medians on one
core of a machine with two that others used too:

===============================  =====
us                               here
===============================  =====
extend, one token                  3.4
extend, 4 tokens, each             2.1
extend, 2,048 tokens, each         1.3
the same while evicting, each      1.7
propose, no match                   11
propose, one continuation          7.2
propose, 16 continuations, BFS      41
propose, 16 continuations, PROB     62
===============================  =====

An index of 1,000,000 tokens takes 70 MB. A trie of dictionaries with a depth of 18 took 17 us and
3,200 bytes for each token of source code.
"""

from __future__ import annotations

import random
from itertools import accumulate
from typing import TYPE_CHECKING

import pytest

from antiphon.config.speculation import MatchType, SpeculationConfig
from antiphon.model_worker.speculation.ngram import NgramDrafter
from antiphon.wire.codec import pack_ids

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

VOCABULARY = 20_000
TOKENS = 400_000
TEXT_TOKENS = 1000
COMMON = list(accumulate(1 / rank for rank in range(1, VOCABULARY + 1)))
ROUNDS = 2000


def ids(source: random.Random, tokens: int) -> bytes:
    """Tokens by Zipf's law; the ids from `VOCABULARY` on are never drawn."""
    return pack_ids(source.choices(range(VOCABULARY), cum_weights=COMMON, k=tokens))


def loaded(match_type: MatchType = MatchType.BFS, capacity: int = 10 * TOKENS) -> NgramDrafter:
    source = random.Random(0)
    config = SpeculationConfig(verify_tokens=9, ngram_match=match_type, ngram_capacity=capacity)
    drafter = NgramDrafter(config)
    for _ in range(TOKENS // TEXT_TOKENS):
        text = drafter.texts.begin(b"n")
        drafter.texts.extend(text, ids(source, TEXT_TOKENS))
        drafter.texts.end(text)
    return drafter


@pytest.mark.parametrize("evicting", [False, True])
@pytest.mark.parametrize("tokens", [1, 4, 2048])
def test_extend(benchmark: BenchmarkFixture, tokens: int, evicting: bool) -> None:
    drafter = loaded(capacity=TOKENS if evicting else 10 * TOKENS)
    source = random.Random(1)
    text = drafter.texts.begin(b"n")
    rounds = ROUNDS if tokens < 100 else 50
    benchmark.extra_info["tokens"] = tokens
    benchmark.pedantic(
        drafter.texts.extend, setup=lambda: ((text, ids(source, tokens)), {}), rounds=rounds
    )


@pytest.mark.parametrize("match_type", MatchType)
@pytest.mark.parametrize("case", ["none", "one continuation", "many continuations"])
def test_propose(benchmark: BenchmarkFixture, case: str, match_type: MatchType) -> None:
    drafter = loaded(match_type)
    tail = pack_ids(range(VOCABULARY, VOCABULARY + 12))
    if case == "one continuation":
        text = drafter.texts.begin(b"n")
        drafter.texts.extend(text, tail + ids(random.Random(1), 100))
    elif case == "many continuations":
        tail = tail[:44] + pack_ids([0])
    drafts = drafter.propose(b"n", tail, 8)
    assert (len(drafts) == 8) == (case == "one continuation")
    benchmark.pedantic(drafter.propose, (b"n", tail, 8), rounds=ROUNDS)
