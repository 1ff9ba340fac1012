"""Validates and decodes request bodies without blocking the event loop.

Small bodies are decoded at once. A large one goes to a child process, which decodes it, checks all
limits and encodes it again without unknown fields, white space and escapes. The result is decoded
here within a few milliseconds, since its counts are bounded. Further Python work on it runs in a
thread, where the interpreter switches to the event loop every 5 ms.

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
from typing import TYPE_CHECKING, Self, TypeVar, cast

import msgspec

from antiphon.gateway.http.core import fields, limits
from antiphon.service.process_pool import FairQueue, OwnerQuota, ProcessPool, serve
from antiphon.wire.errors import (
    EngineError,
    ErrorReply,
    Internal,
    RequestTooLarge,
    decode_error,
    encode_error,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

log = logging.getLogger(__name__)

B = TypeVar("B", bound=msgspec.Struct)
T = TypeVar("T")

_JOB_S = 30.0
"""Timeout of one body in a child that is ready; the largest takes about a second."""
_WAIT_S = 60.0
"""Maximum time for a body to be queued, for the child to start, and to be read there."""
_LARGE_MAX = 64
"""Maximum number of large bodies of one tenant that are queued or read."""
_LARGE_BYTES_MAX = 64 * 1024**2
_TENANTS_MAX = 64
_CALLS_MAX = 256
"""Maximum number of conversations of one tenant that are queued for the thread."""
_CALLERS_MAX = 4096
_ARRIVING_MAX = 2**16
"""Maximum number of bodies of one tenant that are received at the same time."""
_ARRIVING_BYTES_MAX = 256 * 1024**2
_MODULE = "antiphon.gateway.http.core.body_reader"
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')


class BodyJob(msgspec.Struct, frozen=True):
    """A body for the child process. `kind` is its type as `module:name`.

    `work` is the function of the body whose result is returned; empty for the body itself.
    """

    kind: str
    work: str
    body: bytes


class BodyResult(msgspec.Struct, frozen=True):
    """Result of a job: JSON, or an error."""

    json: bytes = b""
    unknown: list[str] = []
    error: ErrorReply | None = None


class BodyReader:
    """Reads every body of the gateway's HTTP routes.

    There is one child and one thread. Tenants take turns at each. The number and bytes of a
    tenant's queued bodies are limited, and checked before any work is done.
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
        """Count a body of a tenant while it is received; the yielded function counts its bytes.

        A slow client holds memory for up to a minute, so the total of a tenant's bodies is limited.
        The first body is accepted whatever its size.
        """
        return self._arriving.admit(tenant, 0)

    async def read(
        self, body: bytes, kind: type[B], make: Callable[[B], T], tenant: str
    ) -> tuple[T, list[str]]:
        """Decode a body and build the result of `make`; also return the names of unknown fields.

        Raises:
            InvalidRequest: See `fields.read`, or from `make`.
            Overloaded: Too many large bodies of the tenant are queued.
        """
        if limits.is_small(body):
            read, unknown = fields.read(body, kind)
            return make(read), unknown
        with self._large.admit(tenant, len(body)):
            done = await self._done(body, kind, "", tenant)
            read = fields.decode(done.json, kind)
            return await self.run_in_thread(lambda: make(read), tenant), done.unknown

    async def run_admitted(self, work: Callable[[], T], tenant: str) -> T:
        """Run bounded Python work of a request that was not admitted yet, in the thread."""
        with self._calls.admit(tenant, 0):
            return await self.run_in_thread(work, tenant)

    async def run_in_thread(self, work: Callable[[], T], tenant: str) -> T:
        """Run bounded Python work in the thread; tenants take turns.

        The callers limit its amount. Work is finished even if its caller was cancelled.
        """
        context = contextvars.copy_context()
        loop = asyncio.get_running_loop()
        await self._turns.acquire(tenant)
        done = loop.run_in_executor(self._thread, lambda: context.run(work))
        done.add_done_callback(lambda _: self._turns.release())
        return await asyncio.shield(done)

    async def compute(
        self, body: bytes, kind: type[B], work: Callable[[B], msgspec.Struct], tenant: str
    ) -> tuple[bytes, list[str]]:
        """Return the JSON result of a function of a body, and the names of unknown fields.

        `work` is a module-level function: the child process, which gets larger bodies, looks it up
        by name. It takes up to 1 us per character, as parsing output does.
        """
        if len(body) <= limits.LOOP_ANSWER_BYTES and limits.is_small(body):
            read, unknown = fields.read(body, kind)
            return msgspec.json.encode(work(read)), unknown
        done = await self._done(body, kind, _name(work), tenant)
        return done.json, done.unknown

    async def _done(
        self, body: bytes, kind: type[msgspec.Struct], work: str, tenant: str
    ) -> BodyResult:
        job = msgspec.msgpack.encode(BodyJob(_name(kind), work, body))
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
    read, unknown = fields.read(job.body, kind)
    if job.work:
        work = cast("Callable[[msgspec.Struct], msgspec.Struct]", _resolve(job.work))
        return BodyResult(msgspec.json.encode(work(read)), unknown)
    _check(_keys(read), limits.KEYS_MAX, "object keys")
    written = msgspec.json.encode(read)
    _check_values(written)
    return BodyResult(written, unknown)


def _keys(value: object) -> int:
    """Count the keys that are decoded one by one: each costs more than a field or an id."""
    if isinstance(value, dict):
        return len(cast("dict[str, object]", value))
    if isinstance(value, msgspec.Struct):
        return sum(_keys(getattr(value, name)) for name in value.__struct_fields__)
    if isinstance(value, list) and not (value and isinstance(value[0], int)):
        return sum(map(_keys, cast("list[object]", value)))
    return 0


def _check_values(body: bytes) -> None:
    """Count all values except texts: each list may be within its own limit."""
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
    gc.disable()  # a decoded body has no cycles, and checking for them takes most of the time
    serve(run_job, *sys.argv[-2:])
