"""The shards of blocks that go to a page store and come back, one of each rank.

Rank 0 asks the store, and sends the other ranks which pages to copy and which records to fetch, in
one order with the plans: so a rank has recorded, and wiped, whatever was sampled before these pages
were taken or given away. A rank copies, fetches and writes beside its plans, and reports over a
link of its own; the pages stay in flight until all have. Records to be saved travel with the
report, since no request waits for them; those to be read are fetched by each rank from the node.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import zip_longest
from threading import Lock, Thread
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from antiphon.model_worker.batching.page_transfers import BlockTransfer
from antiphon.model_worker.cache.codec import RecordInvalid, UsableBlocks
from antiphon.model_worker.cache.groups import CacheGroup, GroupKind
from antiphon.transfer.checksums import page_checksum
from antiphon.transfer.stream import stream_blobs
from antiphon.wire.claim import Claim
from antiphon.wire.namespaces import stored_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from antiphon.model_worker.cache.codec import PageCodec

log = logging.getLogger(__name__)

FETCHES_MAX = 4
"""Transfers that are received at once; further ones wait for their turn."""
_SIZE_BYTES = 8


class PagesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 asks of all others: to copy blocks of a transfer, or to fetch them.

    Attributes:
        blocks: Numbers of the blocks to copy, in their chain.
        claims: By rank, those of the records to fetch; empty if blocks are copied.
    """

    transfer: BlockTransfer
    blocks: tuple[int, ...] = ()
    claims: tuple[tuple[Claim, ...], ...] = ()
    timeout_s: float = 0.0


class BlockRecord(msgspec.Struct, frozen=True):
    """One rank's shard of a block, to be saved."""

    block: int
    data: bytearray | memoryview
    checksum: bytes


class ShardReport(msgspec.Struct, frozen=True, kw_only=True):
    """A rank neither reads nor writes the pages of a transfer any more.

    Attributes:
        number: That of the transfer.
        ends: After how many of the fetched blocks a request could continue, ascending.
        refused: Whether a fetched record was not what was saved.
        records: What was copied; None if the rank has failed.
    """

    number: int
    ends: tuple[int, ...] = ()
    refused: bool = False
    records: tuple[BlockRecord, ...] | None = ()


class FetchedBlocks(NamedTuple):
    """How many of the blocks of a fetch are usable, and whether a record was not what was saved."""

    usable: int
    refused: bool = False


class ShardLost(Exception):
    """A rank has not copied, or fetched, its shard."""


class PageLink(Protocol):
    """Bytes between rank 0 and another one, beside those of plans."""

    def send(self, data: bytearray | memoryview) -> None: ...

    def receive(self, out: bytearray | memoryview) -> None:
        """Wait for as many bytes as `out` has; raises if the other rank has ended."""
        ...


class PageShard:
    """The pages of one rank: copies blocks to records, and back. Called in threads.

    `shard` names the part that it has of each page. `fetch_blobs` takes claims and a timeout.
    """

    def __init__(
        self,
        codec: PageCodec,
        shard: str,
        fetch_blobs: Callable[[Sequence[Claim], float], Iterator[memoryview]] | None = None,
    ) -> None:
        self.groups = codec.groups
        self.record_bytes_max = codec.record_bytes_max
        self._codec = codec
        self._shard = shard
        self._fetch_blobs = fetch_blobs or _streamed

    def names(self, transfer: BlockTransfer) -> tuple[bytes, ...]:
        """The names of all blocks of a chain."""
        return shard_names(transfer, self._shard)

    def copy(
        self, transfer: BlockTransfer, blocks: Sequence[int], memory: memoryview | None = None
    ) -> tuple[BlockRecord, ...]:
        """Copy the blocks of these numbers, into `memory` for as many records if it is given."""
        records: list[BlockRecord] = []
        for number, block in enumerate(blocks):
            name = stored_name(transfer.namespace, transfer.digests[block], self._shard)
            at = None if memory is None else memory[number * self.record_bytes_max :]
            data = self._codec.encode(name, transfer.blocks[block - transfer.first], at)
            records.append(BlockRecord(block, data, page_checksum(data)))
        return tuple(records)

    def fetch(
        self, transfer: BlockTransfer, claims: Sequence[Claim], timeout_s: float
    ) -> tuple[tuple[int, ...], bool]:
        """Receive, verify and write the first blocks of a transfer.

        Returns the usable ends, and whether a record was refused.

        A record is written only after it was verified as a whole, so that a page is what was saved
        or is not used.
        """
        most = self._codec.record_bytes_max
        if any(claim.size_bytes > most for claim in claims):
            return (), False  # these are no blocks of ours
        usable, ends = UsableBlocks(self.groups, transfer.first), list[int]()
        refused = False
        names = self.names(transfer)[transfer.first :]
        blobs = self._fetch_blobs(claims, timeout_s)
        try:
            rows = zip(names, claims, transfer.blocks, blobs, strict=False)
            for name, claim, pages, record in rows:
                masks = self._codec.check(name, record, claim.digest)
                self._codec.decode(record, masks, pages, states=False)
                if usable.add(masks, pages):
                    self._codec.decode(record, masks, pages, states=True)
                    ends.append(usable.count)
        except RecordInvalid as error:
            log.warning("block refused", extra={"reason": str(error)})
            refused = True
        return tuple(ends), refused

    def answer(
        self, rank: int, request: PagesRequest, memory: memoryview | None = None
    ) -> ShardReport:
        """Do what rank 0 asks of this rank, which is another one; `memory` as for `copy`."""
        number = request.transfer.number
        if not request.claims:
            records = self.copy(request.transfer, request.blocks, memory)
            return ShardReport(number=number, records=records)
        ends, refused = self.fetch(request.transfer, request.claims[rank], request.timeout_s)
        return ShardReport(number=number, ends=ends, refused=refused)


