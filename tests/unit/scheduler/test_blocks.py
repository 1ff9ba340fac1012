"""The block index against a naive implementation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.scheduler.stage import process

from antiphon.scheduler.worker_caches import BlockIndex
from antiphon.wire.codec import pack_ids
from antiphon.wire.digests import BLOCK_TOKENS, DIGEST_BYTES, block_digests

if TYPE_CHECKING:
    from antiphon.wire.base import Process

WORKERS = tuple(process(f"worker-{n}") for n in range(4))
PROMPTS = tuple(
    block_digests(b"root", pack_ids([letter for letter in text for _ in range(BLOCK_TOKENS)]))
    for text in (b"abcdefgh", b"abcdxy", b"abz", b"q")
)


def head(prompt: bytes, blocks: int) -> bytes:
    return prompt[: blocks * DIGEST_BYTES]


def names(digests: bytes) -> list[bytes]:
    return [digests[i : i + DIGEST_BYTES] for i in range(0, len(digests), DIGEST_BYTES)]


class Naive:
    """A set a worker, and a time for each block that is only expected."""

    def __init__(self) -> None:
        self.held: dict[Process, dict[bytes, float | None]] = {}

    def store(self, worker: Process, digests: bytes) -> None:
        self.held.setdefault(worker, {}).update(dict.fromkeys(names(digests)))

    def expect(self, worker: Process, digests: bytes, until: float) -> None:
        held = self.held.setdefault(worker, {})
        for name in names(digests):
            if held.get(name, 0.0) is not None:
                held[name] = until

    def expire(self, now: float) -> None:
        for worker, held in self.held.items():
            self.held[worker] = {n: at for n, at in held.items() if at is None or at > now}

    def remove(self, worker: Process, digests: bytes) -> None:
        for name in names(digests):
            self.held.get(worker, {}).pop(name, None)

    def clear(self, worker: Process) -> None:
        self.held.pop(worker, None)

    def overlaps(self, digests: bytes) -> dict[Process, int]:
        found: dict[Process, int] = {}
        for worker, held in self.held.items():
            for name in names(digests):
                if name not in held:
                    break
                found[worker] = found.get(worker, 0) + 1
        return found

    def __len__(self) -> int:
        return sum(map(len, self.held.values()))


actions = st.tuples(
    st.sampled_from(["store", "expect", "remove", "clear", "expire"]),
    st.sampled_from(WORKERS),
    st.sampled_from(PROMPTS),
    st.integers(0, 8),
    st.integers(0, 8),
)


@given(st.lists(actions, max_size=60))
def test_the_index_knows_what_a_set_a_worker_knows(
    drawn: list[tuple[str, Process, bytes, int, int]],
) -> None:
    index, naive = BlockIndex(10_000), Naive()
    for now, (action, worker, prompt, start, count) in enumerate(drawn):
        digests = head(prompt, start + count)[start * DIGEST_BYTES :]
        for one in (index, naive):
            match action:
                case "store":
                    one.store(worker, digests)
                case "expect":
                    one.expect(worker, digests, now + 5.0)
                case "remove":
                    one.remove(worker, digests)
                case "clear":
                    one.clear(worker)
                case _:
                    one.expire(float(now))
        assert len(index) == len(naive)
        for known in PROMPTS:
            assert index.overlaps(known) == naive.overlaps(known)
    for worker in WORKERS:
        index.clear(worker)
    index.expire(1e9)
    assert len(index) == 0
    assert not index._holders
    assert not index._expected
    assert not index._workers


def test_a_prompt_is_found_as_far_as_each_worker_goes_without_a_hole() -> None:
    index = BlockIndex(100)
    prompt = PROMPTS[0]
    index.store(WORKERS[0], prompt)
    index.store(WORKERS[1], head(prompt, 3))
    index.store(WORKERS[2], prompt[DIGEST_BYTES:])
    assert index.overlaps(prompt) == {WORKERS[0]: 8, WORKERS[1]: 3}
    assert index.overlaps(PROMPTS[1]) == {WORKERS[0]: 4, WORKERS[1]: 3}
    assert index.overlaps(head(prompt, 1) + b"half a digest") == {WORKERS[0]: 1, WORKERS[1]: 1}
    assert index.overlaps(b"") == {}


def test_index_at_its_bound_evicts_the_least_recently_used_block_of_the_largest_worker() -> None:
    index = BlockIndex(10)
    index.store(WORKERS[0], PROMPTS[0])
    index.store(WORKERS[1], PROMPTS[0])
    assert len(index) == 10
    # Of each chain the end went first, so that all that is kept is found.
    assert index.overlaps(PROMPTS[0]) == {WORKERS[0]: 4, WORKERS[1]: 6}
    assert index.partial == {WORKERS[0]: 4, WORKERS[1]: 2}
    index.clear(WORKERS[0])
    index.store(WORKERS[1], PROMPTS[0])
    assert index.overlaps(PROMPTS[0]) == {WORKERS[1]: 8}


def test_index_evicts_what_no_request_has_used() -> None:
    index = BlockIndex(9)
    index.store(WORKERS[0], PROMPTS[1])
    index.store(WORKERS[0], PROMPTS[3])
    index.store(WORKERS[0], PROMPTS[2][2 * DIGEST_BYTES :])
    index.expect(WORKERS[0], PROMPTS[1], until=5.0)
    index.store(WORKERS[0], PROMPTS[0])
    assert index.overlaps(PROMPTS[1])[WORKERS[0]] >= 4
    assert index.overlaps(PROMPTS[3]) == {}
    assert index.overlaps(PROMPTS[0]) == {WORKERS[0]: 8}


def test_partial_worker_counts_its_evicted_blocks_until_it_gives_them_up() -> None:
    index = BlockIndex(4)
    index.store(WORKERS[0], PROMPTS[0])
    assert (index.partial, index.free) == ({WORKERS[0]: 4}, 0)
    index.remove(WORKERS[0], PROMPTS[0][6 * DIGEST_BYTES :])
    assert index.partial == {WORKERS[0]: 2}
    index.clear(WORKERS[0])
    assert (index.partial, index.free) == ({}, 4)


def test_partial_worker_keeps_what_it_was_expected_to_hold() -> None:
    """It may have held that all the time, and then it reports nothing."""
    index = BlockIndex(4)
    index.store(WORKERS[0], PROMPTS[0])
    index.store(WORKERS[0], PROMPTS[3])
    index.expect(WORKERS[0], head(PROMPTS[0], 4), until=5.0)
    index.expire(6.0)
    assert index.overlaps(PROMPTS[0]) == {WORKERS[0]: 4}


@given(st.lists(actions, max_size=60), st.integers(1, 12))
def test_index_at_its_bound_finds_prompts_shorter_and_never_longer(
    drawn: list[tuple[str, Process, bytes, int, int]], bound: int
) -> None:
    index, naive = BlockIndex(bound), Naive()
    for action, worker, prompt, start, count in drawn:
        digests = names(head(prompt, start + count)[start * DIGEST_BYTES :])
        known = naive.held.get(worker, {})
        if action == "clear":
            index.clear(worker)
            naive.clear(worker)
        else:  # a worker stores what it lacks, and removes what it has
            change = b"".join(one for one in digests if (one in known) == (action == "remove"))
            for one in (index, naive):
                (one.remove if action == "remove" else one.store)(worker, change)
        assert len(index) <= bound
        assert len(index) + sum(index.partial.values()) == len(naive)
        for asked in PROMPTS:
            there = naive.overlaps(asked)
            assert all(there[who] >= found for who, found in index.overlaps(asked).items())
    for worker in WORKERS:
        index.clear(worker)
    assert len(index) == 0
    assert not index._holders
    assert not index.partial


@pytest.mark.parametrize("blocks", [10, 1000])
def test_a_prompt_costs_its_blocks_however_many_workers_hold_them(blocks: int) -> None:
    """Counted in look-ups, which a machine's load does not change."""
    prompt = block_digests(b"root", pack_ids(range(blocks * BLOCK_TOKENS)))
    index = BlockIndex(1_000_000)
    for number in range(50):
        index.store(process(f"worker-{number}"), prompt)
    counted = CountedDict(index._holders)
    index._holders = counted
    assert set(index.overlaps(prompt).values()) == {blocks}
    assert counted.looks == blocks


class CountedDict(dict[bytes, int]):
    looks = 0

    def get(self, key: bytes, default: int = 0) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.looks += 1
        return super().get(key, default)
