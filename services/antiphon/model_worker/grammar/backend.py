"""The grammars of a worker: each is compiled once, off the step, and requests wait for it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import sys
import threading
import time
from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np

from antiphon.model_card.vocabulary import read_vocabulary
from antiphon.model_worker.batching.state import WIRE_IDS, ChoiceKey, RequestState
from antiphon.model_worker.grammar.matcher import DeferredGrammarState, GrammarMatcher, GrammarState
from antiphon.model_worker.grammar.source import GrammarSource, source_of
from antiphon.service.tenant_slots import TenantSlots
from antiphon.telemetry import catalog
from antiphon.wire.errors import (
    EngineError,
    ErrorReply,
    Internal,
    InvalidRequest,
    Overloaded,
    Unsupported,
    decode_error,
    encode_error,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from antiphon.config.worker import GrammarConfig
    from antiphon.model_worker.protocol.worker_output import RunChoice
    from antiphon.telemetry.metrics import Metrics
    from antiphon.wire.ids import TenantId

log = logging.getLogger(__name__)

LATE_ENTRIES_MAX = 1024
"""Grammars that timed out and are remembered."""
BEGINNINGS_MAX = 4
"""Matchers that may be started at once."""
PAUSE_S = 30.0
"""Pause before the first retry of a grammar that timed out."""
PAUSE_S_MAX = 3600.0

LOST_MAX = 4
"""Timed-out compiles that may still run: each holds memory, and a little of a core."""
TENANT_LOST_MAX = 2
"""The same for one tenant, so that it does not block the grammars of the others."""
WAITING_MAX = 64
"""How many jobs of one tenant may wait for a slot."""
_NICE = 10
_RETRY_AFTER_S = 5.0

K = TypeVar("K")
T = TypeVar("T")
V = TypeVar("V")


class CompiledGrammar(Protocol):
    """A compiled grammar, shared by any number of sequences."""

    @property
    def size_bytes(self) -> int: ...

    def eos_ids(self, stop_token_ids: Sequence[int]) -> frozenset[int]:
        """EOS tokens that may end the output of a request with these stop tokens."""
        ...

    def start(self, stop_token_ids: Sequence[int]) -> GrammarState: ...


class GrammarCompiler(Protocol):
    """Compiles grammars; may be shared by threads."""

    def compile(self, source: GrammarSource) -> CompiledGrammar:
        """Compile a grammar, in seconds; `InvalidRequest` if it is invalid or matches no output."""
        ...


class GrammarMetrics:
    """Counted per sequence, as SGLang counts each output of a request."""

    def __init__(self, metrics: Metrics) -> None:
        self.requested = metrics.counter(catalog.NUM_GRAMMAR)
        self.hits = metrics.counter(catalog.NUM_GRAMMAR_CACHE_HIT)
        self.aborted = metrics.counter(catalog.NUM_GRAMMAR_ABORTED)
        self.timeouts = metrics.counter(catalog.NUM_GRAMMAR_TIMEOUT)
        self.seconds = metrics.histogram(catalog.GRAMMAR_COMPILATION)


class GrammarBackend:
    """Gives each sequence a matcher for its grammar. Used on one event loop.

    Compiled grammars are cached, and so are errors of invalid ones: the second request with the
    same grammar does not wait. A compile that timed out may succeed later, on a less busy machine:
    its grammar is refused for a while, and for twice as long after each further timeout. A sequence
    waits for its own grammar only, and compile threads are shared fairly among tenants.

    The compiler is opened when the first grammar arrives, which may take seconds. `group` runs the
    compiles, which outlive the requests that started them.
    """

    def __init__(
        self,
        config: GrammarConfig,
        vocab_size: int,
        opener: Callable[[], GrammarCompiler],
        group: asyncio.TaskGroup,
        metrics: GrammarMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._whitespace_max = 1 if config.compact_json else config.whitespace_max
        self._vocab_size = vocab_size
        self._group = group
        self.metrics = metrics
        # Opening runs Python code: at low priority it would hold the interpreter lock against a
        # step.
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self._threads = CompileThreads(config.workers)
        # Starting a matcher is short work and does not queue behind compiles; but replaying a long
        # output may take as long as following it did.
        self._start_threads = CompileThreads(BEGINNINGS_MAX, nice=0)
        self._compiling: dict[
            tuple[TenantId, GrammarSource], asyncio.Task[CompiledGrammar | ErrorReply]
        ] = {}
        self._cache: LruCache[GrammarSource, CompiledGrammar | ErrorReply] = LruCache(
            entries_max=config.cache_entries, bytes_max=config.cache_bytes, size_bytes=_size_bytes
        )
        self._backoff = CompileBackoff(LATE_ENTRIES_MAX, clock)
        self._opener = opener
        self._opening = asyncio.Lock()
        self._compiler: GrammarCompiler | None = None

    async def matcher(self, state: RequestState) -> GrammarMatcher:
        """Start a matcher at the current position of a request's output.

        Raises:
            InvalidRequest: The grammar is invalid, or matches no output.
            Overloaded: Compiling the grammar or replaying the output timed out, or too many
                requests wait for that.
        """
        grammar = state.sampling.grammar
        assert grammar is not None, "a sequence without a grammar needs no matcher"
        source = GrammarSource(grammar.kind, grammar.text)
        self.metrics.requested.inc()
        if (compiled := self._cache.get(source)) is not None:
            self.metrics.hits.inc()
        else:
            compiled = await asyncio.shield(self._compile(source, state.tenant))
        if isinstance(compiled, ErrorReply):
            raise decode_error(compiled)
        begin = functools.partial(_begin, compiled, state, self._vocab_size)
        timeout_s = self._config.follow_timeout_s
        try:
            return await self._start_threads.run(begin, timeout_s, state.tenant)
        except TimeoutError:
            self.metrics.timeouts.inc()
            message = f"grammar: the answer takes longer than {timeout_s:g} s to follow"
            raise Overloaded(message, retry_after_s=PAUSE_S) from None

    def close(self) -> None:
        """Start no more matchers. Running compiles are abandoned and end with the process."""
        self._executor.shutdown(wait=False)

    def _compile(
        self, source: GrammarSource, tenant: TenantId
    ) -> asyncio.Task[CompiledGrammar | ErrorReply]:
        # One task for each tenant: a tenant does not wait for another's turn for the same grammar.
        name = (tenant, source)
        if name not in self._compiling:
            fill = self._fill(source, tenant)
            self._compiling[name] = self._group.create_task(fill, name="grammar")
        return self._compiling[name]

    async def _fill(self, source: GrammarSource, tenant: TenantId) -> CompiledGrammar | ErrorReply:
        timeout_s = self._config.compile_timeout_s
        try:
            self._backoff.check(source)
            compiler = await self._opened()
            job = functools.partial(
                _check_and_compile,
                compiler,
                source,
                self._whitespace_max,
                self._config.properties_max,
            )
            result, seconds = await self._threads.run(job, timeout_s, tenant)
            self.metrics.seconds.observe(seconds)
        except TimeoutError:
            self.metrics.timeouts.inc()
            return encode_error(self._backoff.record_timeout(source, timeout_s))
        except InvalidRequest as error:
            result = encode_error(error)
        except Overloaded as error:
            return encode_error(error)  # a transient error: not cached
        except Exception:
            # A last-resort boundary: whatever a compiler raises fails the requests of this grammar,
            # not the service.
            log.exception("grammar not compiled", extra={"kind": source.kind})
            return encode_error(Internal("the grammar of this request could not be compiled"))
        finally:
            del self._compiling[tenant, source]
        self._cache.put(source, result)
        return result

    async def _opened(self) -> GrammarCompiler:
        async with self._opening:
            if (compiler := self._compiler) is None:
                loop = asyncio.get_running_loop()
                compiler = await loop.run_in_executor(self._executor, self._opener)
                self._compiler = compiler
        return compiler


@dataclass
class GrammarQueue:
    """Holds each sequence until its own grammar is ready, independently of the others.

    It has no bound of its own: the worker bounds the number of admitted requests. `hand_over`
    receives a request with its matcher, while it still counts as waiting; `refuse` the key of a
    request without one, and the reason.
    """

    grammars: GrammarBackend
    group: asyncio.TaskGroup
    hand_over: Callable[[RunChoice, GrammarMatcher], None]
    refuse: Callable[[ChoiceKey, EngineError], None]
    _waiting: dict[ChoiceKey, asyncio.Task[None]] = field(
        default_factory=dict["ChoiceKey", "asyncio.Task[None]"]
    )

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, run: RunChoice) -> None:
        self._waiting[run.key] = self.group.create_task(self._wait(run), name="grammar")

    def drop(self, key: ChoiceKey) -> bool:
        """Remove a request; whether it was here."""
        task = self._waiting.pop(key, None)
        if task is None or not task.cancel():
            return False
        self.grammars.metrics.aborted.inc()
        return True

    async def _wait(self, run: RunChoice) -> None:
        try:
            matcher = await self.grammars.matcher(run.state)
        except EngineError as error:
            self.grammars.metrics.aborted.inc()
            self.refuse(run.key, error)
        except Exception:
            # A last-resort boundary: whatever a client's grammar makes the code raise fails its own
            # request, not the service.
            log.exception("grammar not read", extra={"request_id": run.state.request_id})
            self.grammars.metrics.aborted.inc()
            self.refuse(run.key, Internal("the grammar of this request could not be read"))
        else:
            self.hand_over(run, matcher)
        del self._waiting[run.key]


def open_compiler(
    folder: Path, vocab_size: int, end_ids: frozenset[int], config: GrammarConfig
) -> GrammarCompiler:
    """Create the compiler for the tokenizer.json in a folder. Blocks for a second or two."""
    vocabulary = read_vocabulary(folder, vocab_size)
    # xgrammar imports transformers, which workers that never get a grammar need not load.
    from antiphon.model_worker.grammar.xgrammar_backend import XgrammarCompiler  # noqa: PLC0415

    return XgrammarCompiler(vocabulary, end_ids, config)


def no_compiler(reason: str = "it runs no model") -> GrammarCompiler:
    """Stands in for `open_compiler` on a worker without grammars."""
    raise Unsupported(f"this worker has no grammars: {reason}", param="grammar")


class CompileBackoff:
    """Remembers timeouts for a while; no grammar is refused for good.

    A pathological grammar that is requested again and again is compiled less and less often.
    """

    def __init__(self, entries_max: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._timeouts: LruCache[GrammarSource, tuple[float, float]] = LruCache(
            entries_max=entries_max, bytes_max=1 << 24, size_bytes=lambda key, _: len(key.text)
        )

    def check(self, source: GrammarSource) -> None:
        """Raise `Overloaded` for a grammar that timed out recently."""
        until, _ = self._timeouts.get(source) or (0.0, 0.0)
        left_s = until - self._clock()
        if left_s > 0:
            raise Overloaded("grammar: it took too long to compile", retry_after_s=left_s)

    def record_timeout(self, source: GrammarSource, timeout_s: float) -> Overloaded:
        _, before_s = self._timeouts.get(source) or (0.0, PAUSE_S / 2)
        pause_s = min(2 * before_s, PAUSE_S_MAX)
        self._timeouts.put(source, (self._clock() + pause_s, pause_s))
        message = f"grammar: it takes longer than {timeout_s:g} s to compile"
        return Overloaded(message, retry_after_s=pause_s)


@dataclass(kw_only=True)
class LruCache(Generic[K, V]):
    """A map bounded by entries and bytes; evicts the least recently used entry.

    The last entry is never evicted, however large it is: it has just been requested.
    """

    entries_max: int
    bytes_max: int
    size_bytes: Callable[[K, V], int]

    def __post_init__(self) -> None:
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._bytes = 0

    def get(self, key: K) -> V | None:
        if (value := self._entries.get(key)) is not None:
            self._entries.move_to_end(key)
        return value

    def put(self, key: K, value: V) -> None:
        if (before := self._entries.pop(key, None)) is not None:
            self._bytes -= self.size_bytes(key, before)
        self._entries[key] = value
        self._bytes += self.size_bytes(key, value)
        while len(self._entries) > 1 and (
            len(self._entries) > self.entries_max or self._bytes > self.bytes_max
        ):
            self._bytes -= self.size_bytes(*self._entries.popitem(last=False))


def _check_and_compile(
    compiler: GrammarCompiler, source: GrammarSource, whitespace_max: int, properties_max: int
) -> tuple[CompiledGrammar, float]:
    """The grammar, and how many seconds it took.

    Runs in a compile thread under its deadline, since checking a schema takes time, too.
    """
    began = time.perf_counter()
    result = compiler.compile(source_of(source, whitespace_max, properties_max))
    return result, time.perf_counter() - began


def _begin(compiled: CompiledGrammar, state: RequestState, vocab_size: int) -> GrammarMatcher:
    """Replay the output so far, which another worker may have generated."""
    sampling = state.sampling
    assert sampling.grammar is not None, "a sequence without a grammar needs no matcher"
    place = compiled.start(sampling.stop_token_ids)
    if sampling.grammar.begins_after:
        place = DeferredGrammarState(place, sampling.grammar.begins_after)
    for token in np.frombuffer(state.output_ids, WIRE_IDS).tolist():
        if not place.accept(token):
            raise Internal("the answer so far is not of its grammar")
    return GrammarMatcher(place, vocab_size, compiled.eos_ids(sampling.stop_token_ids))


def _size_bytes(source: GrammarSource, result: CompiledGrammar | ErrorReply) -> int:
    return len(source.text) + (0 if isinstance(result, ErrorReply) else result.size_bytes)


class CompileThreads:
    """Runs at most `workers` jobs at once, each in a thread of its own, shared fairly by tenants.

    Not an executor: a compile cannot be interrupted, and the process would wait for an executor's
    threads at exit. A job that times out frees its slot and runs on; a few may do so at a time.
    """

    def __init__(self, workers: int, nice: int = _NICE) -> None:
        self._nice = nice
        self._slots = TenantSlots(workers)
        self._timed_out: Counter[TenantId] = Counter()

    async def run(self, job: Callable[[], T], timeout_s: float, tenant: TenantId) -> T:
        """Run a job for at most `timeout_s`, and return its result.

        Raises `Overloaded` if it got no slot in that time, or too many timed-out jobs still run.
        """
        if self._timed_out.total() >= LOST_MAX or self._timed_out[tenant] >= TENANT_LOST_MAX:
            raise Overloaded("too many grammars take too long", retry_after_s=_RETRY_AFTER_S)
        if self._slots.waiting(tenant) >= WAITING_MAX:
            raise Overloaded(f"{WAITING_MAX} grammars wait to be compiled", retry_after_s=1.0)
        try:
            async with asyncio.timeout(timeout_s):
                await self._slots.acquire(tenant)
        except TimeoutError:
            message = "too many grammars are being compiled"
            raise Overloaded(message, retry_after_s=_RETRY_AFTER_S) from None
        try:
            return await self._run(job, timeout_s, tenant)
        finally:
            self._slots.release(tenant)

    async def _run(self, job: Callable[[], T], timeout_s: float, tenant: TenantId) -> T:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        body = functools.partial(_body, job, done, loop, self._nice)
        threading.Thread(target=body, name="grammar", daemon=True).start()
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(done)
        finally:
            if not done.done():
                self._timed_out[tenant] += 1
                done.add_done_callback(functools.partial(self._on_late_result, tenant))

    def _on_late_result(self, tenant: TenantId, done: asyncio.Future[T]) -> None:
        self._timed_out[tenant] -= 1
        if not self._timed_out[tenant]:
            del self._timed_out[tenant]
        done.exception()  # retrieved, or asyncio would log it: no caller awaits it any more


def _body(
    job: Callable[[], T], done: asyncio.Future[T], loop: asyncio.AbstractEventLoop, nice: int
) -> None:
    if nice and sys.platform == "linux":  # where each thread has a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
    try:
        resolve = functools.partial(done.set_result, job())
    except Exception as error:  # noqa: BLE001 (raised again where it is waited for)
        resolve = functools.partial(done.set_exception, error)
    with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits
        loop.call_soon_threadsafe(resolve)
