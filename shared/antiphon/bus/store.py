"""Key-value buckets in JetStream, bounded by age and size.

Requests to JetStream use the process's own inbox, as calls do: nats-py's JetStream client uses
another inbox, which our permissions deny. nats-server 2.9 is sufficient.
"""

from __future__ import annotations

import base64
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar
from uuid import uuid4

import msgspec

from antiphon.bus.transport import NoResponders
from antiphon.wire.errors import Unavailable
from antiphon.wire.routes import API, KeyValueBucket

if TYPE_CHECKING:
    from collections.abc import Mapping

    from antiphon.bus.bus import Bus

log = logging.getLogger(__name__)

PART_BYTES = 128 * 1024
"""Larger values are stored in parts, so that other messages do not wait long behind them."""

_REPLY_TIMEOUT_S = 5.0
_NS = 1_000_000_000
_REPEAT_WINDOW_S = 120.0
_NOT_FOUND = 404
_EXPECTED = "Nats-Expected-Last-Subject-Sequence"
"""A message with this header is stored only if the last one of its subject has that sequence."""
_OTHER_REVISION = frozenset({10071, 10164})
"""JetStream's error codes for a wrong last sequence. Newer servers have the second one, too."""
_OTHER_CONFIG = 10058
"""JetStream's error code for a stream that exists with another configuration."""

R = TypeVar("R", bound="_JetStreamReply")


@dataclass(frozen=True, kw_only=True)
class StoreLimits:
    """Limits of a bucket by age and size. The oldest values are removed first."""

    keep_s: float
    bytes_max: int
    replicas: int = 1  # servers of a NATS cluster that store it


class _Failure(msgspec.Struct, frozen=True):
    code: int = 0
    err_code: int = 0
    description: str = ""


class _JetStreamReply(msgspec.Struct, frozen=True):
    error: _Failure | None = None


class _PurgeReply(_JetStreamReply, frozen=True):
    purged: int = 0


class _StoredMessage(msgspec.Struct, frozen=True):
    data: str = ""
    seq: int = 0


class _GetReply(_JetStreamReply, frozen=True):
    message: _StoredMessage = _StoredMessage()


class _StoredValue(msgspec.Struct, frozen=True, array_like=True):
    """The value of a key; or the number of its parts, stored at `<key>.<mark>.<index>`."""

    data: bytes = b""
    parts: int = 0
    mark: str = ""


class KeyValueStore:
    """Reads and writes one bucket of a cluster; creates it when first needed.

    All raise `Unavailable` if JetStream is disabled, has no space or does not respond.
    """

    def __init__(self, bus: Bus, bucket: KeyValueBucket, limits: StoreLimits) -> None:
        self._bus = bus
        self._bucket = bucket
        self._limits = limits
        self._stream = bucket.stream(bus.cluster)
        self._created = False

    async def open(self) -> None:
        if self._created:
            return
        made = await self._request("CREATE", self._config(), _JetStreamReply)
        if made.error is not None and made.error.err_code == _OTHER_CONFIG:
            made = await self._request("UPDATE", self._config(), _JetStreamReply)
        self._check(made)
        self._created = True

    async def put(self, *key: str, value: bytes) -> None:
        """Store a value, replacing an earlier one."""
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
        """Return a value; None if there is none, or some of its parts have expired."""
        head = await self._find(key)
        if head is None or not head.mark:
            return None if head is None else head.data
        parts: list[bytes] = []
        for number in range(head.parts):
            part = await self._find((*key, head.mark, str(number)))
            if part is None:
                return None
            parts.append(part.data)
        return b"".join(parts)

    async def read(self, *key: str) -> tuple[bytes, int] | None:
        """Return a value stored by `swap` and its revision; None if there is none."""
        stored = await self._read_message(key)
        return None if stored is None else (_decode_value(stored).data, stored.seq)

    async def swap(self, *key: str, value: bytes, revision: int) -> bool:
        """Compare and set: store a value if the key still has `revision`; return whether it did.

        The key is one that `put` does not write to; revision 0 means no value. When it raises, the
        value may or may not have been stored.
        """
        assert len(value) <= PART_BYTES, "what is swapped lies in one message"
        headers = {_EXPECTED: str(revision)}
        reply = await self._send(key, _StoredValue(value), headers)
        if reply.error is not None and reply.error.err_code in _OTHER_REVISION:
            return False
        self._check(reply)
        return True

    async def forget(self, *key: str) -> bool:
        """Delete the value of a key; return whether there was one."""
        purged = await self._purge(self._subject(*key))
        await self._purge(f"{self._subject(*key)}.>")
        return purged > 0

    async def _publish(self, key: tuple[str, ...], value: _StoredValue) -> None:
        self._check(await self._send(key, value))

    async def _send(
        self, key: tuple[str, ...], value: _StoredValue, headers: Mapping[str, str] | None = None
    ) -> _JetStreamReply:
        """Write one message; create the bucket again if the broker has lost it."""
        await self.open()
        subject, data = self._subject(*key), msgspec.msgpack.encode(value)
        try:
            reply = await self._bus.request_raw(subject, data, _REPLY_TIMEOUT_S, headers)
        except NoResponders:
            self._created = False
            await self.open()
            reply = await self._bus.request_raw(subject, data, _REPLY_TIMEOUT_S, headers)
        return msgspec.json.decode(reply, type=_JetStreamReply)

    async def _find(self, key: tuple[str, ...]) -> _StoredValue | None:
        stored = await self._read_message(key)
        return None if stored is None else _decode_value(stored)

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
        reply = await self._bus.request_raw(subject, data, _REPLY_TIMEOUT_S)
        return msgspec.json.decode(reply, type=kind)

    def _check(self, reply: _JetStreamReply) -> None:
        if reply.error is None:
            return
        if reply.error.code == _NOT_FOUND:
            self._created = False  # the broker has lost the bucket: the next call creates it again
        fields = {"bucket": self._stream, "reason": reply.error.description}
        log.warning("bucket refused", extra=fields)
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


def _decode_value(stored: _StoredMessage) -> _StoredValue:
    return msgspec.msgpack.decode(base64.b64decode(stored.data), type=_StoredValue)
