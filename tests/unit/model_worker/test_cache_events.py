"""KV events of a worker: numbered, replayed, or sent as a snapshot."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from tests.support.worker import (
    WORKER,
    blocks_of,
    blocks_present,
    blocks_removed,
    blocks_stored,
    compute,
    page_group,
)

from antiphon.model_worker.cache.events import (
    BLOCKS_MAX,
    BlockTracker,
    EventLog,
)
from antiphon.model_worker.cache.groups import GroupKind
from antiphon.model_worker.cache.pages import CachePools, PageTable
from antiphon.model_worker.cache.radix import RadixIndex
from antiphon.model_worker.cache.tree import CacheKey
from antiphon.model_worker.protocol.kv_events import MESSAGE_BYTES_MAX, KvEventPublisher
from antiphon.wire.codec import encode, pack_ids
from antiphon.wire.digests import BLOCK_TOKENS, DIGEST_BYTES, block_digests, split_digests
from antiphon.wire.kv_events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KvEvent,
    KvReplayed,
    ReplayKv,
)
from antiphon.wire.namespaces import PageOrigin, announced_root, cache_namespace

if TYPE_CHECKING:
    from collections.abc import Sequence

A, B, C, ROOT = (letter * DIGEST_BYTES for letter in (b"a", b"b", b"c", b"r"))


def test_a_listener_that_missed_a_little_gets_what_it_missed() -> None:
    log = EventLog()
    log.add([blocks_stored(ROOT, (A,)), blocks_stored(A, (B,)), blocks_removed((B,))])
    replay = log.replay(after=1)
    assert (replay, log.seq) == ((blocks_stored(A, (B,)), blocks_removed((B,))), 3)
    assert log.replay(after=3) == ()


@pytest.mark.parametrize("after", [0, 1, 9], ids=["never heard", "too long ago", "another life"])
def test_a_listener_that_missed_too_much_gets_all_that_is_there(after: int) -> None:
    log = EventLog(events_max=2)
    branch, again = blocks_stored(ROOT, (C,)), blocks_stored(A, (B,))
    log.add([blocks_stored(ROOT, (A, B)), branch, blocks_removed((B,)), again])
    replay = log.replay(after)
    assert log.seq == 4
    assert replay == (BlocksCleared(), blocks_stored(ROOT, (A,)), branch, again)


def test_nothing_is_there_after_a_clear() -> None:
    log = EventLog(events_max=1)
    log.add([blocks_stored(ROOT, (A,)), BlocksCleared()])
    assert log.replay(after=0) == (BlocksCleared(),)


def test_a_block_that_two_pages_hold_comes_with_the_first_and_goes_with_the_last() -> None:
    blocks = BlockTracker()
    blocks.stored(ROOT, [A, B])
    blocks.stored(ROOT, [A, C])
    blocks.removed([A, B])
    blocks.stored(ROOT, [A])
    blocks.removed([A])
    blocks.removed([A, C])
    stored, branch, first, last = blocks.take()
    assert (stored, branch) == (blocks_stored(ROOT, (A, B)), blocks_stored(A, (C,)))
    assert (first, last) == (blocks_removed((B,)), blocks_removed((A, C)))
    assert blocks.take() == ()


def test_a_very_long_prompt_is_announced_in_pieces_that_follow_each_other() -> None:
    blocks, log = BlockTracker(), EventLog(events_max=1)
    names = [number.to_bytes(DIGEST_BYTES) for number in range(2 * BLOCKS_MAX + 1)]
    blocks.stored(ROOT, names)
    pieces = blocks.take()
    starts = (0, BLOCKS_MAX, 2 * BLOCKS_MAX)
    parts = [names[start : start + BLOCKS_MAX] for start in starts]
    parents = [ROOT, *(names[start - 1] for start in starts[1:])]
    assert list(pieces) == list(map(blocks_stored, parents, parts))
    log.add(pieces)
    assert log.replay(after=0) == (BlocksCleared(), *pieces)
    blocks.removed(names)
    assert list(blocks.take()) == list(map(blocks_removed, parts))


@pytest.mark.parametrize("page_tokens", [16, 48, 64, 128])
def test_a_block_is_announced_once_all_its_pages_are_there_and_removed_with_the_first(
    page_tokens: int,
) -> None:
    pools, log = CachePools([page_group(64, page_tokens=page_tokens)]), EventLog()
    index = RadixIndex(pools, tracker=BlockTracker())
    name = cache_namespace(PageOrigin(model_digest="m"))
    key = CacheKey(namespace=name, token_ids=pack_ids(range(384)))
    table = PageTable(pools)
    table.allocate(384)
    for end in range(page_tokens, 385, page_tokens):
        table.commit(end)
        index.insert(key, table)
        log.add(index.take_events())
        assert len(blocks_present(log)) == end // BLOCK_TOKENS
    table.release()
    whole = tuple(split_digests(block_digests(announced_root(name), key.token_ids)))
    assert log.replay(after=-1) == (BlocksCleared(), blocks_stored(announced_root(name), whole))
    for end in range(384 - page_tokens, -1, -page_tokens):
        index.evict([1])
        log.add(index.take_events())
        assert len(blocks_present(log)) == end // BLOCK_TOKENS


PAGE = 16


def hybrid(*others: GroupKind, window: int | None = None) -> tuple[CachePools, RadixIndex]:
    """Full attention beside groups that do not keep something of every page."""
    groups = [page_group(64, kind, window, PAGE) for kind in others]
    pools = CachePools([page_group(64, page_tokens=PAGE), *groups])
    return pools, RadixIndex(pools, tracker=BlockTracker())


def computed(pools: CachePools, tokens: int) -> PageTable:
    """The table of a request that has computed so many tokens in one pass."""
    table = PageTable(pools)
    compute(table, tokens)
    return table


def announced(index: RadixIndex, log: EventLog) -> int:
    log.add(index.take_events())
    return len(blocks_present(log))


def test_blocks_of_a_model_with_states_are_announced_up_to_the_last_checkpoint() -> None:
    pools, index = hybrid(GroupKind.STATE)
    log = EventLog()
    key = CacheKey(namespace=b"n" * 64, token_ids=pack_ids(range(400)))
    short = computed(pools, 2 * BLOCK_TOKENS)
    index.insert(key, short)
    assert announced(index, log) == 2
    # It goes on to a place that is no page border, so that no state of it is kept.
    compute(short, 5 * BLOCK_TOKENS + 3)
    index.insert(key, short)
    assert index.peek(key).length == 2 * BLOCK_TOKENS
    assert announced(index, log) == 2
    short.release()
    # The state goes, and with it what could be found.
    index.evict([0, 1])
    assert index.peek(key).length == 0
    assert announced(index, log) == 0
    # Another request computes the same again, and leaves a checkpoint further on.
    again = computed(pools, 4 * BLOCK_TOKENS)
    index.insert(key, again)
    assert announced(index, log) == 4


def test_blocks_of_a_model_with_a_window_are_retracted_with_the_end_of_the_window() -> None:
    pools, index = hybrid(GroupKind.WINDOW, window=2 * PAGE)
    log = EventLog()
    key = CacheKey(namespace=b"n" * 64, token_ids=pack_ids(range(400)))
    table = computed(pools, 4 * BLOCK_TOKENS)
    index.insert(key, table)
    table.release()
    assert announced(index, log) == 4
    while index.evictable()[1]:
        index.evict([0, 1])
        found = index.peek(key).length
        assert announced(index, log) == found // BLOCK_TOKENS
    assert not blocks_present(log)
    assert index.evictable()[0] == 4 * BLOCK_TOKENS // PAGE, "full attention keeps all of it"


def test_blocks_before_a_branch_stay_announced_while_a_branch_can_be_found() -> None:
    pools, index = hybrid(GroupKind.STATE)
    log = EventLog()
    stem = list(range(2 * BLOCK_TOKENS))
    keys = [
        CacheKey(namespace=b"n" * 64, token_ids=pack_ids(stem + [500 + branch] * 2 * BLOCK_TOKENS))
        for branch in range(2)
    ]
    for key in keys:
        table = computed(pools, 4 * BLOCK_TOKENS)
        index.insert(key, table)
        table.release()
    assert announced(index, log) == 2 + 2 + 2
    index.evict([0, 1])
    assert announced(index, log) == 2 + 2
    index.evict([0, 1])
    assert announced(index, log) == 0


def block(number: int) -> bytes:
    return number.to_bytes(DIGEST_BYTES)


def stored(*numbers: int) -> BlocksStored:
    """Blocks that follow the root, one after the other."""
    return blocks_stored(ROOT, tuple(map(block, numbers)))


def long_chains(count: int) -> list[KvEvent]:
    """So much that it takes several messages."""
    return [stored(*range(1000 * chain, 1000 * chain + 1000)) for chain in range(count)]


class Listener:
    """Applies events in any order."""

    def __init__(self, announcer: KvEventPublisher) -> None:
        self.announcer = announcer
        self.seq = 0
        self.blocks: set[bytes] = set()

    def apply(self, events: Sequence[KvEvent]) -> None:
        for event in events:
            match event:
                case BlocksStored():
                    self.blocks |= set(blocks_of(event))
                case BlocksRemoved():
                    self.blocks -= set(blocks_of(event))
                case BlocksCleared():
                    self.blocks.clear()

    def catch_up(self) -> list[KvReplayed]:
        """Request replays until nothing is missing."""
        replies: list[KvReplayed] = []
        ask = ReplayKv(after=self.seq)
        while self.seq < self.announcer.seq or ask.part:
            reply = self.announcer.replay(ask)
            replies.append(reply)
            self.apply(reply.events)
            if not reply.part:
                self.seq = reply.seq
            ask = ReplayKv(after=self.seq, snapshot=reply.seq, part=reply.part)
        return replies


def test_what_a_step_did_is_one_message_with_the_number_of_its_last_event() -> None:
    announcer = KvEventPublisher(WORKER, 100)
    announcer.add((stored(1, 2), blocks_removed((block(2),))))
    announcer.add((BlocksCleared(),))
    (message,) = announcer.take()
    assert (message.worker, message.seq) == (WORKER, 3)
    assert message.events == (
        BlocksStored(parent=ROOT, digests=block(1) + block(2)),
        BlocksRemoved(digests=block(2)),
        BlocksCleared(),
    )
    assert announcer.take() == []


def test_a_large_step_is_cut_into_messages_that_follow_each_other() -> None:
    announcer = KvEventPublisher(WORKER, 100)
    announcer.add(long_chains(10))
    messages = announcer.take()
    assert len(messages) > 1
    assert max(len(encode(message)) for message in messages) < 1.1 * MESSAGE_BYTES_MAX
    firsts = [message.seq - len(message.events) for message in messages]
    assert firsts == [0, *(message.seq for message in messages[:-1])]
    assert messages[-1].seq == announcer.seq == 10


def test_a_few_missed_events_are_replayed_one_by_one() -> None:
    announcer = KvEventPublisher(WORKER, 100)
    announcer.add((stored(1), stored(2), stored(3)))
    reply = announcer.replay(ReplayKv(after=1))
    assert (reply.seq, len(reply.events), reply.part) == (3, 2, 0)
    assert announcer.replay(ReplayKv(after=3)) == KvReplayed(worker=WORKER, seq=3)


def test_a_long_replay_comes_in_as_many_answers_as_it_takes() -> None:
    announcer = KvEventPublisher(WORKER, 100)
    announcer.add(long_chains(10))
    listener = Listener(announcer)
    replies = listener.catch_up()
    assert len(replies) > 1
    assert len(listener.blocks) == 10_000
    assert not any(isinstance(event, BlocksCleared) for r in replies for event in r.events)


def test_a_listener_that_missed_too_much_gets_everything_in_parts() -> None:
    announcer = KvEventPublisher(WORKER, 2)
    announcer.add(long_chains(10))
    listener = Listener(announcer)
    listener.blocks = {block(123_456)}
    replies = listener.catch_up()
    assert len(replies) > 1
    assert max(len(encode(reply)) for reply in replies) < 1.1 * MESSAGE_BYTES_MAX
    assert listener.blocks == {block(number) for number in range(10_000)}


def test_events_during_a_snapshot_are_replayed_after_it() -> None:
    announcer = KvEventPublisher(WORKER, 3)
    announcer.add(long_chains(10))
    listener = Listener(announcer)
    first = announcer.replay(ReplayKv(after=0))
    announcer.add((stored(99_999), blocks_removed((block(0),))))
    listener.apply(first.events)
    second = announcer.replay(ReplayKv(after=0, snapshot=first.seq, part=first.part))
    assert second.seq == first.seq == 10
    assert not any(isinstance(event, BlocksCleared) for event in second.events)
    listener.catch_up()
    assert listener.blocks == {block(number) for number in (*range(1, 10_000), 99_999)}


@pytest.mark.parametrize("seed", range(30))
def test_a_listener_that_misses_messages_and_requests_replays_is_up_to_date(seed: int) -> None:
    chance = random.Random(seed)
    announcer = KvEventPublisher(WORKER, chance.choice([1, 3, 50]))
    listener, there = Listener(announcer), set[int]()
    for number in range(300):
        draw = chance.random()
        if draw < 0.02:
            announcer.add((BlocksCleared(),))
            there.clear()
        elif draw < 0.4 and there:
            gone = chance.choice(sorted(there))
            announcer.add((blocks_removed((block(gone),)),))
            there.remove(gone)
        else:
            announcer.add((stored(number),))
            there.add(number)
        for message in announcer.take():
            if chance.random() < 0.7 and message.seq - len(message.events) == listener.seq:
                listener.apply(message.events)
                listener.seq = message.seq
        if chance.random() < 0.1:
            listener.catch_up()
            assert listener.blocks == set(map(block, there))
