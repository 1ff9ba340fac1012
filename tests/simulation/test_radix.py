"""The prefix index against a naive model: nothing lost, nothing shared wrongly, order as said."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from tests.simulation.radix_world import RadixWorld

from antiphon.model_worker.cache.groups import CacheGroup, GroupKind

SHAPES = ["full", "full window", "full latent window window", "window", "latent window"]
SHAPES += ["full state", "full state", "full window state state", "state"]


def cache_groups(random: Random, shape: str, page_tokens: int) -> list[CacheGroup]:
    return [
        CacheGroup(
            kind=GroupKind(kind),
            layers=(index,),
            page_bytes=1,
            page_tokens=page_tokens,
            pages_total=random.randint(4, 40)
            if kind == "state"
            else random.randint(384 // page_tokens, 2400 // page_tokens),
            window=random.randint(2, 60) if kind == "window" else None,
        )
        for index, kind in enumerate(shape.split())
    ]


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
