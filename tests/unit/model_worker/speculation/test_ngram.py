"""The n-gram drafter: against a trie, by namespace, within its capacity, and with corpora."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.unit.model_worker.speculation.trie import Text, TrieDrafter

from antiphon.config.speculation import MatchType, SpeculationConfig
from antiphon.model_worker.speculation import text_index
from antiphon.model_worker.speculation.ngram import NgramDrafter
from antiphon.wire.codec import pack_ids
from antiphon.wire.errors import InvalidRequest, Unsupported

if TYPE_CHECKING:
    from antiphon.model_worker.speculation.text_index import IndexedText

NAMESPACES = (b"", b"a", b"b")
LONG = SpeculationConfig(verify_tokens=32)
"""Settings with drafts of up to 31 tokens."""


def with_(**changes: object) -> SpeculationConfig:
    return msgspec.structs.replace(LONG, **changes)


def drafter(*texts: list[int], config: SpeculationConfig = LONG) -> NgramDrafter:
    made = NgramDrafter(config)
    for ids in texts:
        insert(made, b"", ids)
    return made


def insert(drafter: NgramDrafter, namespace: bytes, ids: list[int]) -> None:
    text = drafter.texts.begin(namespace)
    drafter.texts.extend(text, pack_ids(ids))
    drafter.texts.end(text)


def proposed(
    drafter: NgramDrafter, tail: list[int], drafts_max: int = 8, namespace: bytes = b""
) -> list[int]:
    return drafter.propose(namespace, pack_ids(tail), drafts_max)


class World:
    """Requests of a few namespaces, in a drafter and in a trie."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        config = self._config()
        self.drafter = NgramDrafter(config)
        self.trie = TrieDrafter(config)
        self.alphabet = self.random.choice([1, 2, 3, 6])
        self.open: list[tuple[IndexedText, Text]] = []

    def _config(self) -> SpeculationConfig:
        window_min = self.random.choice([1, 1, 2, 3])
        window_max = window_min + self.random.randrange(12)
        breadth_min = self.random.randint(1, 3)
        return with_(
            ngram_match=self.random.choice(list(MatchType)),
            ngram_window_min=window_min,
            ngram_window_max=window_max,
            ngram_breadth_min=breadth_min,
            ngram_breadth_max=breadth_min + self.random.choice([0, 1, 4, 9]),
            ngram_depth=window_max + self.random.choice([0, 1, 2, 6]) + (window_max == window_min),
            ngram_capacity=self.random.choice([1, 7, 40, 1000]),
        )

    def act(self) -> None:
        choice = self.random.random()
        if not self.open or choice < 0.1:
            namespace = self.random.choice(NAMESPACES)
            self.open.append((self.drafter.texts.begin(namespace), self.trie.begin(namespace)))
        elif choice < 0.2:
            self.drafter.texts.end(self.open.pop(self.random.randrange(len(self.open)))[0])
        else:
            ids = [self.random.randrange(self.alphabet) for _ in range(self.random.choice([1, 9]))]
            text, reference = self.random.choice(self.open)
            self.drafter.texts.extend(text, pack_ids(ids))
            self.trie.extend(reference, ids)
        assert self.drafter.texts.tokens == self.trie.tokens <= self.trie.config.ngram_capacity

    def check(self) -> None:
        namespace, tail = self.random.choice(NAMESPACES), list[int]()
        if self.open and self.random.random() < 0.8:
            reference = self.random.choice(self.open)[1]
            namespace, tail = reference.namespace, reference.tokens[-12:]
        tail = tail or [self.random.randrange(self.alphabet) for _ in range(12)]
        drafts_max = self.random.choice([0, 1, 3, 8, 30])
        expected = self.trie.propose(namespace, tail, drafts_max) if drafts_max else []
        assert proposed(self.drafter, tail, drafts_max, namespace) == expected


def one_hash(data: bytes, start: int = 0) -> int:
    """Puts all n-grams of all namespaces into one chain."""
    return 0


@pytest.mark.parametrize("seed", range(250))
def test_drafts_are_the_best_paths_through_a_trie(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_index, "MATCHES_MAX", 10**6)
    monkeypatch.setattr(text_index, "STEPS_MAX", 10**6)
    monkeypatch.setattr(text_index, "BUCKETS_MIN", 1)
    if seed % 5 == 0:
        monkeypatch.setattr(text_index, "crc32", one_hash)
    world = World(seed)
    for _ in range(40):
        world.act()
        world.check()


