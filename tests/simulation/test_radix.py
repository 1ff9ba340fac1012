"""The prefix index against a naive model: nothing lost, nothing shared wrongly, order as said."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.support.worker import blocks_of, blocks_present, commit, launch, page_group

from antiphon.model_worker.cache.events import BlockTracker, EventLog
from antiphon.model_worker.cache.eviction import STRATEGIES
from antiphon.model_worker.cache.groups import HOLE, CacheGroup, GroupKind
from antiphon.model_worker.cache.pages import CachePools, PageTable
from antiphon.model_worker.cache.radix import RadixIndex
from antiphon.model_worker.cache.tree import CacheKey
from antiphon.wire.codec import pack_ids
from antiphon.wire.digests import BLOCK_TOKENS, DIGEST_BYTES, block_digests
from antiphon.wire.kv_events import BlocksCleared, BlocksRemoved, BlocksStored

if TYPE_CHECKING:
    from collections.abc import Sequence


Position = tuple[bytes, bytes]
"""Namespace, and all ids up to the end of a page."""
WORD_TOKENS = 16


@dataclass
class Entry:
    """What the model knows of one cached position."""

    pages: list[int]
    used: int
    hits: int = 0


@dataclass
class Holder:
    """A request: its ids and its table."""

    key: CacheKey
    table: PageTable
    outdated: bool = False

    @property
    def tokens(self) -> int:
        return len(self.key.token_ids) // 4


class RadixWorld:
    """Does one thing at a time to index and model, and says where they disagree."""

    def __init__(
        self, random: Random, groups: Sequence[CacheGroup], strategy: str, words: int = 3
    ) -> None:
        self.random = random
        self.strategy = strategy
        self.words = words
        self.pools = CachePools(groups)
        self.events_max = random.choice([1, 3, 50])
        self.log = EventLog(self.events_max)
        self.index = RadixIndex(self.pools, STRATEGIES[strategy], BlockTracker())
        self.holders: list[Holder] = []
        self.entries: dict[Position, Entry] = {}
        self.content: dict[tuple[int, int], Position] = {}
        self.clock = self.step = self.heard_to = 0
        self.read: dict[int, set[tuple[int, int]]] = {}
        self.received: set[bytes] = set()
        self.peeked: tuple[int, CacheKey, int] | None = None
        self.reached: Counter[str] = Counter()

    @property
    def anchors(self) -> list[int]:
        """Groups that keep every token."""
        return [i for i in range(len(self.pools.groups)) if i not in self.pools.sparse]

    def ids(self) -> bytes:
        """A prompt of few words, so that many begin alike."""
        words = [self.random.randrange(self.words) for _ in range(self.random.randint(1, 12))]
        tokens = [word for word in words for _ in range(WORD_TOKENS)]
        return pack_ids(tokens[: len(tokens) - self.random.randrange(WORD_TOKENS)])

    def begin(self) -> None:
        """A request comes: the index gives what the model says, and it is right."""
        namespace = self.random.choice([b"n" * DIGEST_BYTES, b"m" * 2 * DIGEST_BYTES])
        key = CacheKey(namespace=namespace, token_ids=self.ids())
        length = self.longest(key)
        prefix = self.index.peek(key)
        assert prefix.length == length
        assert (prefix.node is None) == (length == 0)
        table = self.index.match(key)
        assert (table is None) == (length == 0)
        table = table or PageTable(self.pools)
        assert table.committed == length < len(key.token_ids) // 4
        self.reached["found"] += length > 0
        holder = Holder(key, table)
        self.check_content(holder)
        self.holders.append(holder)
        if not self.reserve(holder, holder.tokens):
            self.holders.pop()
            table.release()
            return
        self.index.use(key, length)
        self.touch(key, length, hit=True)

    def reserve(self, holder: Holder, tokens: int) -> bool:
        """Find pages for a table, giving up cached ones; False if there are not enough."""
        needs = holder.table.need(tokens)
        short = [max(0, n - f) for n, f in zip(needs, self.pools.free(), strict=True)]
        if any(s > e for s, e in zip(short, self.index.evictable(), strict=True)):
            return False
        if any(short):
            self.evict(short)
        if any(n > f for n, f in zip(needs, self.pools.free(), strict=True)):
            unfree = [pool.total - pool.free_count for pool in self.pools.pools]
            assert self.pools.used() != unfree, "what was given up is neither free nor fenced"
            return False
        holder.table.allocate(tokens)
        return True

    def advance(self, holder: Holder) -> None:
        """Some more tokens are computed."""
        limit = min(holder.tokens, holder.table.reserved)
        end = self.random.choice([limit, self.random.randint(holder.table.committed, limit)])
        if self.pools.states and not self.write_state(holder, end):
            return
        for index in range(holder.table.committed // self.pools.page_tokens, self.whole(end)):
            for group in range(len(self.pools.groups)):
                if group not in self.pools.states:
                    page = holder.table.pages(group)[index]
                    self.content[group, page] = self.position(holder.key, index)
        if end > holder.table.committed:
            commit(holder.table, end)

    def write_state(self, holder: Holder, end: int) -> bool:
        """A row writes the state after token `end`, perhaps after one that counts for nothing."""
        table = holder.table
        if end == table.committed or not self.reserve(holder, end):
            return end == table.committed
        for group, chains in table.chains.items():
            if self.random.random() < 0.3:
                self.content[group, launch(table, group)[1]] = (b"", b"")
                chains.recall(table.slot)
            read, write = launch(table, group)
            assert (read == HOLE) == (table.committed == 0)
            assert write not in (read, HOLE)
            alone = self.pools.pools[group].holders(write) == 1
            assert alone, "a state that others hold is written"
            self.content[group, write] = holder.key.namespace, holder.key.token_ids[: 4 * end]
        return True

    def lengthen(self, holder: Holder) -> None:
        """An answer grows."""
        ids = holder.key.token_ids + self.ids()[: 4 * self.random.randint(1, 40)]
        if self.reserve(holder, len(ids) // 4):
            holder.key = CacheKey(namespace=holder.key.namespace, token_ids=ids)

    def fork(self, holder: Holder) -> None:
        """A choice goes on from the same prompt, and then perhaps otherwise."""
        some = self.random.randint(0, holder.table.committed)
        table = holder.table.fork(self.random.choice([None, some]))
        ids = holder.key.token_ids[: table.committed * 4] + self.ids()
        key = CacheKey(namespace=holder.key.namespace, token_ids=ids)
        self.holders.append(Holder(key, table, holder.outdated))

    def insert(self, holder: Holder) -> None:
        """The index takes what a table has; duplicates are given back."""
        table, key = holder.table, holder.key
        groups, whole = range(len(self.pools.groups)), self.whole(table.committed)
        before = [table.entries(group, 0, whole) for group in groups]
        positions = [self.position(key, i) for i in range(whole)]
        known = [self.entries.get(position) for position in positions]
        keeps = any(
            page not in (HOLE, own[index]) and own[index] != HOLE and pool.holders(own[index]) > 1
            for index, entry in enumerate(known)
            if entry is not None
            for page, own, pool in zip(entry.pages, before, self.pools.pools, strict=True)
        )
        self.index.insert(key, table)
        after = [table.entries(group, 0, whole) for group in groups]
        if holder.outdated:
            assert after == before
            self.reached["outdated"] += 1
            return
        if len(self.pools.states) == len(groups) and table.committed % self.pools.page_tokens:
            return
        self.reached["kept a duplicate"] += keeps
        self.reached["took the index's"] += after != before
        for index, position in enumerate(positions):
            if (entry := known[index]) is None:
                if keeps:
                    continue
                entry = Entry([own[index] for own in before], 0)
                self.entries[position] = entry
            for group, own in enumerate(before):
                if entry.pages[group] == HOLE and not keeps:
                    entry.pages[group] = own[index]
                elif entry.pages[group] == HOLE:
                    # It may have been filled before the duplicate was met: the tree says.
                    entry.pages[group] = self.listed()[position][group]
                    assert entry.pages[group] in (HOLE, own[index])
                if own[index] != HOLE and not keeps:
                    assert after[group][index] == entry.pages[group]
                assert after[group][index] in (own[index], entry.pages[group])
        if not keeps:
            self.touch(key, table.committed)

    def complete(self, holder: Holder) -> None:
        """A request comes to its end, and the index takes what it leaves."""
        self.advance(holder)
        self.insert(holder)
        self.end(holder)

    def end(self, holder: Holder) -> None:
        """A request goes."""
        self.holders = [other for other in self.holders if other is not holder]
        holder.table.release()

    def evict(self, needs: Sequence[int]) -> None:
        """Exactly as many as are needed go, or as are there, and the least useful ones."""
        held = self.held()
        before = self.pools.loose()
        used = self.pools.used()
        given_up = self.index.evict(needs)
        gone = [b - a for b, a in zip(before, self.pools.loose(), strict=True)]
        assert sum(gone) == given_up
        assert gone == [b - a for b, a in zip(used, self.pools.used(), strict=True)]
        expected = [min(need, loose) for need, loose in zip(needs, before, strict=True)]
        assert all(g >= e for g, e in zip(gone, expected, strict=True))
        if self.anchors:
            most = max(expected[group] for group in self.anchors)
            assert [gone[group] for group in self.anchors] == [most] * len(self.anchors)
        else:
            assert gone == expected
        listed = self.listed()
        lost = {position for position in self.entries if position not in listed}
        for position in lost:
            assert not any((g, page) in held for g, page in enumerate(self.entries[position].pages))
        if self.anchors:
            self.check_order(lost, held)
        for position in lost:
            del self.entries[position]
        for position, pages in listed.items():
            for group, page in enumerate(self.entries[position].pages):
                if pages[group] != page:
                    assert (pages[group], (group, page) in held) == (HOLE, False)
                    assert group in self.pools.sparse
                    gone = "window" if group in self.pools.windows else "checkpoint"
                    self.reached[f"{gone} gone"] += 1
            self.entries[position].pages = pages
        self.reached["evicted"] += bool(lost)

    def evict_some(self) -> None:
        """Somebody needs pages."""
        self.evict([self.random.randint(0, 6) for _ in self.pools.groups])

    def clear(self) -> None:
        """Everything is forgotten; what is held is free when it is released."""
        loose = sum(self.pools.loose())
        assert self.index.clear() == loose
        assert self.pools.loose() == [0] * len(self.pools.groups)
        self.entries.clear()
        for holder in self.holders:
            holder.outdated = True

    def launch(self) -> None:
        """A plan runs that may read all pages that requests hold now."""
        self.step += 1
        self.pools.launched(self.step)
        self.read[self.step] = self.held()

    def finish(self) -> None:
        """Plans have run."""
        finished = max(0, self.step - self.random.randint(0, 1))
        self.pools.finished(finished)
        self.read = {step: read for step, read in self.read.items() if step > finished}

    def remember(self) -> None:
        """Note what the index says now, to hold it to that while its generation stands."""
        key = CacheKey(namespace=b"n" * DIGEST_BYTES, token_ids=self.ids())
        self.peeked = (self.index.generation, key, self.index.peek(key).length)

    def longest(self, key: CacheKey) -> int:
        """The longest prefix by looking at all of them."""
        for pages in range((len(key.token_ids) // 4 - 1) // self.pools.page_tokens, 0, -1):
            if self.findable(key, pages):
                return pages * self.pools.page_tokens
        return 0

    def findable(self, key: CacheKey, pages: int) -> bool:
        """Whether every group has what goes on from so many pages of a key."""
        entries = [self.entries.get(self.position(key, i)) for i in range(pages)]
        tokens = pages * self.pools.page_tokens
        return all(entries) and all(
            entry is not None and entry.pages[g] != HOLE
            for g, group in enumerate(self.pools.groups)
            for entry in entries[group.dead_len(tokens) :]
        )

    def touch(self, key: CacheKey, tokens: int, *, hit: bool = False) -> None:
        self.clock += 1
        for index in range(self.whole(tokens)):
            entry = self.entries[self.position(key, index)]
            entry.used = self.clock
            entry.hits += hit

    def whole(self, tokens: int) -> int:
        return tokens // self.pools.page_tokens

    def position(self, key: CacheKey, index: int) -> Position:
        return key.namespace, key.token_ids[: (index + 1) * self.pools.page_tokens * 4]

    def held(self) -> set[tuple[int, int]]:
        """Group and page of all that requests hold."""
        return {
            (group, page)
            for holder in self.holders
            for group in range(len(self.pools.groups))
            for page in holder.table.pages(group)
            if page != HOLE
        }

    def listed(self) -> dict[Position, list[int]]:
        """What the tree holds, by position."""
        positions: dict[Position, list[int]] = {}
        step = self.pools.page_tokens * 4
        for node in self.index._tree.nodes():
            assert node.length, "a node without pages is in the tree"
            assert len(node.tokens) == node.length * step
            ids, above = node.tokens, node.parent
            while above is not None and above.parent is not None:
                ids, above = above.tokens + ids, above.parent
            assert above is not None
            assert len(ids) == node.end * step
            for index in range(node.length):
                end = (node.start + index + 1) * step
                positions[above.tokens, ids[:end]] = [pages[index] for pages in node.pages]
        return positions

    def rank(self, position: Position) -> tuple[int, int]:
        entry = self.entries[position]
        return (entry.used, 0) if self.strategy == "lru" else (entry.hits, entry.used)

    def check_order(self, lost: set[Position], held: set[tuple[int, int]]) -> None:
        """What went could have gone one page at a time, each the least useful that could go."""
        step = self.pools.page_tokens * 4
        followers = Counter((ns, ids[:-step]) for ns, ids in self.entries)
        anchor = self.anchors[0]
        able = {p for p in self.entries if (anchor, self.entries[p].pages[anchor]) not in held}
        ends = {position for position in able if not followers[position]}
        for _ in range(len(lost)):
            least = min(self.rank(position) for position in ends)
            choice = next((p for p in ends & lost if self.rank(p) == least), None)
            assert choice is not None, "something more useful was given up"
            ends.remove(choice)
            before = choice[0], choice[1][:-step]
            followers[before] -= 1
            if before in able and not followers[before]:
                ends.add(before)

    def check_content(self, holder: Holder) -> None:
        """A table's committed pages hold what its tokens say."""
        for group in range(len(self.pools.groups)):
            if group in self.pools.states:
                self.check_state(holder, group)
                continue
            pages = holder.table.pages(group)[: self.whole(holder.table.committed)]
            for index, page in enumerate(pages):
                if index < holder.table.dead(group):
                    assert page == HOLE
                else:
                    assert self.content[group, page] == self.position(holder.key, index)

    def check_state(self, holder: Holder, group: int) -> None:
        """A request's state is the one after all that is committed of it."""
        table, states = holder.table, holder.table.pages(group)
        assert len(states) <= 2, "a request that runs by itself has two places"
        assert (states[0] == HOLE) == (table.committed == 0)
        if table.committed:
            ids = holder.key.token_ids[: 4 * table.committed]
            assert self.content[group, states[0]] == (holder.key.namespace, ids)

    def check(self) -> None:
        """What holds between any two calls."""
        listed = self.listed()
        assert listed == {p: entry.pages for p, entry in self.entries.items()}
        for holder in self.holders:
            self.check_content(holder)
        self.check_pages(listed)
        self.check_blocks()
        if self.peeked is not None and self.peeked[0] == self.index.generation:
            assert self.index.peek(self.peeked[1]).length == self.peeked[2]

    def check_pages(self, listed: dict[Position, list[int]]) -> None:
        """Every page is free, fenced, or held by exactly those who claim it."""
        for group, pool in enumerate(self.pools.pools):
            claims = Counter(page for holder in self.holders for page in holder.table.pages(group))
            cached = Counter(pages[group] for pages in listed.values())
            del claims[HOLE], cached[HOLE]
            assert max(cached.values(), default=1) == 1, "a page is in the index twice"
            for page in range(pool.total):
                assert pool.holders(page) == claims[page] + cached[page]
            free, fenced = set(pool._free), {page for _, page in pool._fenced}
            assert len(free) + len(fenced) == len(pool._free) + len(pool._fenced)
            assert free.isdisjoint(fenced)
            for read in self.read.values():
                assert free.isdisjoint(p for g, p in read if g == group), "a plan reads it still"
            assert free | fenced | claims.keys() | cached.keys() == set(range(pool.total))
            assert pool.used_count == len(claims.keys() | cached.keys())
            assert not (free | fenced) & (claims.keys() | cached.keys())
            assert self.index.evictable()[group] == len(cached.keys() - claims.keys())

    def check_blocks(self) -> None:
        """Who listens to the events, or asks for what it missed, knows what could be found."""
        size = BLOCK_TOKENS * 4
        present: set[bytes] = set()
        for namespace, ids in self.entries:
            key = CacheKey(namespace=namespace, token_ids=ids)
            if self.findable(key, len(ids) // 4 // self.pools.page_tokens):
                whole = block_digests(namespace[:DIGEST_BYTES], ids[: len(ids) // size * size])
                present |= {whole[i : i + DIGEST_BYTES] for i in range(0, len(whole), DIGEST_BYTES)}
        there = sum(len(ids) >= size for _, ids in self.entries)
        self.reached["not announced"] += bool(there) and not present
        self.log.add(self.index.take_events())
        replay = self.log.replay(self.heard_to)
        self.reached["dumped"] += self.log.seq - self.heard_to > self.events_max
        for event in replay:
            match event:
                case BlocksStored(parent=parent):
                    blocks = blocks_of(event)
                    assert parent in self.received or parent in (b"n" * 32, b"m" * 32)
                    assert self.received.isdisjoint(blocks), "a block came twice"
                    self.received |= set(blocks)
                case BlocksRemoved():
                    blocks = blocks_of(event)
                    assert self.received.issuperset(blocks), "a block went that was not there"
                    self.received -= set(blocks)
                case BlocksCleared():
                    self.received.clear()
        self.heard_to = self.log.seq
        assert self.received == present
        assert sorted(blocks_present(self.log)) == sorted(present)


SHAPES = ["full", "full window", "full latent window window", "window", "latent window"]
SHAPES += ["full state", "full state", "full window state state", "state"]


def cache_groups(random: Random, shape: str, page_tokens: int) -> list[CacheGroup]:
    def group(kind: str) -> CacheGroup:
        sizes = (4, 40) if kind == "state" else (384 // page_tokens, 2400 // page_tokens)
        pages = random.randint(*sizes)
        window = random.randint(2, 60) if kind == "window" else None
        return page_group(pages, GroupKind(kind), window, page_tokens)

    return list(map(group, shape.split()))


def random_world(random: Random) -> RadixWorld:
    page_tokens = random.choice([4, 8, 16, 16, 32, 48, 64, 128])
    groups = cache_groups(random, random.choice(SHAPES), page_tokens)
    return RadixWorld(random, groups, random.choice(["lru", "lfu"]), random.randint(1, 3))


def act(world: RadixWorld) -> None:
    """Something happens; the more requests there are, the sooner one ends."""
    random = world.random
    if random.random() < 0.25 or not world.holders:
        world.begin()
    elif random.random() < 0.02 * len(world.holders):
        random.choice([world.complete, world.complete, world.end])(random.choice(world.holders))
    elif random.random() < 0.85:
        choices = [world.advance, world.lengthen, world.fork]
        choices += [world.advance, world.insert, world.insert]
        random.choice(choices)(random.choice(world.holders))
    elif random.random() < 0.03:
        world.clear()
    else:
        random.choice([world.launch, world.finish, world.finish, world.evict_some])()
    if random.random() < 0.05:
        world.remember()


@pytest.mark.parametrize("seed", range(24))
def test_the_index_says_what_a_list_of_all_prefixes_says(seed: int) -> None:
    world = random_world(Random(seed))
    for _ in range(300):
        act(world)
        world.check()
    for holder in list(world.holders):
        world.end(holder)
    world.check()
    world.evict(world.index.evictable())
    assert not world.entries
    assert not world.index._tree._roots
    world.pools.finished(world.step)
    assert world.pools.free() == [pool.total for pool in world.pools.pools]


def test_the_worlds_reach_what_they_are_for() -> None:
    reached: Counter[str] = Counter()
    for seed in range(24):
        world = random_world(Random(seed))
        for _ in range(300):
            act(world)
            world.check_blocks()
        reached += world.reached
    kinds = {"found", "evicted", "window gone", "outdated", "took the index's", "dumped"}
    kinds |= {"checkpoint gone", "not announced"}
    assert kinds | {"kept a duplicate"} == set(reached)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 160))
def test_the_index_agrees_for_thousands_of_steps(seed: int) -> None:
    world = random_world(Random(seed))
    for _ in range(4000):
        act(world)
        world.check()


class Index(RuleBasedStateMachine):
    """The same world, with calls in an order that hypothesis can shrink."""

    @initialize(
        random=st.randoms(use_true_random=False),
        shape=st.sampled_from(SHAPES),
        page_tokens=st.sampled_from([4, 16, 48, 128]),
        strategy=st.sampled_from(["lru", "lfu"]),
    )
    def open(self, random: Random, shape: str, page_tokens: int, strategy: str) -> None:
        self.world = RadixWorld(random, cache_groups(random, shape, page_tokens), strategy)

    @rule()
    def begin(self) -> None:
        self.world.begin()

    @precondition(lambda self: self.world.holders)
    @rule(
        data=st.data(),
        what=st.sampled_from(["advance", "lengthen", "fork", "insert", "complete", "end"]),
    )
    def do(self, data: st.DataObject, what: str) -> None:
        getattr(self.world, what)(data.draw(st.sampled_from(self.world.holders)))

    @rule(what=st.sampled_from(["evict_some", "launch", "finish", "remember", "clear"]))
    def let(self, what: str) -> None:
        getattr(self.world, what)()

    @invariant()
    def model_and_index_agree(self) -> None:
        self.world.check()


TestIndex = Index.TestCase
TestIndex.settings = settings(max_examples=40, stateful_step_count=40)