def shard_names(transfer: BlockTransfer, shard: str) -> tuple[bytes, ...]:
    """The names under which a rank's shard of each block of a chain is stored."""
    return tuple(stored_name(transfer.namespace, digest, shard) for digest in transfer.digests)


def agreed_blocks(groups: Sequence[CacheGroup], ends: Sequence[Sequence[int]]) -> int:
    """After how many fetched blocks a request can continue, by the usable ends of each rank.

    A state has one place, which has that of a rank's last end: where this is not the same on all
    ranks, nothing is usable.
    """
    agreed = max(set(ends[0]).intersection(*ends[1:]), default=0)
    if any(group.kind is GroupKind.STATE for group in groups):
        return agreed if all(own and own[-1] == agreed for own in ends) else 0
    return agreed


class _Awaited(NamedTuple):
    report: Future[ShardReport]
    memory: memoryview | None


class WorkerShards:
    """The shards of all ranks, as rank 0 copies and fetches them; alone without `others`.

    Args:
        others: The shards of the other ranks, in their order.
        links: To each of these.
        send: Sends a request to all of them.
    """

    def __init__(
        self,
        own: PageShard,
        others: Sequence[str] = (),
        links: Sequence[PageLink] = (),
        send: Callable[[PagesRequest], None] | None = None,
    ) -> None:
        assert len(others) == len(links), "each rank has its link"
        self._own = own
        self._others = tuple(others)
        self._send = send
        self._lock = Lock()
        self._awaited = [dict[int, _Awaited]() for _ in others]
        self._ended = set[int]()
        for index, link in enumerate(links):
            Thread(target=self._read, args=(index, link), name="shards", daemon=True).start()

    @property
    def ranks(self) -> int:
        return 1 + len(self._others)

    @property
    def record_bytes_max(self) -> int:
        """Of one block of this rank."""
        return self._own.record_bytes_max

    def names(self, transfer: BlockTransfer) -> tuple[tuple[bytes, ...], ...]:
        """By rank, the names of all blocks of a chain."""
        return self._own.names(transfer), *(shard_names(transfer, each) for each in self._others)

    def copy(
        self, transfer: BlockTransfer, blocks: Sequence[int], memory: memoryview | None = None
    ) -> list[tuple[BlockRecord, ...]]:
        """Copy blocks on all ranks  ->  by rank, their records. Blocks until no rank reads them.

        `memory` is for as many records of each rank; where it is not given, or they are larger
        than this rank's, other ranks' are received into memory of their own.

        Raises:
            ShardLost: A rank has not copied them.
        """
        parts: list[memoryview | None] = [None] * self.ranks
        if memory is not None:
            size = len(memory) // self.ranks
            parts = [memory[rank * size : (rank + 1) * size] for rank in range(self.ranks)]
        asked = self._ask(PagesRequest(transfer=transfer, blocks=tuple(blocks)), parts[1:])
        try:
            own = self._own.copy(transfer, blocks, parts[0])
        finally:
            wait(asked)
        return [own, *(each.result().records or () for each in asked)]

    def fetch(
        self, transfer: BlockTransfer, claims: Sequence[Sequence[Claim]], timeout_s: float
    ) -> FetchedBlocks:
        """Fetch blocks on all ranks, each by its own claims.

        Blocks until no rank writes them.

        Raises:
            ShardLost: A rank has not fetched them.
        """
        asked = self._ask(
            PagesRequest(transfer=transfer, claims=tuple(map(tuple, claims)), timeout_s=timeout_s)
        )
        try:
            own, refused = self._own.fetch(transfer, claims[0], timeout_s)
        finally:
            wait(asked)
        reports = [each.result() for each in asked]
        usable = agreed_blocks(self._own.groups, [own, *(each.ends for each in reports)])
        return FetchedBlocks(usable, refused or any(each.refused for each in reports))

    def _ask(
        self, request: PagesRequest, memories: Sequence[memoryview | None] = ()
    ) -> list[Future[ShardReport]]:
        """Ask all other ranks  ->  their reports, with records in the memory of each."""
        if self._send is None:
            return []
        asked: list[Future[ShardReport]] = []
        with self._lock:
            if self._ended:
                raise ShardLost(f"rank {1 + min(self._ended)} has ended")
            for awaited, memory in zip_longest(self._awaited, memories):
                future = Future[ShardReport]()
                awaited[request.transfer.number] = _Awaited(future, memory)
                asked.append(future)
        self._send(request)
        return asked

    def _read(self, index: int, link: PageLink) -> None:
        """Read the reports of a rank until it ends. The body of a thread."""
        lost = ShardLost(f"rank {1 + index} has ended")
        try:
            while True:
                report = receive_report(link, lambda number: self._memory_of(index, number))
                with self._lock:
                    awaited = self._awaited[index].pop(report.number).report
                if report.records is None:
                    awaited.set_exception(ShardLost(f"rank {1 + index} has failed: see its log"))
                else:
                    awaited.set_result(report)
        except Exception as error:  # noqa: BLE001  # its end, which is noticed elsewhere
            log.debug("no more reports", extra={"rank": 1 + index, "reason": str(error)})
        with self._lock:
            self._ended.add(index)
            awaited, self._awaited[index] = self._awaited[index], {}
        for each in awaited.values():
            each.report.set_exception(lost)

    def _memory_of(self, index: int, number: int) -> memoryview | None:
        with self._lock:
            return self._awaited[index][number].memory


