"""A worker beside a page store that is slow, loses blocks, flips bits, and reports twice.

The store also has, of each block, what another shard of it holds.
"""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
from tests.simulation.batching_world import World

from antiphon.model_worker.batching.page_transfers import (
    BlockTransfer,
    TransferDone,
    TransferLimits,
)
from antiphon.model_worker.cache.codec import PageCodec
from antiphon.model_worker.cache.groups import HOLE, CacheGroup, CacheTensor, GroupKind
from antiphon.model_worker.ranks.layout import RankLayout
from antiphon.model_worker.ranks.page_shards import PageShard, ShardLost, WorkerShards
from antiphon.wire.claim import Claim

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tests.simulation.hash_runner import HashRunner

    from antiphon.model_worker.batching.loop import StepReport
    from antiphon.model_worker.batching.mailbox import Mail
    from antiphon.model_worker.ranks.page_shards import BlockRecord

T = TypeVar("T")

TOKENS_MAX = 300
STORED_TURNS = 40
"""In which requests arrive; a world goes on until they have ended."""
PAGE_TOKENS = (4, 16, 64)


class HashPages:
    """The memory of a group of a `HashRunner`, whose pages are token ids.

    The bytes of each rank's shard are others.
    """

    def __init__(self, runner: HashRunner, group: int, rank: int) -> None:
        self._rank = rank
        self._pages = runner._pages[group]

    def read(self, pages: Sequence[int], out: memoryview) -> None:
        out[:] = (self._pages[list(pages)] + self._rank).tobytes()

    def write(self, pages: Sequence[int], data: memoryview) -> None:
        content = np.frombuffer(data, np.int32).reshape(len(pages), -1)
        for page, ids in zip(pages, content, strict=True):
            if page != HOLE:
                self._pages[page] = ids - self._rank


class HashStates:
    """That of a group of states: the number of ids of each, and the ids."""

    def __init__(self, runner: HashRunner, group: int, rank: int) -> None:
        self._runner = runner
        self._group = group
        self._rank = rank

    def read(self, pages: Sequence[int], out: memoryview) -> None:
        states = np.zeros((len(pages), 1 + TOKENS_MAX), np.int32)
        for row, page in enumerate(pages):
            ids = self._runner._states[self._group, page]
            states[row, 0], states[row, 1 : 1 + len(ids)] = len(ids), ids + self._rank
        out[:] = states.tobytes()

    def write(self, pages: Sequence[int], data: memoryview) -> None:
        states = np.frombuffer(data, np.int32).reshape(len(pages), -1)
        for page, state in zip(pages, states, strict=True):
            if page != HOLE:
                self._runner._states[self._group, page] = state[1 : 1 + state[0]] - self._rank


class Node:
    """Where the records of all shards are stored, some of which are lost or damaged."""

    def __init__(self) -> None:
        self.records: dict[bytes, tuple[bytes, bytes]] = {}

    def put(self, names: Sequence[bytes], records: Iterable[BlockRecord]) -> None:
        for record in records:
            self.records.setdefault(names[record.block], (bytes(record.data), record.checksum))

    def claims(self, names: Iterable[bytes]) -> list[Claim]:
        """Those of the first records that are here."""
        held = takewhile(self.records.__contains__, names)
        return [
            Claim(
                address="node:1",
                token=name.hex(),
                size_bytes=len(self.records[name][0]),
                digest=self.records[name][1],
                expires_unix_ms=0,
            )
            for name in held
        ]


class FaultyBlobs:
    """Fetches records from a node for one of several ranks.

    Its faults do not depend on fetches of other records, which may run meanwhile, and are as rare
    as several ranks need it.
    """

    def __init__(self, node: Node, seen: Counter[str], seed: str, ranks: int) -> None:
        self._node, self._seen, self._seed, self._ranks = node, seen, seed, ranks
        self._fetches = Counter[str]()

    def __call__(self, claims: Sequence[Claim], _: float) -> Iterator[memoryview]:
        wanted = ",".join(claim.token for claim in claims)
        self._fetches[wanted] += 1
        chance = random.Random(f"{self._seed} {wanted} {self._fetches[wanted]}")
        for claim in claims:
            if chance.random() < 0.05 / self._ranks:
                return
            record = bytearray(self._node.records[bytes.fromhex(claim.token)][0])
            if chance.random() < 0.1 / self._ranks:
                record[chance.randrange(len(record))] ^= 1 << chance.randrange(8)
                self._seen["flipped"] += 1
            yield memoryview(record)


@dataclass(eq=False)
class Begun:
    """A transfer that has begun, and whether `end` may wait for it."""

    ready: Callable[[], bool]
    end: Callable[[], TransferDone]


