"""Transfer of payloads too large for the broker: by claim check, over direct TCP.

The holder puts bytes into a `BlobStore` and sends the claim over the bus; the receiver fetches them
and verifies size and checksum. A connection opens with `HELLO`; then each request is a 16-byte
token. The response is the size as 8 little-endian bytes and the content, or `GONE`. On a connection
that opens with `RANGES`, the first byte and the size of a range follow each token, in 8 bytes each;
the response is that range. Ranges are parts that a claim has checksums of.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import math
import os
import secrets
import socket
import struct
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final, Protocol

from msgspec import structs

from antiphon.transfer.memory import views_of
from antiphon.wire.claim import MEDIUM_GONE, MEDIUM_LOST, MEDIUM_UNREACHABLE, Claim
from antiphon.wire.errors import InvalidRequest, Overloaded, RequestTooLarge, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    from antiphon.transfer.memory import BlobData

log = logging.getLogger(__name__)

HELLO: Final = b"APT1"
RANGES: Final = b"APT2"
TOKEN_BYTES: Final = 16
SIZE_BYTES: Final = 8
DIGEST_BYTES: Final = 32
PART_BYTES: Final = 4 * 1024**2
"""Size of the parts of larger blobs, at most: the ends of a range are received beside it."""
PIECES_MAX: Final = 1024
"""Pieces of one call of the kernel: `IOV_MAX` of Linux."""
GONE: Final = b"\xff" * SIZE_BYTES
"""Sent in place of a size: the token is unknown or expired."""

HASH_INLINE_BYTES = 256 * 1024
"""More than this is hashed in a thread: it would block the event loop for over 0.2 ms."""
CONNECTIONS_MAX = 256
ACCEPT_PAUSE_S = 0.1
"""Delay after an `accept` error: without free file descriptors the next one would fail, too."""
LOG_PAUSE_S = 10.0
IDLE_TIMEOUT_S = 60.0
SEND_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 5.0
"""A host that is gone does not refuse a connection: it answers nothing."""
_TIMEVAL: Final = struct.Struct("@ll")
_PORT_MAX: Final = 65_535


class ConnectionClosed(Exception):
    """The other side closed the connection before the end of a frame."""


class BlobGone(Unavailable):
    """The holder no longer has the bytes."""


class BlobUnreachable(BlobGone):
    """The holder cannot be reached, or was too slow: it may still have the bytes."""


class BlobCorrupt(Unavailable):
    """The received size or checksum differs from the claim."""


async def fetch(claim: Claim, *, timeout_s: float, bytes_max: int) -> bytearray:
    (data,) = await fetch_all([claim], timeout_s=timeout_s, bytes_max=bytes_max)
    return data


async def fetch_all(
    claims: Sequence[Claim], *, timeout_s: float, bytes_max: int, prefix: bool = False
) -> list[bytearray]:
    """Fetch several claims of one address over one connection, in order.

    `timeout_s` covers all of them; `bytes_max` of one claim is checked before anything is sent.
    With `prefix`, the first claim that is gone or corrupt ends the list.

    Raises:
        RequestTooLarge: A claim exceeds `bytes_max`.
        InvalidRequest: The claims have several addresses, or are malformed.
        BlobGone: The holder no longer has a blob.
        BlobUnreachable: The holder cannot be reached, or was too slow.
        BlobCorrupt: Size or checksum differs from the claim.
    """
    blobs: list[bytearray] = []
    if not claims:
        return blobs
    address = claims[0].address
    for claim in claims:
        if claim.size_bytes > bytes_max:
            raise RequestTooLarge.of(size_bytes=claim.size_bytes, bytes_max=bytes_max)
        if claim.address != address:
            raise InvalidRequest("claims of one fetch have several addresses")
    tokens = [token_bytes(claim) for claim in claims]
    host, port = host_and_port(address)
    try:
        async with asyncio.timeout(timeout_s):
            await _fetch(host, port, claims, tokens, blobs)
    except (BlobGone, BlobCorrupt):
        if not prefix:
            raise
    except (ConnectionClosed, TimeoutError, OSError) as error:
        if not prefix:
            raise BlobUnreachable(f"{address} did not send what it claimed to hold") from error
    return blobs


@contextlib.contextmanager
def medium_lost() -> Generator[None]:
    """Let errors of a fetch say that the owner of a medium is at fault, and whether for good."""
    try:
        yield
    except (BlobGone, BlobCorrupt) as error:
        passing = isinstance(error, BlobUnreachable)
        error.details = {MEDIUM_LOST: MEDIUM_UNREACHABLE if passing else MEDIUM_GONE}
        raise


async def _connected(host: str, port: int, hello: bytes) -> socket.socket:
    loop = asyncio.get_running_loop()
    connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        connection.setblocking(False)  # noqa: FBT003  # the name says it
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await loop.sock_connect(connection, (host, port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await loop.sock_sendall(connection, hello)
    except BaseException:
        connection.close()
        raise
    return connection


async def _fetch(
    host: str, port: int, claims: Sequence[Claim], tokens: Sequence[bytes], blobs: list[bytearray]
) -> None:
    loop = asyncio.get_running_loop()
    with await _connected(host, port, HELLO) as connection:
        for claim, token in zip(claims, tokens, strict=True):
            await loop.sock_sendall(connection, token)
            blobs.append(await _receive(connection, claim))


async def _check_size(connection: socket.socket, claim: Claim, expected: int) -> None:
    size = bytes(await read_exactly(connection, SIZE_BYTES))
    if size == GONE:
        raise BlobGone(f"{claim.address} has it no longer")
    if int.from_bytes(size, "little") != expected:
        raise BlobCorrupt(f"{claim.address} sends another size than it claimed")


async def _receive(connection: socket.socket, claim: Claim) -> bytearray:
    await _check_size(connection, claim, claim.size_bytes)
    data = await read_exactly(connection, claim.size_bytes)
    large = len(data) > HASH_INLINE_BYTES
    checksum = await asyncio.to_thread(hashlib.sha256, data) if large else hashlib.sha256(data)
    if not hmac.compare_digest(checksum.digest(), claim.digest):
        raise BlobCorrupt(f"{claim.address} sent bytes with another checksum than it claimed")
    return data


async def fetch_range(claim: Claim, start: int, end: int, *, timeout_s: float) -> bytearray:
    """Fetch the bytes from `start` to `end` of a claim with parts: those parts, each verified.

    Raises:
        InvalidRequest: The claim has no parts, or the range is not within it.
        BlobGone: The holder no longer has the blob.
        BlobUnreachable: The holder cannot be reached, or was too slow.
        BlobCorrupt: Size or checksum of a part differs from the claim.
    """
    size, each = claim.size_bytes, claim.part_bytes
    if not each or len(claim.part_digests) != -(-size // each) * DIGEST_BYTES:
        raise InvalidRequest("a claim has no checksums of parts")
    if not 0 <= start < end <= size:
        raise InvalidRequest(f"a claim of {size} bytes has none from {start} to {end}")
    token, (host, port) = token_bytes(claim), host_and_port(claim.address)
    result = bytearray(end - start)
    try:
        async with asyncio.timeout(timeout_s):
            with await _connected(host, port, RANGES) as connection:
                for index in range(start // each, -(-end // each)):
                    await _receive_part(connection, claim, token, index, memoryview(result), start)
    except (ConnectionClosed, TimeoutError, OSError) as error:
        raise BlobUnreachable(f"{claim.address} did not send what it claimed to hold") from error
    return result


async def _receive_part(
    connection: socket.socket,
    claim: Claim,
    token: bytes,
    index: int,
    result: memoryview,
    start: int,
) -> None:
    """Fetch a part into what of the result, which begins at byte `start`, lies in it."""
    loop, first = asyncio.get_running_loop(), index * claim.part_bytes
    size = min(claim.part_bytes, claim.size_bytes - first)
    range_ = first.to_bytes(SIZE_BYTES, "little") + size.to_bytes(SIZE_BYTES, "little")
    await loop.sock_sendall(connection, token + range_)
    await _check_size(connection, claim, size)
    skipped = max(0, start - first)
    target = result[first + skipped - start : first + size - start]
    # Parts at the ends of the range are received beside it, since all of a part is verified.
    part = target if len(target) == size else memoryview(bytearray(size))
    await _read_into(connection, part)
    checksum = await asyncio.to_thread(hashlib.sha256, part)
    digest = claim.part_digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
    if not hmac.compare_digest(checksum.digest(), digest):
        raise BlobCorrupt(f"{claim.address} sent bytes with another checksum than it claimed")
    if part is not target:
        target[:] = part[skipped : skipped + len(target)]


def part_digests(data: bytes | bytearray | memoryview, part_bytes: int) -> bytes:
    """SHA-256 of each part of the data, one behind the other."""
    view = memoryview(data)
    parts = range(0, len(view), part_bytes)
    return b"".join(hashlib.sha256(view[at : at + part_bytes]).digest() for at in parts)


def new_token() -> str:
    return secrets.token_hex(TOKEN_BYTES)


async def read_exactly(connection: socket.socket, size: int) -> bytearray:
    """Read a frame of known size into one buffer, without copies; raises `ConnectionClosed`."""
    data = bytearray(size)
    await _read_into(connection, memoryview(data))
    return data


async def _read_into(connection: socket.socket, rest: memoryview) -> None:
    loop = asyncio.get_running_loop()
    while rest:
        count = await loop.sock_recv_into(connection, rest)
        if count == 0:
            raise ConnectionClosed
        rest = rest[count:]


def wait_until(connection: socket.socket, option: int, due: float) -> None:
    """Let the next blocking calls wait until `due`, by the kernel's own timeout: an `OSError`.

    By Python's timeouts each piece that arrives or leaves would cost three calls. `option` is
    `SO_RCVTIMEO` or `SO_SNDTIMEO`.

    Raises:
        TimeoutError: It is past.
    """
    left_s = due - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    seconds, rest = divmod(left_s, 1)
    limit = _TIMEVAL.pack(int(seconds), max(1, int(rest * 1e6)))
    connection.setsockopt(socket.SOL_SOCKET, option, limit)


def receive_into(
    connection: socket.socket, targets: Sequence[memoryview | bytearray], due: float
) -> None:
    """Fill the targets in one blocking call; a closed connection and a deadline are OSErrors."""
    wait_until(connection, socket.SO_RCVTIMEO, due)
    count, *_ = connection.recvmsg_into(targets, 0, socket.MSG_WAITALL)
    if count < sum(map(len, targets)):
        raise ConnectionResetError


def send(connection: socket.socket, pieces: Iterable[bytes | memoryview], due: float) -> None:
    """Send pieces one after the other, without copying them together; blocks, errors likewise."""
    rest = deque(memoryview(piece) for piece in pieces if len(piece))
    while rest:
        wait_until(connection, socket.SO_SNDTIMEO, due)
        sent = connection.sendmsg(list(islice(rest, PIECES_MAX)))
        while rest and sent >= len(rest[0]):
            sent -= len(rest.popleft())
        if rest:
            rest[0] = rest[0][sent:]


def token_bytes(claim: Claim) -> bytes:
    try:
        return bytes.fromhex(claim.token)
    except ValueError as error:
        raise InvalidRequest("a claim's token is not hexadecimal") from error


def host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= _PORT_MAX:
        raise InvalidRequest(f"a claim's address is not host:port: {address}")
    return host, int(port)


class BlobSource(Protocol):
    def get(self, token: str) -> BlobData | None:
        """The bytes of a token, or None. Called in threads."""
        ...


class ExpiryClock(Protocol):
    """A monotonic clock, by which bytes expire, and the wall clock, by which claims say when."""

    def now(self) -> float: ...

    def unix_ms(self) -> int: ...


@dataclass(slots=True)
class Blob:
    """Bytes until they expire, or, if they are `spare`, until others find no room.

    Attributes:
        holders: How many hold them, of those that discard them.
        kept: Without holders they are spare. Else they are dropped.
    """

    data: bytes | bytearray | memoryview
    expires_at: float
    spare: bool = False
    holders: int = 1
    kept: bool = False


class BlobStore:
    """Holds bytes under unguessable tokens until they expire.

    `address` is `host:port` of the blob server that serves this store. A step of the wall clock
    neither drops bytes nor keeps them.
    """

    def __init__(self, address: str, bytes_max: int, clock: ExpiryClock) -> None:
        self.bytes_max = bytes_max
        self._address = address
        self._clock = clock
        self._blobs: dict[str, Blob] = {}
        self._bytes = 0
        self._expires_at = math.inf  # nothing does before
        self._any_spare = False

    @property
    def bytes_held(self) -> int:
        """Those of blobs, and those that are reserved."""
        return self._bytes

    def reserve(self, size_bytes: int, leaving: int = 0) -> bool:
        """Keep room for bytes that are still to come, until `release`; False if there is none.

        So many bytes as `leaving` says have to be free behind it.
        """
        self.sweep()
        most = self.bytes_max - leaving - size_bytes
        if self._bytes > most and self._any_spare:
            self._drop_spare(self._bytes - most)
        if self._bytes > most:
            return False
        self._bytes += size_bytes
        return True

    def _drop_spare(self, size_bytes: int) -> None:
        """Drop what is spare, the oldest first, up to so many bytes or a few more."""
        self._any_spare, dropped = False, 0  # a thread may find one meanwhile
        for token in [token for token, blob in self._blobs.items() if blob.spare]:
            if dropped >= size_bytes:
                self._any_spare = True
                break
            dropped += len(self._blobs.pop(token).data)
        self._bytes -= dropped

    def release(self, size_bytes: int) -> None:
        """Give back what was reserved."""
        self._bytes -= size_bytes

    def put(
        self,
        data: bytes | bytearray | memoryview,
        lifetime_s: float,
        *,
        checksum: bytes | None = None,
        part_bytes: int = 0,
        part_digests: bytes = b"",
    ) -> Claim:
        """Store bytes, which are not copied, and return the claim to fetch them.

        `checksum` is their SHA-256, if known: hashing megabytes here would block the event loop.
        Parts may be fetched alone, if their size and checksums are given.

        Raises:
            RequestTooLarge: They would not fit into an empty store.
            Overloaded: The store is full of unexpired blobs.
        """
        if len(data) > self.bytes_max:
            raise RequestTooLarge.of(size_bytes=len(data), bytes_max=self.bytes_max)
        if not self.reserve(len(data)):
            raise Overloaded("the transfer store is full; retry later", retry_after_s=1.0)
        token = new_token()
        expires_at = self._clock.now() + lifetime_s
        self._blobs[token] = Blob(data, expires_at)
        self._expires_at = min(self._expires_at, expires_at)
        return Claim(
            address=self._address,
            token=token,
            size_bytes=len(data),
            digest=checksum or hashlib.sha256(data).digest(),
            expires_unix_ms=self._clock.unix_ms() + int(lifetime_s * 1000),
            part_bytes=part_bytes,
            part_digests=part_digests,
        )

    def left_s(self, claim: Claim) -> float:
        """How long the bytes of a claim of this store are held from now on; 0 if they are gone."""
        blob = self._blobs.get(claim.token)
        return 0.0 if blob is None else max(0.0, blob.expires_at - self._clock.now())

    def get(self, token: str) -> bytes | bytearray | memoryview | None:
        blob = self._blobs.get(token)
        return None if blob is None or blob.expires_at < self._clock.now() else blob.data

    def spare(self, token: str) -> None:
        """Let the bytes of a token be dropped where others find no room. Called in threads."""
        if (blob := self._blobs.get(token)) is not None:
            blob.spare = self._any_spare = True

    def retain(self, claim: Claim) -> None:
        """Keep bytes that were spare, since their claim is given out once more."""
        if (blob := self._blobs.get(claim.token)) is not None:
            blob.spare = False

    def share(self, claim: Claim, lifetime_s: float) -> Claim | None:
        """Hold bytes for one more, for so long at least; None if they are gone."""
        blob, now = self._blobs.get(claim.token), self._clock.now()
        if blob is None or blob.expires_at < now:
            return None
        blob.holders, blob.spare = blob.holders + 1, False
        blob.expires_at = max(blob.expires_at, now + lifetime_s)
        left_ms = int(1000 * (blob.expires_at - now))
        return structs.replace(claim, expires_unix_ms=self._clock.unix_ms() + left_ms)

    def keep(self, claim: Claim) -> None:
        """Let bytes be spare, and not dropped, once they are not held, until `forget`."""
        if (blob := self._blobs.get(claim.token)) is not None:
            blob.kept = True

    def forget(self, claim: Claim) -> None:
        """Drop bytes that were kept, as soon as they are not held. Unknown claims are ignored."""
        if (blob := self._blobs.get(claim.token)) is not None:
            blob.kept = False
            if not blob.holders:
                self._drop(claim)

    def discard(self, claim: Claim) -> None:
        """Drop bytes, unless others hold them, or they are kept. Unknown claims are ignored."""
        if (blob := self._blobs.get(claim.token)) is None:
            return
        blob.holders -= 1
        if blob.holders > 0:
            return
        if blob.kept:
            self.spare(claim.token)
        else:
            self._drop(claim)

    def _drop(self, claim: Claim) -> None:
        self._bytes -= len(self._blobs.pop(claim.token).data)

    def sweep(self) -> None:
        """Drop what has expired. Blobs are looked at only if one may have: many calls wait."""
        now = self._clock.now()
        if now <= self._expires_at:
            return
        for token in [t for t, blob in self._blobs.items() if blob.expires_at < now]:
            self._bytes -= len(self._blobs.pop(token).data)
        self._expires_at = min((each.expires_at for each in self._blobs.values()), default=math.inf)


class BlobServer:
    """Serves fetches on a bound socket, which the caller closes after `run` was cancelled.

    Each connection has a thread, whose calls block: an event loop that sends a large blob is woken
    for each part of it that the kernel has taken, which costs more than the copy itself.

    `sent` is called in such a thread, with the token of bytes that were sent to their end.
    """

    def __init__(
        self,
        bound: socket.socket,
        source: BlobSource,
        *,
        sent: Callable[[str], None] | None = None,
    ) -> None:
        self._bound = bound
        self._source = source
        self._sent = sent
        self._slots = asyncio.Semaphore(CONNECTIONS_MAX)
        self._threads = ThreadPoolExecutor(CONNECTIONS_MAX, thread_name_prefix="blobs")

    async def run(self) -> None:
        """Accept connections; beyond `CONNECTIONS_MAX` they wait in the kernel's queue."""
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    await self._slots.acquire()
                    group.create_task(self._connected(await self._accept()))
        finally:
            self._threads.shutdown(wait=False)

    async def _connected(self, connection: socket.socket) -> None:
        """Serve one connection in a thread, which closes it."""
        connection.setblocking(True)  # noqa: FBT003  # the name says it
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._threads, self._serve, connection)
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):  # it has just been closed
                connection.shutdown(socket.SHUT_RDWR)  # ends what the thread waits for
            raise
        finally:
            self._slots.release()

    async def _accept(self) -> socket.socket:
        """Wait for the next connection, retrying errors."""
        loop = asyncio.get_running_loop()
        failures, logged_at = 0, loop.time() - LOG_PAUSE_S
        while True:
            try:
                connection, _ = await loop.sock_accept(self._bound)
            except OSError as error:
                # Too many open files (EMFILE, ENFILE), no memory, or a client that disconnected
                # while queued. Open connections are served meanwhile, and free descriptors later.
                failures += 1
                if loop.time() - logged_at >= LOG_PAUSE_S:
                    logged_at = loop.time()
                    fields = {"reason": os.strerror(error.errno or 0), "failures": failures}
                    log.warning("connection not accepted", extra=fields)
                await asyncio.sleep(ACCEPT_PAUSE_S)
            else:
                if failures:
                    log.info("connections are accepted again", extra={"failures": failures})
                return connection

    def _serve(self, connection: socket.socket) -> None:
        """Serve one connection until it is closed, idle for too long, or invalid."""
        with connection:
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                hello = bytearray(len(HELLO))
                receive_into(connection, [hello], time.monotonic() + IDLE_TIMEOUT_S)
                if bytes(hello) not in (HELLO, RANGES):
                    log.warning("fetch refused", extra={"hello": hello.hex()})
                    return
                while True:
                    self._send_blob(connection, ranges=bytes(hello) == RANGES)
            except OSError:
                return  # the client sees it, too, and only the client knows whether it matters
            except Exception:  # other connections go on
                log.exception("fetch failed")  # before the client can see that it failed

    def _send_blob(self, connection: socket.socket, *, ranges: bool) -> None:
        token, range_ = bytearray(TOKEN_BYTES), bytearray(2 * SIZE_BYTES)
        wanted = [token, range_] if ranges else [token]
        receive_into(connection, wanted, time.monotonic() + IDLE_TIMEOUT_S)
        data = self._source.get(token.hex())
        pieces, ended = [GONE], False
        if data is not None:
            first, size, views = 0, len(data), views_of(data)
            if ranges:
                first = int.from_bytes(range_[:SIZE_BYTES], "little")
                size = min(int.from_bytes(range_[SIZE_BYTES:], "little"), max(0, size - first))
                views = tuple(_within(views, first, first + size))
            pieces, ended = [size.to_bytes(SIZE_BYTES, "little"), *views], first + size == len(data)
        send(connection, pieces, time.monotonic() + SEND_TIMEOUT_S)
        if ended and self._sent is not None:
            self._sent(token.hex())


def _within(views: Iterable[memoryview], start: int, end: int) -> Iterator[memoryview]:
    """What of these pieces, one behind the other, lies from byte `start` to `end`."""
    at = 0
    for view in views:
        if at < end and at + len(view) > start:
            yield view[max(0, start - at) : end - at]
        at += len(view)
