"""A worker beside a page store that is slow, loses blocks, flips bits, and reports twice.

The store also has, of each block, what another shard of it holds.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from tests.simulation.batching_world import SCOPES, World

from antiphon.model_worker.batching.page_transfers import (
    BlockTransfer,
    TransferDone,
    TransferLimits,
)
from antiphon.model_worker.cache.codec import PageCodec, RecordInvalid, UsableBlocks
from antiphon.model_worker.cache.groups import HOLE, CacheGroup, CacheTensor, GroupKind
from antiphon.transfer.checksums import page_checksum
from antiphon.wire.namespaces import cache_namespace, cache_salt, stored_name, tenant_salt

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.simulation.hash_runner import HashRunner

    from antiphon.model_worker.batching.loop import StepReport
    from antiphon.model_worker.batching.mailbox import Mail

TOKENS_MAX = 300
PAGE_TOKENS = (4, 16, 64)


class HashPages:
    """The memory of a group of a `HashRunner`, whose pages are token ids."""

    def __init__(self, runner: HashRunner, group: int) -> None:
        self._runner = runner
        self._group = group
        self._pages = runner._pages[group]

    def read(self, pages: Sequence[int], out: memoryview) -> None:
        out[:] = self._pages[list(pages)].tobytes()

    def write(self, pages: Sequence[int], data: memoryview) -> None:
        content = np.frombuffer(data, np.int32).reshape(len(pages), -1)
        for page, ids in zip(pages, content, strict=True):
            if page != HOLE:
                self._pages[page] = ids


class HashStates:
    """That of a group of states: the number of ids of each, and the ids."""

    def __init__(self, runner: HashRunner, group: int) -> None:
        self._runner = runner
        self._group = group

    def read(self, pages: Sequence[int], out: memoryview) -> None:
        states = np.zeros((len(pages), 1 + TOKENS_MAX), np.int32)
        for row, page in enumerate(pages):
            ids = self._runner._states[self._group, page]
            states[row, 0], states[row, 1 : 1 + len(ids)] = len(ids), ids
        out[:] = states.tobytes()

    def write(self, pages: Sequence[int], data: memoryview) -> None:
        states = np.frombuffer(data, np.int32).reshape(len(pages), -1)
        for page, state in zip(pages, states, strict=True):
            if page != HOLE:
                self._runner._states[self._group, page] = state[1 : 1 + state[0]].copy()


class OtherPages(HashPages):
    """The same pages as another shard has them."""

    def read(self, pages: Sequence[int], out: memoryview) -> None:
        out[:] = (self._pages[list(pages)] + 1).tobytes()


class FaultyStore:
    """A page store, whose transfers end in any later turn, or with a part of their blocks."""

    available = True

    def __init__(self, codec: PageCodec, other: PageCodec, world: StoredWorld) -> None:
        self.records: dict[bytes, tuple[bytes, bytes]] = {}
        self.landed: list[TransferDone] = []
        self._codec, self._other = codec, other
        self._world = world
        self._random = random.Random(f"store {world.seed}")
        self._shards_random = random.Random(f"shards {world.seed}")
        self._saves: list[BlockTransfer] = []
        self._fetches: list[BlockTransfer] = []
        self._ended: list[TransferDone] = []

    def save(self, transfer: BlockTransfer) -> None:
        self._saves.append(transfer)

    def fetch(self, transfer: BlockTransfer) -> None:
        self._fetches.append(transfer)

    def work(self, share: float) -> None:
        """End a share of the transfers, in any order."""
        for transfers, end in ((self._saves, self._end_save), (self._fetches, self._end_fetch)):
            for transfer in transfers.copy():
                if self._random.random() < share:
                    transfers.remove(transfer)
                    done = end(transfer)
                    self.landed.append(done)
                    self._ended.append(done)
        if self._ended and self._random.random() < 0.1:
            self.landed.append(self._random.choice(self._ended))

    def _end_save(self, transfer: BlockTransfer) -> TransferDone:
        shards = [(self._codec, transfer.namespace)]
        if (namespace := self._world.other_namespace(transfer.namespace)) is not None:
            shards.insert(self._shards_random.randrange(2), (self._other, namespace))
        for number, pages in enumerate(transfer.blocks, start=transfer.first):
            for codec, namespace in shards:
                name = stored_name(namespace, transfer.digests[number])
                record = codec.encode(name, pages)
                self.records.setdefault(name, (bytes(record), page_checksum(record)))
        self._world.seen["saved"] += len(transfer.blocks)
        return TransferDone(number=transfer.number)

    def _end_fetch(self, transfer: BlockTransfer) -> TransferDone:
        usable = UsableBlocks(self._codec.groups, transfer.first)
        for number, pages in enumerate(transfer.blocks, start=transfer.first):
            name = stored_name(transfer.namespace, transfer.digests[number])
            if name not in self.records or self._random.random() < 0.05:
                break
            content, checksum = self.records[name]
            record = bytearray(content)
            if self._random.random() < 0.1:
                record[self._random.randrange(len(record))] ^= 1 << self._random.randrange(8)
            try:
                masks = self._codec.check(name, memoryview(record), checksum)
            except RecordInvalid:
                self._world.seen["flipped"] += 1
                break
            self._codec.decode(memoryview(record), masks, pages, states=False)
            if usable.add(masks, pages):
                self._codec.decode(memoryview(record), masks, pages, states=True)
        self._world.seen["found"] += usable.count
        return TransferDone(number=transfer.number, blocks=usable.count)


class StoredWorld(World):
    """Prompts of several blocks with few beginnings, and a pool that holds few of them."""

    def __init__(self, seed: int, **said: Any) -> None:
        source = random.Random(f"stored {seed}")
        fixed: dict[str, Any] = {
            "page_tokens": source.choice(PAGE_TOKENS),
            "cached": True,
            "prompt_max": 230,
            "chunk_tokens": source.choice([None, 64, 96]),
            "step_tokens_max": 256,
            "conservativeness": 0.3,
            "draft_model": False,
            "queue_max": 256,
        }
        super().__init__(seed, **(fixed | said))
        self.stems = [self._ids(source.choice([70, 130, 200])) for _ in range(3)]
        memories = [
            HashStates(self.runner, index)
            if group.kind is GroupKind.STATE
            else HashPages(self.runner, index)
            for index, group in enumerate(self.groups)
        ]
        others = [
            OtherPages(self.runner, index) if isinstance(memory, HashPages) else memory
            for index, memory in enumerate(memories)
        ]
        codec, other = PageCodec(self.groups, memories), PageCodec(self.groups, others)
        self.store = FaultyStore(codec, other, self)
        batch = self.batching.batch
        batch.origin = msgspec.structs.replace(batch.origin, shard="0/2")
        self.limits_of_transfers = TransferLimits(
            save_bytes_max=source.choice([4096, 1 << 20]), fetch_timeout_s=6.0, fetch_tokens=1
        )
        self.batching.batch.use_store(self.store, self.limits_of_transfers)
        self._share = source.choice([0.1, 0.5, 0.9])

    def other_namespace(self, namespace: bytes) -> bytes | None:
        """That of the other shard, whose origin is else the same; None: weights have changed."""
        origin = self.batching.batch.origin
        other = msgspec.structs.replace(origin, shard="1/2")
        for tenant, salt in SCOPES:
            digest = cache_salt(salt)
            digest = tenant_salt(tenant, digest) if tenant else digest
            if cache_namespace(origin, digest) == namespace:
                return cache_namespace(other, digest)
        return None

    def _group(self, kind: GroupKind, page_tokens: int, window: int | None) -> CacheGroup:
        group = super()._group(kind, page_tokens, window)
        if kind is GroupKind.STATE:
            tensor = CacheTensor(name="state", dtype="int32", shape=(1 + TOKENS_MAX,))
            return msgspec.structs.replace(group, tensors=(tensor,))
        pages = self.random.randint(320, 640) // page_tokens
        tensor = CacheTensor(name="ids", dtype="int32", shape=(1,))
        return msgspec.structs.replace(group, tensors=(tensor,), pages_total=pages)

    def _limits(self) -> Any:
        context = min(self.pools.tokens_max, TOKENS_MAX)
        return msgspec.structs.replace(
            super()._limits(), context_tokens=context, checkpoint_tokens=64
        )

    def turn(self, mail: Mail | None = None) -> StepReport:
        report = super().turn(mail)
        if hasattr(self, "store"):
            self.store.work(self._share)
            for done in self.store.landed:
                self.batching.land(done)
            self.store.landed = []
        return report

    def in_flight(self, group: int) -> Iterable[int]:
        transfers = self.batching.batch.transfers
        if transfers is None:
            return []
        saved = [page for save in transfers._saves.values() for page in save.pages[group]]
        fetched = [f.table.pages(group) for f in transfers._fetches.values()]
        return [*saved, *(page for pages in fetched for page in pages)]

    def drain(self) -> None:
        self._share = 0.9
        super().drain()
        for _ in range(200):
            if not self.batching.batch.transfers:
                return
            self.turn()
        raise AssertionError("a transfer does not end")