class FollowerShards:
    """The shard of a rank that is not the first: answers rank 0, in threads of its own."""

    def __init__(self, shard: PageShard, rank: int, link: PageLink) -> None:
        self._shard, self._rank, self._link = shard, rank, link
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="page-save")
        self._fetcher = ThreadPoolExecutor(FETCHES_MAX, thread_name_prefix="page-fetch")
        self._sending = Lock()
        self._memory = memoryview(b"")  # of the last records; one thread copies, and sends them

    def begin(self, request: PagesRequest) -> None:
        """Begin what rank 0 asks for. Returns at once."""
        thread = self._fetcher if request.claims else self._saver
        thread.submit(self._answer, request)

    def close(self) -> None:
        for thread in (self._saver, self._fetcher):
            thread.shutdown(wait=False, cancel_futures=True)

    def _answer(self, request: PagesRequest) -> None:
        try:
            report = self._shard.answer(self._rank, request, self._memory_for(request.blocks))
        except Exception:
            log.exception("pages neither copied nor fetched")
            report = ShardReport(number=request.transfer.number, records=None)
        with self._sending:
            send_report(self._link, report)

    def _memory_for(self, blocks: Sequence[int]) -> memoryview:
        size_bytes = len(blocks) * self._shard.record_bytes_max
        if len(self._memory) < size_bytes:
            self._memory = memoryview(bytearray(size_bytes))
        return self._memory


class _Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """A report without the bytes of its records, which follow: number, checksum and size each."""

    number: int
    ends: tuple[int, ...]
    refused: bool
    records: tuple[tuple[int, bytes, int], ...] | None


def send_report(link: PageLink, report: ShardReport) -> None:
    """Send a report and its records, which are not copied."""
    records = report.records
    sizes = None if records is None else tuple((r.block, r.checksum, len(r.data)) for r in records)
    header = msgspec.msgpack.encode(
        _Sizes(number=report.number, ends=report.ends, refused=report.refused, records=sizes)
    )
    link.send(bytearray(len(header).to_bytes(_SIZE_BYTES, "little")))
    link.send(bytearray(header))
    for record in records or ():
        link.send(record.data)


def receive_report(
    link: PageLink, memory_of: Callable[[int], memoryview | None] = lambda _: None
) -> ShardReport:
    """Wait for a report. Its records lie in the memory for its number, if they fit there."""
    size = bytearray(_SIZE_BYTES)
    link.receive(size)
    encoded = bytearray(int.from_bytes(size, "little"))
    link.receive(encoded)
    header = msgspec.msgpack.decode(encoded, type=_Sizes)
    records = list[BlockRecord]()
    total_bytes = sum(size_bytes for _, _, size_bytes in header.records or ())
    memory = memory_of(header.number) if total_bytes else None
    if memory is None or len(memory) < total_bytes:
        memory = memoryview(bytearray(total_bytes))
    for block, checksum, size_bytes in header.records or ():
        data, memory = memory[:size_bytes], memory[size_bytes:]
        link.receive(data)
        records.append(BlockRecord(block, data, checksum))
    return ShardReport(
        number=header.number,
        ends=header.ends,
        refused=header.refused,
        records=None if header.records is None else tuple(records),
    )


def _streamed(claims: Sequence[Claim], timeout_s: float) -> Iterator[memoryview]:
    return stream_blobs(claims, timeout_s=timeout_s)
