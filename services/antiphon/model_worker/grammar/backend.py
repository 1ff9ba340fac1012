"""The grammar backend of a worker: each grammar is compiled once, off the step, and cached."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import numpy as np

from antiphon.model_worker.batching.request import WIRE_IDS
from antiphon.model_worker.grammar.compile_backoff import PAUSE_S, CompileBackoff
from antiphon.model_worker.grammar.compile_threads import CompileThreads
from antiphon.model_worker.grammar.lru_cache import LruCache
from antiphon.model_worker.grammar.matcher import DeferredGrammarState, GrammarMatcher, GrammarState
from antiphon.model_worker.grammar.source import GrammarSource, source_of
from antiphon.wire.errors import (
    ErrorReply,
    Internal,
    InvalidRequest,
    Overloaded,
    decode_error,
    encode_error,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from antiphon.config.worker import GrammarConfig
    from antiphon.model_worker.batching.request import RequestState
    from antiphon.model_worker.grammar.metrics import GrammarMetrics
    from antiphon.wire.ids import TenantId

log = logging.getLogger(__name__)

LATE_ENTRIES_MAX = 1024
"""Grammars that timed out and are remembered."""
BEGINNINGS_MAX = 4
"""Matchers that may be started at once."""


class CompiledGrammar(Protocol):
    """A compiled grammar, shared by any number of sequences."""

    @property
    def size_bytes(self) -> int:
        """Approximate memory size."""
        ...

    def eos_ids(self, stop_token_ids: Sequence[int]) -> frozenset[int]:
        """EOS tokens that may end the output of a request with these stop tokens."""
        ...

    def start(self, stop_token_ids: Sequence[int]) -> GrammarState:
        """The state at the start of an output."""
        ...


class GrammarCompiler(Protocol):
    """Compiles grammars; may be shared by threads."""

    def compile(self, source: GrammarSource) -> CompiledGrammar:
        """Compile a grammar; may take seconds.

        Raises:
            InvalidRequest: The grammar is invalid, or matches no output.
        """
        ...


class GrammarBackend:
    """Gives each sequence a matcher for its grammar. Used on one event loop.

    Compiled grammars are cached, and so are errors of invalid ones: the second request with the
        same
    grammar does not wait. A compile that timed out may succeed later, on a less busy machine: its
    grammar is refused for a while, and for twice as long after each further timeout. A sequence
    waits for its own grammar only, and compile threads are shared fairly among tenants.
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
        """Create the backend; the compiler is opened when the first grammar arrives.

        Args:
            config: Settings of grammar compilation.
            vocab_size: Tokens that the model has logits for.
            opener: Makes the compiler; may take seconds.
            group: Runs the compiles, which outlive the requests that started them.
            metrics: Metrics to update.
            clock: Monotonic seconds.
        """
        self._config = config
        self._whitespace_max = 1 if config.compact_json else config.whitespace_max
        self._vocab_size = vocab_size
        self._group = group
        self._metrics = metrics
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
        self._metrics.requested.inc()
        compiled = self._cache.get(source)
        if compiled is not None:
            self._metrics.hits.inc()
        else:
            compiled = await asyncio.shield(self._compile(source, state.tenant))
        if isinstance(compiled, ErrorReply):
            raise decode_error(compiled)
        begin = functools.partial(_begin, compiled, state, self._vocab_size)
        timeout_s = self._config.follow_timeout_s
        try:
            return await self._start_threads.run(begin, timeout_s, state.tenant)
        except TimeoutError:
            self._metrics.timeouts.inc()
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
        """Compile a grammar and cache the result or the error."""
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
            self._metrics.seconds.observe(seconds)
        except TimeoutError:
            self._metrics.timeouts.inc()
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


def _check_and_compile(
    compiler: GrammarCompiler, source: GrammarSource, whitespace_max: int, properties_max: int
) -> tuple[CompiledGrammar, float]:
    """Runs in a compile thread under its deadline, since checking a schema takes time, too.

    Returns:
        The grammar, and how many seconds it took.
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
