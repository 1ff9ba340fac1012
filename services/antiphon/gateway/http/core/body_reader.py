"""Bodies of requests, checked and read without holding the event loop.

Small bodies are read at once. A large one goes to a child process, which decodes it into its type,
checks all limits, and writes it again without what has no meaning here: fields that are not known,
white space, escapes. That is decoded here in a few milliseconds, since its counts are bounded. What
is then made of it in Python goes to a thread, where the interpreter changes to the loop each 5 ms.

    python -m antiphon.gateway.http.core.body_reader PARENT_PID MEMORY_BYTES_MAX
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, TypeVar, cast

import msgspec

from antiphon.gateway.http.core import fields, limits
from antiphon.gateway.http.core.fields import UnsupportedField
from antiphon.service.fair_queue import FairQueue, OwnerQuota
from antiphon.service.process_pool import ProcessPool, serve
from antiphon.wire.errors import (
    EngineError,
    ErrorReply,
    Internal,
    RequestTooLarge,
    decode_error,
    encode_error,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager
    from typing import Self

log = logging.getLogger(__name__)

B = TypeVar("B", bound=msgspec.Struct)
T = TypeVar("T")

_JOB_S = 30.0
"""Longest time of one body in a child that is ready; the largest takes about a second."""
_WAIT_S = 60.0
"""How long a body may wait for its turn, for the child to start, and be read there."""
_LARGE_MAX = 64
"""Most large bodies of one tenant that wait or are read."""
_LARGE_BYTES_MAX = 64 * 1024**2
_TENANTS_MAX = 64
_CALLS_MAX = 256
"""Most conversations of one tenant that wait for the thread."""
_CALLERS_MAX = 4096
_ARRIVING_MAX = 2**16
"""Most bodies of one tenant that arrive at the same time."""
_ARRIVING_BYTES_MAX = 256 * 1024**2
_MODULE = "antiphon.gateway.http.core.body_reader"
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')


class BodyJob(msgspec.Struct, frozen=True):
    """A body for the child.

    Attributes:
        kind: Its type, as `module:name`.
        refused: Fields that are refused.
        work: A function of it, as `module:name`, whose result is wanted; empty: the body itself.
        body: What was sent.
    """

    kind: str
    refused: dict[str, UnsupportedField]
    work: str
    body: bytes


class BodyResult(msgspec.Struct, frozen=True):
    """What came of a job: JSON, or an error."""

    json: bytes = b""
    unknown: list[str] = []
    error: ErrorReply | None = None


class BodyReader:
    """Reads every body of the gateway's HTTP routes.

    There is one child and one thread. Tenants take turns at each. What a tenant may have waiting is
    bounded by count and bytes, which is checked before any work is done.
    """

    def __init__(self) -> None:
        self.pool = ProcessPool(
            ("-m", _MODULE), job_s=_JOB_S, jobs_max=_LARGE_MAX, bytes_max=_LARGE_BYTES_MAX
        )
        self._large = OwnerQuota(
            jobs_max=_LARGE_MAX, bytes_max=_LARGE_BYTES_MAX, owners_max=_TENANTS_MAX
        )
        self._calls = OwnerQuota(jobs_max=_CALLS_MAX, bytes_max=0, owners_max=_CALLERS_MAX)
        self._arriving = OwnerQuota(
            jobs_max=_ARRIVING_MAX, bytes_max=_ARRIVING_BYTES_MAX, owners_max=_CALLERS_MAX
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="read-body")
        self._turns = FairQueue(1)

    async def __aenter__(self) -> Self:
        await self.pool.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._turns.close()
        self._thread.shutdown(wait=False, cancel_futures=True)
        await self.pool.__aexit__()

    def count_arriving(self, tenant: str) -> AbstractContextManager[Callable[[int], None]]:
        """Count a body of a tenant while it arrives; the function that it gives takes its bytes.

        A client that sends slowly holds what it has sent for up to a minute, so what all of a
        tenant's hold is bounded. The first is let in whatever its size.

        Raises:
            Overloaded: Too much of the tenant's is arriving.
        """
        return self._arriving.admit(tenant, 0)

    async def read(
        self,
        body: bytes,
        kind: type[B],
        make: Callable[[B], T],
        refused: Mapping[str, UnsupportedField],
        tenant: str,
    ) -> tuple[T, list[str]]:
        """Decode a body and make of it what is needed; list its fields that are not known.

        Large bodies of tenants are read in turns.

        Raises:
            InvalidRequest: As `fields.read` does, or `make`.
            Overloaded: Too many large bodies of the tenant wait.
        """
        if limits.is_small(body):
            read, unknown = fields.read(body, kind, refused)
            return make(read), unknown
        with self._large.admit(tenant, len(body)):
            done = await self._done(body, kind, refused, "", tenant)
            read = fields.decode(done.json, kind)
            return await self.run_in_thread(lambda: make(read), tenant), done.unknown

    async def run_admitted(self, work: Callable[[], T], tenant: str) -> T:
        """Return what bounded Python work of a request that has not been admitted comes to.

        Raises:
            Overloaded: Too many requests of the tenant wait for the thread.
        """
        with self._calls.admit(tenant, 0):
            return await self.run_in_thread(work, tenant)

    async def run_in_thread(self, work: Callable[[], T], tenant: str) -> T:
        """Return what bounded Python work comes to, done in the thread; tenants take turns.

        The callers bound how many there are. Work whose caller has left keeps its turn to its end.
        """
        context = contextvars.copy_context()
        loop = asyncio.get_running_loop()
        await self._turns.acquire(tenant)
        done = loop.run_in_executor(self._thread, lambda: context.run(work))
        done.add_done_callback(lambda _: self._turns.release())
        return await asyncio.shield(done)

    async def compute(
        self,
        body: bytes,
        kind: type[B],
        work: Callable[[B], msgspec.Struct],
        refused: Mapping[str, UnsupportedField],
        tenant: str,
        *,
        inline_bytes_max: int,
    ) -> tuple[bytes, list[str]]:
        """Return the JSON of what a function makes of a body, and its fields that are not known.

        Args:
            body: What was sent.
            kind: Its type.
            work: A function of a module, by whose name the child finds it.
            refused: Fields that are refused.
            tenant: Whose it is.
            inline_bytes_max: Larger bodies go to the child.

        Raises:
            InvalidRequest: As `fields.read` does, or `work`.
            Overloaded: Too many large bodies wait.
        """
        if len(body) <= inline_bytes_max and limits.is_small(body):
            read, unknown = fields.read(body, kind, refused)
            return msgspec.json.encode(work(read)), unknown
        done = await self._done(body, kind, refused, _name(work), tenant)
        return done.json, done.unknown

    async def _done(
        self,
        body: bytes,
        kind: type[msgspec.Struct],
        refused: Mapping[str, UnsupportedField],
        work: str,
        tenant: str,
    ) -> BodyResult:
        job = msgspec.msgpack.encode(BodyJob(_name(kind), dict(refused), work, body))
        result = await self.pool.run(job, timeout_s=_WAIT_S, owner=tenant)
        done = msgspec.msgpack.decode(result, type=BodyResult)
        if done.error is not None:
            raise decode_error(done.error)
        return done


def _name(thing: type | Callable[..., object]) -> str:
    return f"{thing.__module__}:{thing.__qualname__}"


@cache
def _resolve(name: str) -> object:
    module, _, qualname = name.partition(":")
    thing: object = import_module(module)
    for part in qualname.split("."):
        thing = getattr(thing, part)
    return thing


def run_job(data: bytes) -> bytes:
    """Do a job. Called in the child."""
    job = msgspec.msgpack.decode(data, type=BodyJob)
    try:
        return msgspec.msgpack.encode(_run_job(job))
    except EngineError as error:
        return msgspec.msgpack.encode(BodyResult(error=encode_error(error)))
    except Exception:
        log.exception("reading a body failed")
        return msgspec.msgpack.encode(BodyResult(error=encode_error(Internal("internal error"))))


def _run_job(job: BodyJob) -> BodyResult:
    kind = cast("type[msgspec.Struct]", _resolve(job.kind))
    read, unknown = fields.read(job.body, kind, job.refused)
    if job.work:
        work = cast("Callable[[msgspec.Struct], msgspec.Struct]", _resolve(job.work))
        return BodyResult(msgspec.json.encode(work(read)), unknown)
    _check(_keys(read), limits.KEYS_MAX, "keys of objects")
    written = msgspec.json.encode(read)
    _check_values(written)
    return BodyResult(written, unknown)


def _keys(value: object) -> int:
    """Count the keys that are decoded one by one: each takes longer than a field or an id."""
    if isinstance(value, dict):
        return len(cast("dict[str, object]", value))
    if isinstance(value, msgspec.Struct):
        return sum(_keys(getattr(value, name)) for name in value.__struct_fields__)
    if isinstance(value, list) and not (value and isinstance(value[0], int)):
        return sum(map(_keys, cast("list[object]", value)))
    return 0


def _check_values(body: bytes) -> None:
    """Count all values together, texts left out: each of its lists may be within its own limit."""
    bare = _STRING.sub(b"", body)
    objects = bare.count(b"{")
    values = bare.count(b",") + bare.count(b"[") + objects
    _check(objects, limits.OBJECTS_MAX, "objects")
    _check(values, limits.VALUES_MAX, "values")


def _check(count: int, most: int, what: str) -> None:
    if count > most:
        raise RequestTooLarge(
            f"the body has {count} {what}; the limit is {most}",
            details={"count": str(count), "max": str(most)},
        )


if __name__ == "__main__":
    gc.disable()  # a body holds no cycles, and looking for some takes most of the time
    serve(run_job, *sys.argv[-2:])