def test_longest_match_is_continued_first() -> None:
    made = drafter([7, 1, 2, 3, 30], [8, 1, 2, 3, 40], [9, 9, 3, 50])
    assert proposed(made, [7, 1, 2, 3], 1) == [30]
    assert proposed(made, [1, 2, 3], 1) == [40]
    assert proposed(made, [3], 1) == [50]


def test_windows_limit_a_match() -> None:
    texts = [7, 1, 2, 3, 30], [8, 1, 2, 3, 40]
    assert proposed(drafter(*texts, config=with_(ngram_window_max=3)), [7, 1, 2, 3], 1) == [40]
    assert proposed(drafter(*texts, config=with_(ngram_window_min=3)), [9, 2, 3]) == []


def test_branch_limits_a_match_and_its_draft_together() -> None:
    made = drafter(list(range(30)), config=with_(ngram_depth=13))
    assert proposed(made, list(range(12)), 20) == list(range(12, 24))  # shorter matches go on
    assert proposed(made, [100, *range(1, 3)], 20) == list(range(3, 15))
    made = drafter(list(range(30)), config=with_(ngram_depth=13, ngram_window_min=12))
    assert proposed(made, list(range(12)), 20) == [12]


def test_settings_limit_a_draft() -> None:
    made = drafter(list(range(30)), config=with_(verify_tokens=4))
    assert proposed(made, [0]) == [1, 2, 3]
    assert proposed(made, [0], 2) == [1, 2]


def test_match_is_shorter_than_the_depth() -> None:
    texts = [7, 1, 2, 3, 30], [8, 1, 2, 3, 40]
    assert proposed(drafter(*texts, config=with_(ngram_depth=5)), [7, 1, 2, 3], 1) == [30]
    assert proposed(drafter(*texts, config=with_(ngram_depth=4)), [7, 1, 2, 3], 1) == [40]


def test_only_the_newest_occurrences_are_read() -> None:
    newest = [[1, 5]] * text_index.MATCHES_MAX
    many = [[1, 4]] * 100
    assert proposed(drafter(*many, *newest[1:]), [1], 1) == [5]
    frequent = with_(ngram_match=MatchType.PROB)
    assert proposed(drafter(*many, [1, 5], [1, 4], [1, 5], config=frequent), [1], 1) == [4]
    assert proposed(drafter(*many, *newest, config=frequent), [1], 1) == [5]
    assert proposed(drafter(*many, *newest[8:], config=frequent), [1], 1) == [5]


def test_chain_of_other_ngrams_is_read_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_index, "crc32", one_hash)
    others = list(range(100, 100 + text_index.STEPS_MAX))
    assert proposed(drafter([1, 2], others[2:]), [1]) == [2]
    assert proposed(drafter([1, 2], others), [1]) == []


def test_branching_context_has_a_short_draft() -> None:
    texts = [[1, token, *range(token, token + 8)] for token in (10, 30, 50, 70)]
    assert proposed(drafter(*texts[:1]), [1]) == [10, *range(10, 17)]
    assert proposed(drafter(*texts), [1]) == [70, 70]
    narrow = with_(ngram_breadth_max=1)
    assert proposed(drafter(*texts, config=narrow), [1]) == [70, *range(70, 77)]


def test_match_type_decides_between_recent_and_frequent() -> None:
    texts = [1, 2], [1, 2], [1, 3]
    for match_type, breadth_max, expected in (("BFS", 1, 3), ("BFS", 10, 2), ("PROB", 1, 2)):
        config = with_(ngram_match=MatchType(match_type), ngram_breadth_max=breadth_max)
        assert proposed(drafter(*texts, config=config), [1]) == [expected]


def test_request_reads_its_own_output_at_once() -> None:
    made = drafter()
    text = made.texts.begin(b"")
    for token in (1, 2, 3, 1):
        made.texts.extend(text, pack_ids([token]))
    assert proposed(made, [2, 3, 1]) == [2, 3, 1]


