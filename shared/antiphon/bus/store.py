"""A bucket on the bus: values by key, kept by JetStream until they are old or there is no room.

It asks JetStream over the process's own inbox, as every call is asked: the client of nats-py has
an inbox of its own, where nobody here may listen. It needs nothing that nats-server 2.9 has not.
"""

from __future__ import annotations

import base64
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar
from uuid import uuid4

import msgspec

from antiphon.bus.errors import NoResponders
from antiphon.wire.buckets import API
from antiphon.wire.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from antiphon.bus.bus import Bus
    from antiphon.wire.buckets import KeyValueBucket

log = logging.getLogger(__name__)

PART_BYTES = 128 * 1024
"""A larger value lies in parts, so that no message of others waits behind it for long."""

_ANSWER_S = 5.0
_NS = 1_000_000_000
_REPEAT_WINDOW_S = 120.0
_NOT_FOUND = 404
_EXPECTED = "Nats-Expected-Last-Subject-Sequence"
"""A message with this header is kept only if the last one of its subject has that number."""
_OTHER_REVISION = frozenset({10071, 10164})
"""JetStream's numbers for: it has another. Newer servers have the second one, too."""
_OTHER_CONFIG = 10058
"""JetStream's number for: the stream is there, and was made with other limits."""

R = TypeVar("R", bound="_JetStreamReply")


@dataclass(frozen=True, kw_only=True)
class StoreLimits:
    """How much is kept, and for how long. What is over goes, the oldest first.

    Attributes:
        replicas: On how many servers of a NATS cluster.
    """

    keep_s: float
    bytes_max: int
    replicas: int = 1


class _Failure(msgspec.Struct, frozen=True):
    code: int = 0
    err_code: int = 0
    description: str = ""


class _JetStreamReply(msgspec.Struct, frozen=True):
    """What JetStream says, whatever it was asked."""

    error: _Failure | None = None


class _PurgeReply(_JetStreamReply, frozen=True):
    purged: int = 0


class _StoredMessage(msgspec.Struct, frozen=True):
    data: str = ""
    seq: int = 0


class _GetReply(_JetStreamReply, frozen=True):
    message: _StoredMessage = _StoredMessage()


class _StoredValue(msgspec.Struct, frozen=True, array_like=True):
    """What lies under a key: the value, or how many parts of it lie beside, under which mark."""

    data: bytes = b""
    parts: int = 0
    mark: str = ""