class FaultyStore:
    """A page store, whose transfers end in any later turn, or with a part of their blocks.

    `other` is a shard that is saved, too, and never wanted.
    """

    available = True

    def __init__(
        self, shards: WorkerShards, node: Node, world: StoredWorld, other: PageShard | None = None
    ) -> None:
        self.landed: list[TransferDone] = []
        self._shards, self._node, self._other = shards, node, other
        self._world = world
        self._random = random.Random(f"store {world.seed}")
        self._shards_random = random.Random(f"shards {world.seed}")
        self._saves: list[BlockTransfer] = []
        self._fetches: list[BlockTransfer] = []
        self._begun: list[Begun] = []
        self._ended: list[TransferDone] = []
        self._due: dict[int, float] = {}  # of fetches, by their numbers

    def save(self, transfer: BlockTransfer) -> None:
        self._saves.append(transfer)

    def fetch(self, transfer: BlockTransfer) -> None:
        self._fetches.append(transfer)
        self._due[transfer.number] = self._world.now + transfer.timeout_s

    def work(self, share: float) -> None:
        """End a share of the transfers, in any order."""
        for transfers, begin in ((self._saves, self._save), (self._fetches, self._fetch)):
            for transfer in transfers.copy():
                if self._random.random() < share:
                    transfers.remove(transfer)
                    self._begun.append(begin(transfer))
        for ended in [each for each in self._begun if each.ready()]:
            self._begun.remove(ended)
            done = ended.end()
            self.landed.append(done)
            self._ended.append(done)
            self._world.seen["late"] += (
                self._due.get(done.number, self._world.now) < self._world.now
            )
        if self._ended and self._random.random() < 0.1:
            self.landed.append(self._random.choice(self._ended))
            self._world.seen["twice"] += 1

    def _save(self, transfer: BlockTransfer) -> Begun:
        blocks = range(transfer.first, len(transfer.digests))
        copying, ready = self._world.begin(partial(self._shards.copy, transfer, blocks))

        def end() -> TransferDone:
            if isinstance(copying.exception(), ShardLost):
                return TransferDone(number=transfer.number)
            chains = [*zip(self._shards.names(transfer), copying.result(), strict=True)]
            if (other := self._other) is not None:
                chains.append((other.names(transfer), other.copy(transfer, blocks)))
            self._shards_random.shuffle(chains)
            for names, records in chains:
                self._node.put(names, records)
            self._world.seen["saved"] += len(transfer.blocks)
            return TransferDone(number=transfer.number)

        return Begun(ready, end)

    def _fetch(self, transfer: BlockTransfer) -> Begun:
        claims = [
            self._node.claims(names[transfer.first :]) for names in self._shards.names(transfer)
        ]
        fetching, ready = self._world.begin(partial(self._shards.fetch, transfer, claims, 1.0))

        def end() -> TransferDone:
            lost = isinstance(fetching.exception(), ShardLost)
            count = 0 if lost else fetching.result().usable
            self._world.seen["found"] += count
            return TransferDone(number=transfer.number, blocks=count)

        return Begun(ready, end)


class StoredWorld(World):
    """Prompts of several blocks with few beginnings, and a pool that holds few of them.

    Responses are short: what is saved and fetched of them is a block, and longer ones are most of
    the turns of a world.
    """

    lengths = 0, 1, 5, 20, 80
    flushes = 0.1

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
            "arrivals": [0, 0, 1],
        }
        super().__init__(seed, **(fixed | said))
        self.stems = [self._ids(source.choice([70, 130, 200])) for _ in range(3)]
        self.node = Node()
        self.store = self._store()
        self.limits_of_transfers = TransferLimits(
            save_bytes_max=source.choice([4096, 1 << 20]), fetch_timeout_s=6.0, fetch_tokens=1
        )
        self.batching.batch.use_store(self.store, self.limits_of_transfers)
        self._share = source.choice([0.1, 0.5, 0.9])

    def _store(self) -> FaultyStore:
        own = self.page_shard(self.runner, RankLayout(), 0)
        other = self.page_shard(self.runner, RankLayout(tp=2), 1)
        return FaultyStore(WorkerShards(own), self.node, self, other)

    def begin(self, work: Callable[[], T]) -> tuple[Future[T], Callable[[], bool]]:
        """Begin a transfer  ->  its result, and whether a turn may wait for it."""
        result = Future[T]()
        result.set_result(work())
        return result, lambda: True

    def page_shard(self, runner: HashRunner, layout: RankLayout, rank: int) -> PageShard:
        """The pages of a runner as a rank has them."""
        memories = [
            HashStates(runner, index, rank)
            if group.kind is GroupKind.STATE
            else HashPages(runner, index, rank)
            for index, group in enumerate(self.groups)
        ]
        blobs = FaultyBlobs(self.node, self.seen, f"blobs {self.seed} {rank}", layout.ranks)
        return PageShard(PageCodec(self.groups, memories), layout.shard(rank), blobs)

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
