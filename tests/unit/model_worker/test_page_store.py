"""Blocks go to kv_storage and come back over a bus and real sockets; what goes wrong is a miss."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.page_store import BLOCK_PAGES, SHARD, cluster
from tests.support.wait import until

from antiphon.kv_storage.pages import Page
from antiphon.model_worker.protocol import page_store
from antiphon.model_worker.protocol.page_store import PUTS_MAX
from antiphon.model_worker.ranks.layout import RankLayout
from antiphon.transfer.checksums import page_checksum
from antiphon.wire.digests import BLOCK_TOKENS, block_digests, split_digests
from antiphon.wire.namespaces import PageOrigin, announced_root, cache_namespace, stored_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.page_store import PageStoreUser
    from tests.support.services import Running

    from antiphon.kv_storage.service import KvStorageService
    from antiphon.kv_storage.store import PageStore
    from antiphon.model_worker.cache.codec import BlockPages
    from antiphon.transfer.memory import BlobData
    from antiphon.wire.claim import PagesStored, PutPages

NAMESPACE = cache_namespace(PageOrigin(model_digest="model", weights="1"))


def ids(blocks: int, seed: int = 0) -> bytes:
    """The token ids of a prompt of so many blocks, as bytes."""
    tokens = range(seed, seed + blocks * BLOCK_TOKENS)
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def pages(blocks: int, first: int = 0) -> list[BlockPages]:
    starts = range(first, first + blocks * BLOCK_PAGES, BLOCK_PAGES)
    return [(tuple(range(start, start + BLOCK_PAGES)),) for start in starts]


def names(prompt: bytes, namespace: bytes = NAMESPACE, shard: str = SHARD) -> list[bytes]:
    digests = split_digests(block_digests(announced_root(namespace), prompt))
    return [stored_name(namespace, digest, shard) for digest in digests]


def store(node: Running[KvStorageService]) -> PageStore:
    return node.service._store


async def stored(node: Running[KvStorageService], prompt: bytes) -> None:
    """Wait until a node has all blocks of a prompt."""
    await until(lambda: all(name in store(node) for name in names(prompt)))


def same(worker: PageStoreUser, some: Sequence[BlockPages], others: Sequence[BlockPages]) -> bool:
    return [worker.content(block) for block in some] == [worker.content(each) for each in others]


async def test_fetched_blocks_are_those_that_were_saved() -> None:
    async with cluster() as (worker, (node,)):
        await worker.save(NAMESPACE, ids(4), pages(4))
        await stored(node, ids(4))
        assert await worker.fetch(NAMESPACE, ids(6), pages(6, 32)) == 4
        assert same(worker, pages(4), pages(4, 32))


async def test_blocks_of_another_namespace_are_a_miss() -> None:
    other = cache_namespace(PageOrigin(model_digest="model", weights="2"))
    assert announced_root(other) == announced_root(NAMESPACE)
    async with cluster() as (worker, (node,)):
        await worker.save(NAMESPACE, ids(4), pages(4))
        await stored(node, ids(4))
        assert await worker.fetch(other, ids(4), pages(4, 32)) == 0


async def put_as(node: Running[KvStorageService], name: bytes, record: bytes) -> None:
    """Let a node answer for a name with another record, and its own checksum of that."""
    assert await store(node).put(Page(name, None, record, page_checksum(record)))


@pytest.mark.parametrize("wrong", ["another name", "no record", "too large", "cut"])
async def test_record_that_a_node_takes_for_another_is_a_miss(wrong: str) -> None:
    async with cluster() as (worker, (node,)):
        await worker.save(NAMESPACE, ids(1), pages(1))
        await stored(node, ids(1))
        page = await store(node).load(names(ids(1))[0])
        assert page is not None
        record = {
            "another name": bytes(page.data),
            "no record": b"nothing of ours",
            "too large": bytes(page.data) * 2,
            "cut": bytes(page.data)[:-1],
        }[wrong]
        await put_as(node, names(ids(1, 7))[0], record)
        before = worker.content(pages(1, 32)[0])
        assert await worker.fetch(NAMESPACE, ids(1, 7), pages(1, 32)) == 0
        assert worker.content(pages(1, 32)[0]) == before
        assert await worker.fetch(NAMESPACE, ids(1), pages(1, 32)) == 1


async def test_flipped_bit_ends_what_is_used_before_it() -> None:
    async with cluster() as (worker, (node,)):
        await worker.save(NAMESPACE, ids(4), pages(4))
        await stored(node, ids(4))
        page = store(node).memory.get(names(ids(4))[2])
        assert page is not None
        flipped = bytearray(bytes(page.data))
        flipped[len(flipped) // 2] ^= 1
        store(node).memory._pages[page.digest] = Page(
            page.digest, page.parent, bytes(flipped), page.checksum
        )
        assert await worker.fetch(NAMESPACE, ids(4), pages(4, 32)) == 2
        assert same(worker, pages(2), pages(2, 32))
        # The node drops it when it is said to be corrupt, and the next save brings it again.
        await until(lambda: not any(name in store(node) for name in names(ids(4))[2:]))
        await worker.save(NAMESPACE, ids(4), pages(4))
        await stored(node, ids(4))
        assert await worker.fetch(NAMESPACE, ids(4), pages(4, 32)) == 4


async def test_chain_is_whole_on_one_of_several_nodes_and_few_move_with_a_lost_one() -> None:
    prompts = [ids(3, 1000 * number) for number in range(12)]
    async with cluster(nodes=2) as (worker, nodes):
        for prompt in prompts:
            await worker.save(NAMESPACE, prompt, pages(3))
            await until(lambda p=prompt: any(names(p)[-1] in store(node) for node in nodes))
        where = [[all(n in store(node) for n in names(p)) for node in nodes] for p in prompts]
        assert all(sorted(held) == [False, True] for held in where)
        assert {held.index(True) for held in where} == {0, 1}
        for prompt in prompts:
            assert await worker.fetch(NAMESPACE, prompt, pages(3, 32)) == 3
        await nodes[0].ended()
        await until(lambda: len(worker.client._nodes) == 1)
        for prompt, held in zip(prompts, where, strict=True):
            found = await worker.fetch(NAMESPACE, prompt, pages(3, 32))
            assert found == (3 if held[1] else 0)
        for prompt in prompts:
            await worker.save(NAMESPACE, prompt, pages(3))
            await stored(nodes[1], prompt)


async def test_node_that_does_not_answer_costs_no_more_than_the_deadline() -> None:
    async with cluster() as (worker, (node,)):
        await worker.save(NAMESPACE, ids(4), pages(4))
        await stored(node, ids(4))
        over = asyncio.Event()

        async def load(_: bytes) -> None:
            await over.wait()

        object.__setattr__(node.service._store, "load", load)
        began = time.monotonic()
        assert await worker.fetch(NAMESPACE, ids(4), pages(4, 32), timeout_s=0.2) == 0
        assert time.monotonic() - began < 3
        over.set()


async def test_frozen_node_holds_neither_pages_nor_more_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page_store, "SAVE_WAIT_S", 0.05)
    monkeypatch.setattr(page_store, "PUT_BYTES_MAX", 1)  # a block a call
    async with cluster() as (worker, (node,)):
        client, frozen = worker.client, asyncio.Event()
        put = node.service._put

        async def freeze(request: PutPages) -> PagesStored:
            await frozen.wait()
            return await put(request)

        monkeypatch.setattr(node.service, "_put", freeze)
        for seed in range(3):  # returns when the pages are free
            await worker.save(NAMESPACE, ids(6, 1000 * seed), pages(6))
        record_bytes = client._shards.record_bytes_max
        assert client._memories_made == PUTS_MAX
        assert client._shelf.bytes_held <= PUTS_MAX * record_bytes
        frozen.set()
        await until(lambda: all(each in store(node) for each in names(ids(3))))
        await until(lambda: client._memories.qsize() == PUTS_MAX)
        await worker.save(NAMESPACE, ids(6), pages(6))  # what was given up is saved by the next one
        await stored(node, ids(6))
        assert client._memories_made == PUTS_MAX


async def test_blocks_that_are_on_their_way_are_not_copied_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with cluster() as (worker, (node,)):
        copied: list[int] = []
        copy = worker.client._shards.copy

        def counted(*args: Any) -> Any:
            copied.extend(args[1])
            return copy(*args)

        monkeypatch.setattr(worker.client._shards, "copy", counted)
        await worker.save(NAMESPACE, ids(4), pages(4))
        await worker.save(NAMESPACE, ids(6), pages(6))
        await stored(node, ids(6))
    assert copied == [0, 1, 2, 3, 4, 5]


async def test_blocks_whose_predecessor_was_evicted_are_offered_again() -> None:
    async with cluster(ram_bytes_max=20_000) as (worker, (node,)):
        await worker.save(NAMESPACE, ids(3), pages(3))
        await stored(node, ids(3))
        for seed in range(1, 6):
            await worker.save(NAMESPACE, ids(3, 1000 * seed), pages(3))
            await until(lambda s=seed: names(ids(3, 1000 * s))[0] in store(node))
        assert not all(name in store(node) for name in names(ids(3)))
        await worker.save(NAMESPACE, ids(4), pages(4))  # refused, since the end is missing
        await until(lambda: not worker.client._known.keys() & set(names(ids(4))))
        await worker.save(NAMESPACE, ids(4), pages(4))
        await stored(node, ids(4))


# Several ranks.

PAIR = RankLayout(tp=2)


async def stored_by_two(node: Running[KvStorageService], prompt: bytes) -> None:
    for rank in range(2):
        shard = names(prompt, shard=PAIR.shard(rank))
        await until(lambda own=shard: all(name in store(node) for name in own))


async def test_ranks_fetch_the_shards_that_they_have_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(ranks=2) as (worker, (node,)):
        shards = worker.client._shards
        copy = shards.copy

        def copied(*args: Any) -> Any:
            *_, memory = args
            records = copy(*args)
            held = [memoryview(record.data).obj for own in records for record in own]
            assert all(each is memory.obj for each in held)
            return records

        monkeypatch.setattr(shards, "copy", copied)
        await worker.save(NAMESPACE, ids(40), pages(13) * 3 + pages(1))
        await stored_by_two(node, ids(40))
        assert await worker.fetch(NAMESPACE, ids(2), pages(2, 52)) == 2
        assert same(worker, pages(2), pages(2, 52))
        whole, other = worker.content(pages(1)[0])
        assert whole != other


async def test_worker_of_another_number_of_ranks_finds_nothing() -> None:
    async with cluster(ranks=2) as (worker, (node,)):
        await worker.save(NAMESPACE, ids(2), pages(2))
        await stored_by_two(node, ids(2))
        alone = names(ids(2))
        assert not any(name in store(node) for name in alone)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fate", ["lost", "flipped", "of the other rank", "gone"])
async def test_shard_that_one_rank_misses_is_a_miss_on_all(rank: int, fate: str) -> None:
    async with cluster(ranks=2) as (worker, (node,)):
        await worker.save(NAMESPACE, ids(4), pages(4))
        await stored_by_two(node, ids(4))
        own, other = (names(ids(4), shard=PAIR.shard(each)) for each in (rank, 1 - rank))
        tier = store(node).memory
        page, foreign = tier.get(own[2]), tier.get(other[2])
        assert page is not None
        assert foreign is not None
        wrong = bytearray(bytes(page.data))
        match fate:
            case "lost":
                del tier._pages[own[2]]
            case "flipped":
                wrong[len(wrong) // 2] ^= 1
                tier._pages[own[2]] = Page(own[2], own[1], wrong, page.checksum)
            case "of the other rank":
                tier._pages[own[2]] = Page(own[2], own[1], foreign.data, foreign.checksum)
            case _:
                get, gone = node.service._leases.get, page.data

                def get_others(token: str) -> BlobData | None:
                    data = get(token)
                    return None if data is gone else data

                object.__setattr__(node.service._leases, "get", get_others)
        assert await worker.fetch(NAMESPACE, ids(4), pages(4, 32)) == 2
        assert same(worker, pages(2), pages(2, 32))


async def test_rank_that_fails_to_copy_or_to_fetch_costs_a_miss() -> None:
    async with cluster(ranks=2) as (worker, (node,)):
        await worker.save(NAMESPACE, ids(2), pages(2))
        await stored_by_two(node, ids(2))
        broken = worker.memories[1][0]
        tensors, broken.tensors = broken.tensors, []
        assert await worker.fetch(NAMESPACE, ids(2), pages(2, 32)) == 0
        await worker.save(NAMESPACE, ids(2, 500), pages(2))
        broken.tensors = tensors
        assert await worker.fetch(NAMESPACE, ids(2, 500), pages(2, 32)) == 0
        assert await worker.fetch(NAMESPACE, ids(2), pages(2, 32)) == 2