class KeyValueStore:
    """Reads and writes one bucket of a cluster; makes it when it is first needed."""

    def __init__(self, bus: Bus, bucket: KeyValueBucket, limits: StoreLimits) -> None:
        self._bus = bus
        self._bucket = bucket
        self._limits = limits
        self._stream = bucket.stream(bus.cluster)
        self._created = False

    async def open(self) -> None:
        """Make the bucket, or see that it is there.

        Raises:
            Unavailable: There is no JetStream, or no room for the bucket.
        """
        if self._created:
            return
        made = await self._request("CREATE", self._config(), _JetStreamReply)
        if made.error is not None and made.error.err_code == _OTHER_CONFIG:
            made = await self._request("UPDATE", self._config(), _JetStreamReply)
        self._check(made)
        self._created = True

    async def put(self, *key: str, value: bytes) -> None:
        """Keep a value, in place of what was there.

        Raises:
            Unavailable: It is not kept.
        """
        if len(value) <= PART_BYTES:
            await self._publish(key, _StoredValue(value))
            return
        before = await self._find(key)
        mark = uuid4().hex
        starts = range(0, len(value), PART_BYTES)
        for number, start in enumerate(starts):
            part = _StoredValue(value[start : start + PART_BYTES])
            await self._publish((*key, mark, str(number)), part)
        await self._publish(key, _StoredValue(parts=len(starts), mark=mark))
        if before is not None and before.mark:
            await self._purge(f"{self._subject(*key, before.mark)}.>")

    async def get(self, *key: str) -> bytes | None:
        """Return what is kept; None if there is nothing, or not all of it any more.

        Raises:
            Unavailable: It cannot be read now.
        """
        head = await self._find(key)
        if head is None or not head.mark:
            return None if head is None else head.data
        parts = [await self._find((*key, head.mark, str(n))) for n in range(head.parts)]
        if any(part is None for part in parts):
            return None
        return b"".join(part.data for part in parts if part is not None)

    async def read(self, *key: str) -> tuple[bytes, int] | None:
        """Return what `swap` has kept and its revision; None if there is nothing.

        Raises:
            Unavailable: It cannot be read now.
        """
        kept = await self._read_message(key)
        return None if kept is None else (_decode_value(kept).data, kept.seq)

    async def swap(self, *key: str, value: bytes, revision: int) -> bool:
        """Keep a value if nobody has kept another one since it was read; return whether it is.

        Args:
            key: What it is kept under. `put` keeps nothing there.
            value: At most `PART_BYTES`.
            revision: The one that was read; 0: there was none.

        Raises:
            Unavailable: It may or may not be kept.
        """
        assert len(value) <= PART_BYTES, "what is swapped lies in one message"
        headers = {_EXPECTED: str(revision)}
        answer = await self._send(key, _StoredValue(value), headers)
        if answer.error is not None and answer.error.err_code in _OTHER_REVISION:
            return False
        self._check(answer)
        return True

    async def forget(self, *key: str) -> bool:
        """Keep no longer what is under a key; return whether there was anything.

        Raises:
            Unavailable: It may still be kept.
        """
        purged = await self._purge(self._subject(*key))
        await self._purge(f"{self._subject(*key)}.>")
        return purged > 0

    async def _publish(self, key: tuple[str, ...], value: _StoredValue) -> None:
        self._check(await self._send(key, value))

    async def _send(
        self, key: tuple[str, ...], value: _StoredValue, headers: Mapping[str, str] | None = None
    ) -> _JetStreamReply:
        """Write one message, and make the bucket where it is not there: a broker may lose it."""
        await self.open()
        subject, data = self._subject(*key), msgspec.msgpack.encode(value)
        try:
            answer = await self._bus.request_raw(
                subject, data, timeout_s=_ANSWER_S, headers=headers
            )
        except NoResponders:
            self._created = False
            await self.open()
            answer = await self._bus.request_raw(
                subject, data, timeout_s=_ANSWER_S, headers=headers
            )
        return msgspec.json.decode(answer, type=_JetStreamReply)

    async def _find(self, key: tuple[str, ...]) -> _StoredValue | None:
        kept = await self._read_message(key)
        return None if kept is None else _decode_value(kept)

    async def _read_message(self, key: tuple[str, ...]) -> _StoredMessage | None:
        await self.open()
        got = await self._request("MSG.GET", {"last_by_subj": self._subject(*key)}, _GetReply)
        if got.error is not None and got.error.code == _NOT_FOUND:
            return None
        self._check(got)
        return got.message

    async def _purge(self, subject: str) -> int:
        await self.open()
        purged = await self._request("PURGE", {"filter": subject}, _PurgeReply)
        self._check(purged)
        return purged.purged

    async def _request(self, verb: str, question: dict[str, object], kind: type[R]) -> R:
        subject = f"{API}.{verb}.{self._stream}"
        data = msgspec.json.encode(question)
        answer = await self._bus.request_raw(subject, data, timeout_s=_ANSWER_S)
        return msgspec.json.decode(answer, type=kind)

    def _check(self, answer: _JetStreamReply) -> None:
        if answer.error is None:
            return
        if answer.error.code == _NOT_FOUND:
            self._created = False  # the broker has lost it: the next one makes it again
        log.warning(
            "bucket refused",
            extra={"bucket": self._stream, "reason": answer.error.description},
        )
        raise Unavailable("the record cannot be stored now", retry_after_s=1.0)

    def _subject(self, *key: str) -> str:
        return self._bucket.subject(self._bus.cluster, *key)

    def _config(self) -> dict[str, object]:
        keep_s = self._limits.keep_s
        return {
            "name": self._stream,
            "subjects": [f"{self._subject()}.>"],
            "retention": "limits",
            "storage": "file",
            "discard": "old",
            "max_msgs_per_subject": 1,
            "max_age": round(keep_s * _NS),
            "max_bytes": self._limits.bytes_max,
            "num_replicas": self._limits.replicas,
            "duplicate_window": round(min(keep_s, _REPEAT_WINDOW_S) * _NS),
            "allow_rollup_hdrs": True,
        }


def _decode_value(kept: _StoredMessage) -> _StoredValue:
    return msgspec.msgpack.decode(base64.b64decode(kept.data), type=_StoredValue)
