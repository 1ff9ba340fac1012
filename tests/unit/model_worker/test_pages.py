"""The allocator and the tables: no page is lost or shared, whatever the order of calls."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.support.worker import commit, compute, launch, page_group

from antiphon.model_worker.cache.groups import HOLE, CacheGroup, GroupKind
from antiphon.model_worker.cache.pages import CachePools, PageTable
from antiphon.model_worker.cache.pool import PagePool
from antiphon.model_worker.cache.states import StateChains

PAGE_TOKENS = 4


def window_group(pages: int, window: int) -> CacheGroup:
    return page_group(pages, GroupKind.WINDOW, window)


def full_and_window(pages: int = 8, window: int = 5) -> CachePools:
    return CachePools([page_group(pages), window_group(pages, window)])


def full_and_states(slots: int) -> CachePools:
    return CachePools([page_group(8), page_group(slots, GroupKind.STATE)])


def test_page_released_twice_is_a_bug() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(AssertionError, match="twice"):
        pool.release(pages)


def test_released_page_is_free_only_after_the_plan_that_may_read_it() -> None:
    pool = PagePool(1)
    pages = pool.allocate(1)
    pool.launched(7)
    pool.release(pages)
    assert (pool.free_count, pool.used_count) == (0, 0)
    pool.finished(6)
    assert pool.free_count == 0
    pool.finished(7)
    assert pool.free_count == 1


def test_page_released_while_no_plan_runs_is_free_at_once() -> None:
    pool = PagePool(1)
    pool.launched(1)
    pool.finished(1)
    pool.release(pool.allocate(1))
    assert pool.free_count == 1


def test_shared_page_is_free_when_its_last_holder_releases_it() -> None:
    pool = PagePool(1)
    pages = pool.allocate(1)
    pool.share(pages)
    pool.release(pages)
    assert pool.free_count == 0
    pool.release(pages)
    assert pool.free_count == 1


def test_page_is_loose_while_only_the_prefix_cache_holds_it() -> None:
    pool = PagePool(2)
    pages = pool.allocate(2)
    pool.cache(pages[:1])
    assert pool.loose_count == 0
    pool.release(pages)
    assert (pool.loose_count, pool.is_loose(pages[0]), pool.is_loose(pages[1])) == (1, True, False)
    pool.share(pages[:1])
    assert (pool.loose_count, pool.is_loose(pages[0])) == (0, False)
    pool.release(pages[:1])
    pool.forget(pages[:1])
    assert (pool.loose_count, pool.free_count) == (0, 2)


def test_evicted_page_waits_only_for_plans_that_may_read_it() -> None:
    pool = PagePool(2)
    early, late = pool.allocate(1), pool.allocate(1)
    pool.cache(early + late)
    pool.launched(1)
    pool.release(early)
    pool.finished(1)
    pool.launched(2)
    pool.release(late)
    pool.forget(early)
    assert pool.free_count == 1
    pool.forget(late)
    assert pool.free_count == 1
    pool.finished(2)
    assert pool.free_count == 2


def test_evicted_page_that_a_request_holds_is_free_when_released() -> None:
    pool = PagePool(1)
    pages = pool.allocate(1)
    pool.cache(pages)
    pool.forget(pages)
    assert (pool.loose_count, pool.free_count, pool.holders(pages[0])) == (0, 0, 1)
    pool.release(pages)
    assert pool.free_count == 1


def test_watched_page_is_reported_once_when_it_is_loose() -> None:
    pool = PagePool(1)
    pages = pool.allocate(1)
    pool.cache(pages)
    pool.watch(pages[0])
    assert pool.take_loosened() == []
    pool.release(pages)
    pool.share(pages)
    pool.release(pages)
    assert pool.take_loosened() == pages
    assert pool.take_loosened() == []


@pytest.mark.parametrize("misuse", ["cache twice", "forget", "watch", "release", "watch loose"])
def test_cached_page_misuse_is_a_bug(misuse: str) -> None:
    pool = PagePool(2)
    cached, other = pool.allocate(2)
    pool.cache([cached])
    pool.release([cached])
    wrong = {
        "cache twice": lambda: pool.cache([cached]),
        "forget": lambda: pool.forget([other]),
        "watch": lambda: pool.watch(other),
        "release": lambda: pool.release([cached]),
        "watch loose": lambda: pool.watch(cached),
    }
    with pytest.raises(AssertionError):
        wrong[misuse]()


def test_table_revision_grows_when_entries_change() -> None:
    pools = full_and_window()
    table = PageTable(pools)
    table.allocate(16)
    assert table.commit(4) == []
    assert table.commit(16) == [(1, 0, 3)]  # the window moved on
    assert table.revision == 0
    other = pools.pools[0].allocate(1)[0]
    table.replace(0, 1, other)
    assert (table.pages(0)[1], pools.pools[0].holders(other)) == (other, 2)
    assert table.revision > 0


def test_window_group_releases_pages_behind_the_window() -> None:
    pools = full_and_window()
    table = PageTable(pools)
    table.allocate(16)
    table.commit(16)
    # At the border 16 a query sees tokens 12 to 16, so pages 0 to 2 are gone.
    assert table.pages(0) == [0, 1, 2, 3]
    assert table.pages(1) == [HOLE, HOLE, HOLE, 3]
    assert pools.used() == [4, 1]


def test_fork_shares_full_pages_and_writes_none_of_them() -> None:
    pools = full_and_window()
    table = PageTable(pools)
    table.allocate(10)
    table.commit(10)
    fork = table.fork()
    assert fork.committed == 8
    fork.allocate(10)
    assert fork.pages(0)[:2] == table.pages(0)[:2]
    assert fork.pages(0)[2] != table.pages(0)[2]
    table.release()
    fork.release()
    assert pools.free() == [8, 8]


def test_request_reads_one_state_and_writes_another_at_any_length() -> None:
    pools = full_and_states(2)
    table = PageTable(pools)
    pairs: list[tuple[int, int]] = []
    for end in (7, 8, 17):
        table.allocate(end)
        read, write = launch(table, 1)
        pairs.append((read, write))
        commit(table, end)
    (first, a), (b, c), (d, e) = pairs
    assert first == HOLE
    assert (a, c) == (b, d)
    assert e == a
    assert pools.used() == [5, 2]
    assert table.fork().committed == 0
    assert pools.tokens_max == 32
    table.release()
    assert pools.free() == [8, 2]


def test_row_that_is_run_again_reads_the_same_state() -> None:
    pools = full_and_states(3)
    table = PageTable(pools)
    compute(table, 5)
    rows: list[list[int]] = []
    for end in (6, 7):
        table.allocate(end)
        rows.append(launch(table, 1))
    assert rows[0][1] == rows[1][0]
    table.chains[1].recall(table.slot)
    table.allocate(6)
    assert launch(table, 1) == rows[0]


def test_state_with_another_holder_is_never_written() -> None:
    pools = full_and_states(3)
    table = PageTable(pools)
    compute(table, 8)
    kept = table.pages(1)[0]
    pools.pools[1].cache((kept,))
    for end in range(9, 20):
        compute(table, end)
        assert kept not in table.pages(1)
    assert pools.loose() == [0, 1]


def verify(table: PageTable, drafts: int, accepted: int) -> tuple[int, list[int]]:
    """A row with drafts is launched and committed; the state that it read, and those it wrote."""
    start, writes = table.committed, 1 + drafts
    table.allocate(start + writes, writes)
    read, *written = launch(table, 1, writes)
    table.chains[1].accept(table.slot, writes, accepted)
    commit(table, start + accepted)
    return read, written


@pytest.mark.parametrize("accepted", range(1, 5))
def test_state_after_the_last_accepted_token_is_the_next_one(accepted: int) -> None:
    pools = full_and_states(6)
    table = PageTable(pools)
    compute(table, 5)
    (before,) = table.pages(1)
    read, written = verify(table, 3, accepted)
    assert read == before
    assert len({read, *written}) == 5
    assert table.pages(1)[0] == written[accepted - 1]
    assert table.committed == 5 + accepted
    assert pools.used() == [3, 2], "more states than a row needs"
    read, written = verify(table, 0, 1)
    assert read == table.pages(1)[1]
    assert table.pages(1)[0] == written[0]


def test_a_verify_row_needs_a_state_after_each_of_its_tokens() -> None:
    pools = full_and_states(4)
    table = PageTable(pools)
    assert table.need(4, 4) == [1, 4]  # the first state is none: it is zero
    compute(table, 5)
    assert table.pages(1)[1:] == []
    assert table.covers(6, 1) is False
    assert table.need(8, 3) == [0, 3]
    table.allocate(8, 3)
    assert table.covers(8, 3)
    assert not table.covers(8, 4)
    assert pools.free() == [6, 0]
    with pytest.raises(AssertionError, match="nowhere to write"):
        launch(table, 1, 4)
    table.release()
    assert pools.free() == [8, 4]


def test_verify_row_that_is_run_again_reads_the_same_state() -> None:
    pools = full_and_states(6)
    table = PageTable(pools)
    compute(table, 5)
    table.allocate(8, 3)
    read, first, *_ = launch(table, 1, 3)
    table.chains[1].recall(table.slot)
    assert len(table.pages(1)) <= 2, "states of a dropped row are kept"
    table.allocate(6)
    assert launch(table, 1) == [read, first]
    commit(table, 6)
    assert pools.used()[1] == len(table.pages(1))


def test_verify_row_leaves_a_checkpoint_as_it_is() -> None:
    pools = full_and_states(9)
    table = PageTable(pools)
    compute(table, 8)
    kept = table.pages(1)[0]
    pools.pools[1].cache((kept,))
    for drafts, accepted in ((3, 1), (3, 4), (2, 2), (4, 3)):
        _, written = verify(table, drafts, accepted)
        assert kept not in written
        assert kept not in table.pages(1)
    assert pools.loose() == [0, 1]


def test_a_number_of_tokens_that_no_row_has_computed_is_a_bug() -> None:
    for accepted in (0, 4):
        table = PageTable(full_and_states(6))
        compute(table, 5)
        table.allocate(8, 3)
        launch(table, 1, 3)
        with pytest.raises(AssertionError, match="no state"):
            table.chains[1].accept(table.slot, 3, accepted)
    table = PageTable(full_and_states(6))
    compute(table, 5)
    with pytest.raises(AssertionError, match="no state"):
        commit(table, 6)  # no row was launched


def test_a_row_that_follows_drafts_writes_where_it_was_launched_to() -> None:
    table = PageTable(full_and_states(8))
    compute(table, 5)
    rows: list[list[int]] = []
    for end, writes in ((8, 3), (9, 1)):
        table.allocate(end, writes)
        rows.append(launch(table, 1, writes))
    (_, first, *_), (_, written) = rows
    table.chains[1].accept(table.slot, 3, 1)  # two of three tokens were wrong
    commit(table, 6)
    assert table.pages(1)[:2] == [first, written]
    commit(table, 7)
    assert table.pages(1)[0] == written


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.booleans()), max_size=20))
def test_states_follow_each_other_and_none_is_lost(rows: list[tuple[int, int, bool]]) -> None:
    """Rows are verified, dropped or run again, and sometimes their state is cached."""
    pools = CachePools([page_group(40), page_group(40, GroupKind.STATE)])
    table, made = PageTable(pools), {HOLE: 0}  # after how many tokens each state is
    for drafts, accepted, dropped in rows:
        start, writes = table.committed, 1 + drafts
        table.allocate(start + writes, writes)
        read, *written = launch(table, 1, writes)
        assert made[read] == start
        assert read not in written
        made |= {state: start + number for number, state in enumerate(written, start=1)}
        if dropped:
            table.chains[1].recall(table.slot)
            table.truncate(start)
        else:
            table.chains[1].accept(table.slot, writes, min(accepted, writes))
            commit(table, start + min(accepted, writes))
            table.truncate(table.committed)
        current = table.pages(1)[0]
        assert made[current] == table.committed
        assert pools.used()[1] == sum(page != HOLE for page in table.pages(1)) <= 2
        assert pools.used()[0] == -(-table.committed // PAGE_TOKENS)
    table.release()
    assert pools.free() == [40, 40]


@given(st.lists(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=6), max_size=20))
def test_states_of_many_requests_follow_each_other(steps: list[list[tuple[int, bool]]]) -> None:
    """Steps with a row of some of six requests, of which a state is sometimes cached."""
    pool = PagePool(200)
    chains, tokens, made = StateChains(pool, 6), [0] * 6, {HOLE: (0, 0)}
    for step in steps:
        rows = dict(step)
        slots = np.array(list(rows), np.int32)
        chains.add(slots[chains.short(slots)])
        states = chains.launch(slots)
        assert len({*states[:, 1].tolist()}) == len(slots)
        for slot, (read, write) in zip(rows, states.tolist(), strict=True):
            assert made[read] == (slot if tokens[slot] else 0, tokens[slot])
            assert pool.holders(write) == 1
            tokens[slot] += 1
            made[write] = slot, tokens[slot]
        chains.commit(slots)
        for slot, cached in rows.items():
            current = chains.states(slot)[0]
            assert made[current] == (slot, tokens[slot])
            if cached:
                pool.cache([current])
    for slot in range(6):
        assert len(chains.states(slot)) <= 2
        chains.release(slot)
    assert pool.used_count == pool.loose_count == sum(sum(dict(step).values()) for step in steps)


def test_pages_of_drafts_are_released_and_those_of_tokens_are_not() -> None:
    pools = full_and_window(window=20)
    table = PageTable(pools)
    compute(table, 6)
    table.allocate(17)
    assert pools.used() == [5, 5]
    table.commit(7)
    revision = table.revision
    table.truncate(8)
    assert pools.used() == [2, 2]
    assert table.reserved == 8
    assert table.revision > revision, "entries were removed unnoticed"
    table.truncate(7)
    table.truncate(100)
    assert (table.reserved, pools.used()) == (8, [2, 2])
    with pytest.raises(AssertionError, match="truncated"):
        table.truncate(6)


def test_pages_of_drafts_are_fenced() -> None:
    """A plan that was launched before may still write them."""
    pools = CachePools([page_group(4)])
    table = PageTable(pools)
    pools.launched(1)
    table.allocate(13)
    table.commit(2)
    table.truncate(3)
    assert pools.free() == [0]
    pools.finished(1)
    assert pools.free() == [3]


def test_appended_pages_are_those_of_the_next_tokens() -> None:
    pools = full_and_window(window=5)
    table = PageTable(pools)
    compute(table, 6)
    revision, pages = table.revision, [pool.allocate(1)[0] for pool in pools.pools]
    for group, page in enumerate(pages):
        table.append(group, page)
    assert table.revision == revision
    assert table.reserved == 12
    assert table.covers(12)
    assert not table.covers(13)
    assert [table.pages(group)[-1] for group in (0, 1)] == pages
    table.truncate(8)
    assert pools.used() == [2, 2]
    assert table.reserved == 8


@pytest.mark.parametrize(("kind", "window"), [(GroupKind.WINDOW, None), (GroupKind.FULL, 4)])
def test_cache_group_with_a_wrong_window_is_rejected(kind: GroupKind, window: int | None) -> None:
    with pytest.raises(ValueError, match="window"):
        page_group(1, kind, window)


@given(window=st.integers(1, 40), tokens=st.integers(0, 200))
def test_dead_pages_are_never_attended_to_later(window: int, tokens: int) -> None:
    dead_tokens = window_group(1, window).dead_len(tokens) * PAGE_TOKENS
    border = tokens // PAGE_TOKENS * PAGE_TOKENS
    assert dead_tokens <= max(0, border - window + 1)
    assert dead_tokens + PAGE_TOKENS > border - window + 1


class Tables(RuleBasedStateMachine):
    """Tables that grow, fork, shrink and go, in any order, under a moving fence."""

    @initialize(window=st.integers(1, 12))
    def begin(self, window: int) -> None:
        self.pools = full_and_window(24, window)
        self.tables: list[PageTable] = []
        self.step = 0

    @rule()
    def open(self) -> None:
        self.tables.append(PageTable(self.pools))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), tokens=st.integers(1, 20))
    def allocate(self, data: st.DataObject, tokens: int) -> None:
        table = data.draw(st.sampled_from(self.tables))
        needs = table.need(table.reserved + tokens)
        if all(need <= free for need, free in zip(needs, self.pools.free(), strict=True)):
            table.allocate(table.reserved + tokens)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        table.commit(data.draw(st.integers(table.committed, table.reserved)))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        table.truncate(data.draw(st.integers(table.committed, table.reserved)))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.tables.append(data.draw(st.sampled_from(self.tables)).fork())

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))).release()

    @rule()
    def launch(self) -> None:
        self.step += 1
        self.pools.launched(self.step)

    @rule(behind=st.integers(0, 2))
    def finish(self, behind: int) -> None:
        self.pools.finished(max(0, self.step - behind))

    @invariant()
    def every_page_is_held_as_often_as_it_is_listed(self) -> None:
        for index, pool in enumerate(self.pools.pools):
            listed = [page for table in self.tables for page in table.pages(index) if page != HOLE]
            for page in range(pool.total):
                assert pool.holders(page) == listed.count(page)
            assert pool.used_count == len(set(listed))

    @invariant()
    def no_page_that_may_be_written_is_shared(self) -> None:
        for table in self.tables:
            for index, pool in enumerate(self.pools.pools):
                writable = table.pages(index)[-(-table.committed // PAGE_TOKENS) :]
                assert all(pool.holders(page) == 1 for page in writable)

    def teardown(self) -> None:
        for table in self.tables:
            table.release()
        self.pools.finished(self.step)
        assert self.pools.free() == [pool.total for pool in self.pools.pools]


TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=60, stateful_step_count=40)