def test_namespace_never_reads_another() -> None:
    made = drafter()
    insert(made, b"tenant", [1, 2, 3])
    assert proposed(made, [1], namespace=b"tenant") == [2, 3]
    assert proposed(made, [1], namespace=b"other") == proposed(made, [1]) == []


def test_memory_is_bounded_by_the_capacity() -> None:
    capacity = 64
    made = drafter(config=with_(ngram_capacity=capacity))
    source = random.Random(0)
    running = made.texts.begin(b"running")
    for number in range(2000):
        insert(made, b"%d" % number, [source.randrange(50) for _ in range(source.randrange(5))])
        made.texts.extend(running, pack_ids([source.randrange(50)]))
        made.texts.end(made.texts.begin(b"empty"))
    index = made.texts
    assert made.texts.tokens == capacity
    texts = [text for text in index._texts if text is not None]
    assert sum(len(text.ids) for text in texts) == 4 * capacity
    assert len(index._texts) <= capacity + 1
    assert {text.root.namespace for text in texts} == set(index._roots)
    columns = (index._owners, index._positions, *index._distances)
    assert {len(column) for column in columns} == {capacity}
    assert {len(heads) for heads in index._heads} == {text_index.BUCKETS_MIN}


def test_evicted_text_is_not_proposed() -> None:
    made = drafter([1, 2, 3], config=with_(ngram_capacity=5))
    assert proposed(made, [1]) == [2, 3]
    insert(made, b"x", [7, 7])
    assert proposed(made, [1]) == [2, 3]
    insert(made, b"x", [7])
    assert proposed(made, [1]) == []
    assert proposed(made, [2]) == [3]


def test_numbers_of_tokens_may_exceed_32_bits() -> None:
    made = drafter([1, 2, 3, 4], config=with_(ngram_capacity=4))
    made.texts._now += 4 * 2**40
    insert(made, b"", [1, 2, 3])
    assert proposed(made, [1]) == [2, 3]


CORPORA = with_(corpus_draft_tokens=4, corpus_tokens_max=10)


def packed(*documents: list[int]) -> list[bytes]:
    return [pack_ids(document) for document in documents]


def test_corpus_is_read_by_all_namespaces_until_it_is_removed() -> None:
    made = drafter(config=CORPORA)
    assert made.add_corpus("code", packed([1, 2, 3], [1, 4])) == 5
    assert made.list_corpora() == {"code": 5}
    for namespace in (b"", b"tenant"):
        assert proposed(made, [2], namespace=namespace) == [3]
        assert proposed(made, [3], namespace=namespace) == []  # the next document is another text
    assert made.texts.tokens == 0
    made.remove_corpus("code")
    assert made.list_corpora() == {}
    assert proposed(made, [2]) == []


def test_corpus_counts_where_its_match_is_longer() -> None:
    made = drafter([1, 2, 3], [5, 6, 7], config=CORPORA)
    made.add_corpus("first", packed([9, 2, 4], [5, 6, 8]))
    made.add_corpus("second", packed([8, 2, 5]))
    assert proposed(made, [1, 2]) == [3]
    assert proposed(made, [9, 2]) == [4]
    assert proposed(made, [8, 2]) == [5]
    assert proposed(made, [5, 6]) == [7]


def test_draft_of_a_corpus_has_its_own_limit() -> None:
    made = drafter(config=CORPORA)
    made.add_corpus("code", packed(list(range(10))))
    assert proposed(made, [0]) == [1, 2, 3, 4]
    assert proposed(made, [0], 2) == [1, 2]


def test_corpora_are_refused_by_name_and_by_size() -> None:
    made = drafter(config=CORPORA)
    made.add_corpus("code", packed([1, 2, 3]))
    with pytest.raises(InvalidRequest, match="corpus_id: 'code' already exists; remove it first"):
        made.add_corpus("code", packed([4]))
    with pytest.raises(InvalidRequest, match="documents: the corpora would have more than 10"):
        made.add_corpus("prose", packed([1] * 4, [1] * 4))
    with pytest.raises(InvalidRequest, match="corpus_id: 'prose' does not exist"):
        made.remove_corpus("prose")
    assert made.list_corpora() == {"code": 3}
    made.add_corpus("prose", packed([1] * 7))
    with pytest.raises(Unsupported):
        drafter().add_corpus("code", packed([1]))
