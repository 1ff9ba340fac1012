"""Worker to schedulers: which blocks of 64 tokens its prefix cache holds, as they come and go.

Blocks are named as in `wire.digests`, so that they can be compared with those of a prompt. What is
told here is a hint where a prompt is cheap, never a promise: a block may be gone on arrival.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from antiphon.wire.base import Message, Process, Value
from antiphon.wire.bounds import Number
from antiphon.wire.digests import DIGEST_BYTES


class BlocksStored(Value, tag=True):
    """These blocks are in the cache now. They follow each other.

    Attributes:
        parent: Digest of the block before the first, or the root of the namespace.
        digests: 32 bytes each.
    """

    parent: Annotated[bytes, Meta(max_length=DIGEST_BYTES)]
    digests: bytes


class BlocksRemoved(Value, tag=True):
    """These blocks are gone; 32 bytes each."""

    digests: bytes


class BlocksCleared(Value, tag=True):
    """Every block is gone."""


KvEvent = BlocksStored | BlocksRemoved | BlocksCleared


class KvEvents(Message):
    """What happened to a worker's cache, in order: one message a step in which anything did.

    Attributes:
        worker: The life whose cache it is; another life begins with an empty one, and at number 1.
        seq: Number of the last event here. They are numbered one by one, so that the first one's
            number shows what was missed; a worker's heartbeat names its newest.
    """

    worker: Process
    seq: Number
    events: tuple[KvEvent, ...]


class ReplayKv(Message):
    """Say what happened after event `after`, or else all that is there.

    Attributes:
        snapshot: Of which the last reply held a part that is not the last: its `seq`.
        part: The next part of that, as the reply has named it; 0 asks for none.
    """

    after: Number
    snapshot: Number = 0
    part: Number = 0


class KvReplayed(Message):
    """Events that bring a listener up to `seq`, or nearer to it.

    Attributes:
        seq: Of the newest event that is included. More may have come since: ask again.
        snapshot: Too much was missed, so here is all that is there at `seq`, in as many parts as
            it takes. The first one begins with `BlocksCleared`; a snapshot that the worker has
            given up meanwhile begins again.
        part: Names the next part of the snapshot; 0 if this was the last one.
    """

    worker: Process
    seq: Number
    events: tuple[KvEvent, ...] = ()
    snapshot: bool = False
    part: Number = 0
