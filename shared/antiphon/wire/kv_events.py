"""Worker to schedulers: 64-token blocks added to and removed from its prefix cache.

Block digests are those of `wire.digests`, so that they can be compared with a prompt's. The events
are hints for cache-aware routing, not guarantees: a block may be evicted by the time the request
arrives.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from antiphon.wire.base import Message, Process, Value
from antiphon.wire.bounds import Number
from antiphon.wire.digests import DIGEST_BYTES


class BlocksStored(Value, tag=True):
    """These consecutive blocks are in the cache now.

    Attributes:
        parent: Digest of the block before the first, or the root of the namespace.
        digests: 32 bytes per block.
    """

    parent: Annotated[bytes, Meta(max_length=DIGEST_BYTES)]
    digests: bytes


class BlocksRemoved(Value, tag=True):
    """These blocks were evicted; 32 bytes per block."""

    digests: bytes


class BlocksCleared(Value, tag=True):
    """All blocks were evicted."""


KvEvent = BlocksStored | BlocksRemoved | BlocksCleared


class KvEvents(Message):
    """Changes of a worker's prefix cache, in order; one message per step that changed it.

    Attributes:
        worker: The incarnation that owns the cache; a new one starts with an empty cache and with
            number 1.
        seq: Number of the last event in the message. Events are numbered consecutively, so the
            first one's number reveals missed ones; a worker's heartbeat has its newest number.
    """

    worker: Process
    seq: Number
    events: tuple[KvEvent, ...]


class ReplayKv(Message):
    """Replay the events after `after`, or else send a snapshot of the cache.

    Attributes:
        snapshot: `seq` of the snapshot whose next part is requested.
        part: That part, as named by the last reply; 0: none.
    """

    after: Number
    snapshot: Number = 0
    part: Number = 0


class KvReplayed(Message):
    """Events that bring a listener up to `seq`, or closer to it.

    Attributes:
        seq: Number of the newest event included. There may be newer ones: request again.
        snapshot: Too many events were missed: this is the whole cache at `seq`, in several parts if
            needed. The first part begins with `BlocksCleared`; a snapshot that the worker has
            discarded meanwhile starts over.
        part: The next part of the snapshot; 0 if this was the last one.
    """

    worker: Process
    seq: Number
    events: tuple[KvEvent, ...] = ()
    snapshot: bool = False
    part: Number = 0
