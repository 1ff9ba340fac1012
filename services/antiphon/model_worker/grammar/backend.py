"""The grammars of one worker: each compiled once, beside the step, and begun by any choice."""

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

    from antiphon.config.grammar import GrammarConfig
    from antiphon.model_worker.batching.request import RequestState
    from antiphon.model_worker.grammar.metrics import GrammarMetrics
    from antiphon.wire.ids import TenantId

log = logging.getLogger(__name__)

LATE_ENTRIES_MAX = 1024
"""Grammars that took too long and are remembered."""
BEGINNINGS_MAX = 4
"""Choices that are begun at once."""


class CompiledGrammar(Protocol):
    """A grammar ready to be followed, by any number of choices."""

    @property
    def size_bytes(self) -> int:
        """Memory that it takes, about."""
        ...

    def eos_ids(self, stop_token_ids: Sequence[int]) -> frozenset[int]:
        """The tokens that may end an answer whose request names these."""
        ...

    def start(self, stop_token_ids: Sequence[int]) -> GrammarState:
        """A state at the beginning of an answer."""
        ...


class GrammarCompiler(Protocol):
    """Makes grammars; threads may share it."""

    def compile(self, source: GrammarSource) -> CompiledGrammar:
        """Compile a grammar; may take seconds.

        Raises:
            InvalidRequest: It has a mistake, or nothing can be said in it.
        """
        ...


class GrammarBackend:
    """Gives each choice the guide through its grammar. Used on one event loop.

    What was compiled is kept, and so is what cannot be: the second request of a kind waits for
    nothing. What took too long may not the next time, on an idler machine: it is refused for a
    while, and for twice as long each time that it is tried in vain. A choice waits for its own
    grammar only, and tenants take turns in having theirs compiled.
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
        """Nothing is opened before the first grammar comes.

        Args:
            config: How grammars are compiled.
            vocab_size: Tokens that the model has logits for.
            opener: Makes the compiler; may take seconds.
            group: Where compiles are waited for: whoever asked first may leave.
            metrics: What is counted.
            clock: Seconds, from anywhere on.
        """
        self._config = config
        self._whitespace_max = 1 if config.compact_json else config.whitespace_max
        self._vocab_size = vocab_size
        self._group = group
        self._metrics = metrics
        # Python, which at low priority would keep the interpreter from a step.
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self._threads = CompileThreads(config.workers)
        # Beginning a choice is short work, and waits for nobody's compile; but an answer that is
        # followed again from its beginning may take as long as it did.
        self._beginnings = CompileThreads(BEGINNINGS_MAX, nice=0)
        self._compiling: dict[
            tuple[TenantId, GrammarSource], asyncio.Task[CompiledGrammar | ErrorReply]
        ] = {}
        self._kept: LruCache[GrammarSource, CompiledGrammar | ErrorReply] = LruCache(
            entries_max=config.cache_entries, bytes_max=config.cache_bytes, size_bytes=_size_bytes
        )
        self._late = CompileBackoff(LATE_ENTRIES_MAX, clock)
        self._opener = opener
        self._opening = asyncio.Lock()
        self._compiler: GrammarCompiler | None = None

    async def matcher(self, state: RequestState) -> GrammarMatcher:
        """Begin a choice where its answer stands.

        Raises:
            InvalidRequest: Its grammar has a mistake, or allows nothing.
            Overloaded: It takes too long to compile, its answer so far too long to follow, or too
                many wait for that.
        """
        grammar = state.sampling.grammar
        assert grammar is not None, "a choice without a grammar needs no guide"
        asked = GrammarSource(grammar.kind, grammar.text)
        self._metrics.requested.inc()
        compiled = self._kept.get(asked)
        if compiled is not None:
            self._metrics.hits.inc()
        else:
            compiled = await asyncio.shield(self._compile(asked, state.tenant))
        if isinstance(compiled, ErrorReply):
            raise decode_error(compiled)
        begin = functools.partial(_begin, compiled, state, self._vocab_size)
        timeout_s = self._config.follow_timeout_s
        try:
            return await self._beginnings.run(begin, timeout_s, state.tenant)
        except TimeoutError:
            self._metrics.timeouts.inc()
            message = f"grammar: the answer takes longer than {timeout_s:g} s to follow"
            raise Overloaded(message, retry_after_s=PAUSE_S) from None

    def close(self) -> None:
        """Begin no more choices. Compiles that run are left to end with the process."""
        self._executor.shutdown(wait=False)

    def _compile(
        self, asked: GrammarSource, tenant: TenantId
    ) -> asyncio.Task[CompiledGrammar | ErrorReply]:
        # For each tenant by itself: none waits for the turn of another one that asked the same.
        name = (tenant, asked)
        if name not in self._compiling:
            fill = self._fill(asked, tenant)
            self._compiling[name] = self._group.create_task(fill, name="grammar")
        return self._compiling[name]

    async def _fill(self, asked: GrammarSource, tenant: TenantId) -> CompiledGrammar | ErrorReply:
        """Compile a grammar, or find out why not, and keep either."""
        timeout_s = self._config.compile_timeout_s
        try:
            self._late.check(asked)
            compiler = await self._opened()
            job = functools.partial(
                _check_and_compile,
                compiler,
                asked,
                self._whitespace_max,
                self._config.properties_max,
            )
            made, seconds = await self._threads.run(job, timeout_s, tenant)
            self._metrics.seconds.observe(seconds)
        except TimeoutError:
            self._metrics.timeouts.inc()
            return encode_error(self._late.record_timeout(asked, timeout_s))
        except InvalidRequest as error:
            made = encode_error(error)
        except Overloaded as error:
            return encode_error(error)  # true at this moment only
        except Exception:
            # One of the process's outermost borders: whatever a compiler raises ends the requests
            # of this grammar, and not the service.
            log.exception("grammar not compiled", extra={"kind": asked.kind})
            return encode_error(Internal("the grammar of this request could not be compiled"))
        finally:
            del self._compiling[tenant, asked]
        self._kept.put(asked, made)
        return made

    async def _opened(self) -> GrammarCompiler:
        async with self._opening:
            if (compiler := self._compiler) is None:
                loop = asyncio.get_running_loop()
                compiler = await loop.run_in_executor(self._executor, self._opener)
                self._compiler = compiler
        return compiler


def _check_and_compile(
    compiler: GrammarCompiler, asked: GrammarSource, whitespace_max: int, properties_max: int
) -> tuple[CompiledGrammar, float]:
    """In a compile thread, and under its deadline: looking a schema over takes its time, too.

    Returns:
        The grammar, and how many seconds it took.
    """
    began = time.perf_counter()
    made = compiler.compile(source_of(asked, whitespace_max, properties_max))
    return made, time.perf_counter() - began


def _begin(compiled: CompiledGrammar, state: RequestState, vocab_size: int) -> GrammarMatcher:
    """Follow the answer so far, which another worker may have begun."""
    sampling = state.sampling
    assert sampling.grammar is not None, "a choice without a grammar needs no guide"
    place = compiled.start(sampling.stop_token_ids)
    if sampling.grammar.begins_after:
        place = DeferredGrammarState(place, sampling.grammar.begins_after)
    for token in np.frombuffer(state.output_ids, WIRE_IDS).tolist():
        if not place.accept(token):
            raise Internal("the answer so far is not of its grammar")
    return GrammarMatcher(place, vocab_size, compiled.eos_ids(sampling.stop_token_ids))


def _size_bytes(source: GrammarSource, made: CompiledGrammar | ErrorReply) -> int:
    return len(source.text) + (0 if isinstance(made, ErrorReply) else made.size_bytes)
