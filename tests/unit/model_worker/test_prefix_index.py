"""The prefix index: what is found, what is taken over, and what goes first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.worker import commit, compute, launch, page_group

from antiphon.model_worker.cache.eviction import STRATEGIES
from antiphon.model_worker.cache.groups import HOLE, CacheGroup, GroupKind
from antiphon.model_worker.cache.pages import CachePools, PageTable
from antiphon.model_worker.cache.radix import RadixIndex
from antiphon.model_worker.cache.tree import CacheKey
from antiphon.wire.codec import pack_ids

PAGE_TOKENS = 4


def group(kind: GroupKind, window: int | None = None, pages: int = 64) -> CacheGroup:
    return page_group(pages, kind, window)


FULL, WINDOW = group(GroupKind.FULL), group(GroupKind.WINDOW, window=9)


class Bench:
    """An index and requests that run through it."""

    def __init__(self, *groups: CacheGroup, strategy: str = "lru") -> None:
        self.pools = CachePools(groups or (FULL,))
        self.index = RadixIndex(self.pools, STRATEGIES[strategy])

    def key(self, text: str, namespace: bytes = b"n") -> CacheKey:
        """Each letter is a page."""
        tokens = [ord(letter) for letter in text for _ in range(PAGE_TOKENS)]
        return CacheKey(namespace=namespace, token_ids=pack_ids(tokens))

    def begin(self, text: str) -> PageTable:
        key = self.key(text)
        table = self.index.match(key) or PageTable(self.pools)
        self.index.use(key, table.committed)
        table.allocate(len(text) * PAGE_TOKENS)
        return table

    def compute(self, text: str) -> PageTable:
        """A request runs and is kept by the index; it still holds its pages."""
        table = self.begin(text)
        compute(table, len(text) * PAGE_TOKENS)
        self.index.insert(self.key(text), table)
        return table

    def serve(self, *texts: str) -> None:
        """Requests run to their ends."""
        for text in texts:
            self.compute(text).release()

    def matched(self, key: CacheKey) -> int:
        table = self.index.match(key)
        return 0 if table is None else table.committed

    def found(self, text: str) -> int:
        """Pages of a prompt that the index would give."""
        return self.index.peek(self.key(text)).length // PAGE_TOKENS


def test_the_longest_prefix_of_whole_pages_is_found() -> None:
    bench = Bench()
    bench.serve("abcd", "abxy")
    assert [bench.found(text) for text in ("abcd", "abcde", "abxz", "abq", "b")] == [3, 4, 3, 2, 0]


def test_one_token_is_always_left_to_compute() -> None:
    bench = Bench()
    bench.serve("abc")
    key = bench.key("abc")
    assert bench.matched(key) == 2 * PAGE_TOKENS
    longer = CacheKey(namespace=key.namespace, token_ids=key.token_ids + pack_ids([1]))
    assert bench.matched(longer) == 3 * PAGE_TOKENS


def test_a_prefix_does_not_cross_namespaces() -> None:
    bench = Bench()
    bench.serve("abc")
    assert bench.index.peek(bench.key("abcd", b"other")).length == 0


def test_a_peek_holds_nothing_and_a_match_holds_what_it_found() -> None:
    bench = Bench()
    bench.serve("abc")
    bench.index.peek(bench.key("abcd"))
    assert bench.index.evictable() == [3]
    table = bench.index.match(bench.key("abx"))
    assert table is not None
    assert bench.index.evictable() == [1]
    assert bench.index.evict([3]) == 1
    assert table.pages(0) == bench.index.match(bench.key("abx")).pages(0)  # type: ignore[union-attr]


def test_a_request_that_still_runs_is_found_by_others() -> None:
    bench = Bench()
    table = bench.begin("abcdef")
    table.commit(3 * PAGE_TOKENS + 1)
    bench.index.insert(bench.key("abcdef"), table)
    assert bench.found("abcdef") == 3
    table.commit(6 * PAGE_TOKENS)
    bench.index.insert(bench.key("abcdef"), table)
    assert bench.found("abcdef!") == 6
    assert bench.index.evictable() == [0]


def test_two_that_compute_the_same_end_up_with_one_copy() -> None:
    bench = Bench()
    one, other = bench.begin("abc"), bench.begin("abc")
    for table in (one, other):
        table.commit(3 * PAGE_TOKENS)
    bench.index.insert(bench.key("abc"), one)
    assert other.revision == 0
    bench.index.insert(bench.key("abc"), other)
    assert one.pages(0) == other.pages(0)
    assert other.revision > 0
    assert bench.pools.used() == [3]


def test_a_copy_that_a_fork_shares_is_kept_until_the_fork_is_gone() -> None:
    bench = Bench()
    one, other = bench.begin("abc"), bench.begin("abc")
    other.commit(3 * PAGE_TOKENS)
    fork = other.fork()
    one.commit(2 * PAGE_TOKENS)
    bench.index.insert(bench.key("ab"), one)
    bench.index.insert(bench.key("abc"), other)
    assert bench.found("abc!") == 2
    fork.release()
    bench.index.insert(bench.key("abc"), other)
    assert bench.found("abc!") == 3
    assert one.pages(0)[:2] == other.pages(0)[:2]


@pytest.mark.parametrize(
    ("texts", "evicted", "found"),
    [(["abcd"], 2, [2]), (["prompt:answer", "q", "prompt:x"], 6, [7, 1, 8])],
    ids=["the end of a prompt first", "a prompt that was found again last"],
)
def test_pages_are_evicted_in_order(texts: list[str], evicted: int, found: list[int]) -> None:
    bench = Bench()
    bench.serve(*texts)
    bench.index.evict([evicted])
    assert [bench.found(text + "!") for text in texts] == found


def test_least_recent_goes_first_and_a_use_counts() -> None:
    bench = Bench()
    bench.serve("a", "b", "c")
    bench.index.use(bench.key("a!"), PAGE_TOKENS)
    bench.serve("d")
    bench.index.evict([2])
    assert [bench.found(text + "!") for text in "abcd"] == [1, 0, 0, 1]


def test_least_often_goes_first_even_if_it_was_of_use_last() -> None:
    bench = Bench(strategy="lfu")
    bench.serve("a", "b")
    for _ in range(2):
        bench.index.use(bench.key("a!"), PAGE_TOKENS)
    bench.serve("c", "d")
    bench.index.evict([1])
    assert [bench.found(text + "!") for text in "abcd"] == [1, 0, 1, 1]
    bench.index.evict([2])
    assert [bench.found(text + "!") for text in "abcd"] == [1, 0, 0, 0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_who_finds_a_prefix_and_does_not_start_has_not_used_it(strategy: str) -> None:
    bench = Bench(strategy=strategy)
    bench.serve("a", "b")
    for _ in range(2):
        table = bench.index.match(bench.key("a!"))
        assert table is not None
        table.release()
    bench.index.evict([1])
    assert [bench.found(text + "!") for text in "ab"] == [0, 1]


def test_what_a_request_held_while_others_were_evicted_can_go_when_it_has_ended() -> None:
    bench = Bench()
    held = bench.compute("abc")
    bench.serve("xy")
    assert bench.index.evict([5]) == 2
    assert bench.index.evictable() == [0]
    held.release()
    assert bench.index.evictable() == [3]
    assert bench.index.evict([3]) == 3
    assert bench.pools.free() == [64]


def test_after_a_clear_nothing_is_found_and_nothing_old_comes_back() -> None:
    bench = Bench()
    bench.serve("xyz")
    running = bench.compute("abc")
    generation = bench.index.generation
    assert bench.index.clear() == 3
    assert bench.index.generation > generation
    assert bench.found("abc!") == bench.found("xyz!") == 0
    bench.index.insert(bench.key("abc"), running)
    bench.index.insert(bench.key("abc"), fork := running.fork())
    assert bench.found("abc!") == 0
    running.release()
    fork.release()
    assert bench.pools.free() == [64]
    bench.serve("abc")
    assert bench.found("abc!") == 3


def test_a_retry_of_the_same_table_begins_anew_after_a_clear() -> None:
    bench = Bench()
    table = bench.compute("ab")
    bench.index.clear()
    table.release()
    table.allocate(2 * PAGE_TOKENS)
    table.commit(2 * PAGE_TOKENS)
    bench.index.insert(bench.key("ab"), table)
    assert bench.found("ab!") == 2


def test_the_generation_stands_while_nothing_changes() -> None:
    bench = Bench()
    table = bench.compute("abc")
    generation = bench.index.generation
    bench.index.insert(bench.key("abc"), table)
    bench.index.match(bench.key("ab!"))
    assert bench.index.evict([1]) == 0
    assert bench.index.generation == generation
    bench.serve("abd")
    assert bench.index.generation > generation


def test_a_node_leads_up_to_the_root_of_its_namespace() -> None:
    bench = Bench()
    bench.serve("abc", "abd")
    shared, one, other = (bench.index.peek(bench.key(t)).node for t in ("ab!", "abc!", "abd!"))
    assert shared is not None
    assert shared.parent is not None
    assert one is not None
    assert other is not None
    assert one is not other
    assert one.parent is other.parent is shared
    assert shared.parent.parent is None
    assert bench.index.peek(bench.key("z!")).node is None


def test_a_match_ends_only_where_the_window_before_it_is_whole() -> None:
    bench = Bench(FULL, WINDOW)
    bench.serve("abcdef")
    # Computed at once, so of the window group only what token 24 sees was left.
    assert bench.found("abcdef!") == 6
    assert bench.found("abcdex") == bench.found("abcd!") == 0
    table = bench.index.match(bench.key("abcdef!"))
    assert table is not None
    assert table.pages(1)[:4] == [HOLE] * 4
    assert len(table.pages(0)) == 6


@pytest.mark.parametrize(
    ("wanted", "evicted", "left"),
    [([0, 1], 1, [6, 1]), ([1, 0], 2, [5, 1])],
    ids=["of a window alone", "full ones, with those of a window"],
)
def test_pages_are_evicted_by_group(wanted: list[int], evicted: int, left: list[int]) -> None:
    bench = Bench(FULL, WINDOW)
    bench.serve("abcdef")
    assert bench.index.evictable() == [6, 2]
    assert bench.index.evict(wanted) == evicted
    assert bench.index.evictable() == left
    assert bench.found("abcdef!") == 0


def test_a_hole_is_filled_when_it_is_computed_again() -> None:
    bench = Bench(FULL, WINDOW)
    bench.serve("abcdef")
    bench.index.evict([0, 2])
    generation = bench.index.generation
    bench.serve("abcdef")
    assert bench.index.generation > generation
    assert bench.found("abcdef!") == 6
    assert bench.pools.used() == [6, 2]


@given(
    windows=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    holes=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 11)), max_size=20),
)
def test_whatever_holes_there_are_every_window_is_whole_where_a_match_ends(
    windows: list[int], holes: list[tuple[int, int]]
) -> None:
    bench = Bench(FULL, *(group(GroupKind.WINDOW, window=w) for w in windows))
    text = "abcdefghijkl"
    table = bench.begin(text)
    for end in range(1, len(text) + 1):
        table.commit(end * PAGE_TOKENS)
        bench.index.insert(bench.key(text), table)
    table.release()
    (node,) = bench.index._tree.nodes()
    for which, page in holes:
        if which <= len(windows) and node.pages[which][page] != HOLE:
            bench.index._tree.punch(node, which, [page])
    whole = [
        end
        for end in range(len(text) + 1)
        if all(
            HOLE not in node.pages[index][g.dead_len(end * PAGE_TOKENS) : end]
            for index, g in enumerate(bench.pools.groups)
        )
    ]
    assert bench.found(text + "!") == max(whole)


@pytest.mark.parametrize("kind", [GroupKind.LATENT, GroupKind.DRAFT])
def test_groups_that_keep_every_token_are_all_alike(kind: GroupKind) -> None:
    bench = Bench(FULL, group(kind))
    bench.serve("abc", "abd")
    assert bench.index.evictable() == [4, 4]
    assert bench.index.evict([1, 0]) == 2
    assert bench.index.evictable() == [3, 3]


def with_states(states: int = 64) -> Bench:
    return Bench(FULL, group(GroupKind.STATE, pages=states))


def test_with_states_a_prefix_is_found_where_one_was_kept_and_nowhere_else() -> None:
    bench = with_states()
    bench.serve("abc")
    texts = ("abc!", "abcd!", "abx!", "ab!", "abc")
    assert [bench.found(text) for text in texts] == [3, 3, 0, 0, 0]
    assert bench.pools.loose() == [3, 1]
    bench.serve("ab")
    assert [bench.found(text) for text in ("abc!", "abx!", "abc", "ax!")] == [3, 2, 2, 0]
    assert bench.pools.loose() == [3, 2]


def test_a_checkpoint_serves_many_and_is_never_written() -> None:
    bench = with_states()
    bench.serve("ab")
    (node,) = bench.index._tree.nodes()
    kept = node.pages[1][-1]
    tables = [bench.begin(f"ab{letter}") for letter in "cdef"]
    for table in tables:
        assert table.committed == 2 * PAGE_TOKENS
        assert table.pages(1)[0] == kept
        assert launch(table, 1)[1] != kept
    assert bench.pools.pools[1].holders(kept) == 5
    for table in tables:
        commit(table, 3 * PAGE_TOKENS)
    assert bench.pools.pools[1].is_loose(kept)


def test_checkpoints_go_before_their_pages_the_shortest_first() -> None:
    bench = with_states()
    bench.serve("a", "ab", "abc")
    assert bench.pools.loose() == [3, 3]
    bench.index.evict([0, 1])
    assert [bench.found(text) for text in ("ax!", "abx!", "abc!")] == [0, 2, 3]
    bench.index.evict([0, 2])
    assert bench.found("abc!") == 0
    assert bench.pools.loose() == [3, 0]
    bench.serve("abc")
    assert bench.found("abc!") == 3


def test_a_checkpoint_goes_with_the_page_that_it_stands_at() -> None:
    bench = with_states()
    bench.serve("ab", "abcd")
    bench.index.evict([1, 0])
    assert bench.pools.loose() == [3, 1]
    assert bench.found("abcd!") == 2


def test_a_state_within_a_page_is_no_checkpoint() -> None:
    bench = with_states()
    table = bench.begin("abc")
    launch(table, 1)
    commit(table, 2 * PAGE_TOKENS + 1)
    bench.index.insert(bench.key("abc"), table)
    table.release()
    assert bench.found("abc!") == 0
    assert bench.pools.free()[1] == 64


def test_evicting_much_leaves_no_trace_of_what_went() -> None:
    bench = Bench(FULL, WINDOW)
    for number in range(500):
        bench.serve(f"{number:04d}")
        bench.index.evict([4, 0])
    shelf = bench.index._evictor._sparse[0]
    assert len(shelf._heap) < 100
    assert not bench.index._tree._roots


def test_tokens_that_are_given_up_are_counted_and_those_of_a_flush_are_not() -> None:
    bench = Bench()
    bench.serve("abcd", "xy")
    assert bench.index.evicted_tokens == 0
    bench.index.evict([2])
    assert bench.index.evicted_tokens == 2 * PAGE_TOKENS
    bench.index.clear()
    bench.serve("abcd")
    bench.index.evict([1])
    assert bench.index.evicted_tokens == 3 * PAGE_TOKENS


def test_tokens_that_a_window_loses_are_not_counted_where_others_keep_them() -> None:
    bench = Bench(group(GroupKind.WINDOW, window=PAGE_TOKENS), FULL)
    bench.serve("abcd")
    bench.index.evict([1, 0])
    assert bench.index.evicted_tokens == 0
    bench.index.evict([0, 1])
    assert bench.index.evicted_tokens == PAGE_TOKENS
