"""Grammars are compiled beside everything else: once, in time, and nobody waits for others'."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from tests.support.wait import until
from tests.support.worker import admit, state
from tests.unit.model_worker.grammar.words import VOCAB_SIZE, Compiler

from antiphon import embedded
from antiphon.config.settings import Settings
from antiphon.config.worker import GrammarConfig
from antiphon.model_card.card import read_card
from antiphon.model_card.vocabulary import read_vocabulary
from antiphon.model_worker.batching.state import ChoiceKey, RequestState
from antiphon.model_worker.grammar.backend import (
    WAITING_MAX,
    GrammarBackend,
    GrammarMetrics,
    GrammarQueue,
    no_compiler,
    open_compiler,
)
from antiphon.model_worker.grammar.matcher import GrammarMatcher
from antiphon.model_worker.grammar.source import GrammarSource
from antiphon.model_worker.protocol.held_request import HeldRequest
from antiphon.model_worker.protocol.worker_output import RunChoice
from antiphon.resolve.device import HostDevice
from antiphon.resolve.resolved_config import resolve
from antiphon.service.tenant_slots import TenantSlots
from antiphon.telemetry.metrics import Metrics
from antiphon.wire.codec import pack_ids
from antiphon.wire.errors import EngineError, Internal, InvalidRequest, Overloaded, Unsupported
from antiphon.wire.ids import DEFAULT_TENANT, TenantId
from antiphon.wire.sampling import Grammar, GrammarKind, SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

ACME, GLOBEX, INITECH = TenantId("acme"), TenantId("globex"), TenantId("initech")


class Bench:
    """Grammars over a compiler that does as it is told."""

    def __init__(self, group: asyncio.TaskGroup, **settings: object) -> None:
        self.group = group
        self.compiler = Compiler()
        self.opened = 0
        self.now = 0.0
        config = msgspec.convert(settings, GrammarConfig)
        self.registry = Metrics()
        self.metrics = GrammarMetrics(self.registry)
        self.grammars = GrammarBackend(
            config, VOCAB_SIZE, self.open, group, self.metrics, clock=lambda: self.now
        )

    def counted(self, name: str) -> float:
        return self.registry.registry.get_sample_value(f"antiphon_{name}") or 0.0

    def open(self) -> Compiler:
        self.opened += 1
        return self.compiler

    async def guide(self, text: str, tenant: TenantId = DEFAULT_TENANT) -> GrammarMatcher:
        return await self.grammars.matcher(msgspec.structs.replace(state_of(text), tenant=tenant))

    def ask(self, text: str, tenant: TenantId = DEFAULT_TENANT) -> asyncio.Task[GrammarMatcher]:
        return self.group.create_task(self.guide(text, tenant))

    async def until_begun(self) -> None:
        assert await asyncio.to_thread(self.compiler.begun.wait, 10)


def state_of(text: str, *output_ids: int, after: tuple[int, ...] = ()) -> RequestState:
    grammar = Grammar(kind=GrammarKind.REGEX, text=text, begins_after=after)
    return state(output_ids=pack_ids(output_ids), grammar=grammar)


@contextlib.asynccontextmanager
async def benched(**settings: object) -> AsyncGenerator[Bench]:
    async with asyncio.TaskGroup() as group:
        bench = Bench(group, **settings)
        try:
            yield bench
        finally:
            bench.compiler.released.set()
            bench.grammars.close()


def first(guide: GrammarMatcher) -> int:
    assert guide.masks[0] is not None
    (token,) = np.flatnonzero(np.unpackbits(guide.masks[0].view(np.uint8), bitorder="little"))
    return int(token)


async def test_a_grammar_is_compiled_once_however_many_choices_ask_at_once() -> None:
    async with benched() as bench:
        guides = await asyncio.gather(*(bench.guide("cab") for _ in range(20)))
        assert [first(guide) for guide in guides] == [5] * 20
        assert guides[0].accept_token(5) is None
        assert (first(guides[0]), first(guides[1])) == (3, 5), "two choices share a state"
        await bench.guide("cab")
        assert bench.compiler.compiled == {"cab": 1}
        assert bench.opened == 1


async def test_grammars_are_counted_with_hits_and_the_time_of_each_compile() -> None:
    async with benched() as bench:
        for text in ("cab", "cab", "a"):
            await bench.guide(text)
        for _ in range(2):
            with pytest.raises(InvalidRequest):
                await bench.guide("bad")
        assert bench.counted("num_grammar_total") == 5
        assert bench.counted("num_grammar_cache_hit_total") == 2
        assert bench.counted("grammar_compilation_time_seconds_count") == 2
        assert bench.counted("num_grammar_timeout_total") == 0


async def test_a_compile_that_takes_too_long_is_counted_as_a_timeout() -> None:
    async with benched(compile_timeout_s=0.05) as bench:
        with pytest.raises(EngineError):
            await bench.guide("slow")
        assert bench.counted("num_grammar_timeout_total") == 1
        assert bench.counted("grammar_compilation_time_seconds_count") == 0


class Queue(GrammarQueue):
    """Choices with these grammars, which wait for them; those handed over and those refused."""

    def __init__(self, bench: Bench, group: asyncio.TaskGroup, *texts: str) -> None:
        self.handed: list[ChoiceKey] = []
        self.refused: dict[ChoiceKey, EngineError] = {}
        super().__init__(
            bench.grammars,
            group,
            hand_over=lambda run, _: self.handed.append(run.key),
            refuse=self.refused.__setitem__,
        )
        for number, text in enumerate(texts):
            key = ChoiceKey(number)
            (choice,) = HeldRequest(admit(), [key], now_ms=0, due_ms=0).choices
            self.put(RunChoice(key, state_of(text), None, choice))


async def test_choices_that_get_no_matcher_are_counted_as_aborted() -> None:
    async with benched() as bench, asyncio.TaskGroup() as group:
        queue = Queue(bench, group, "slow", "bad", "a")
        await bench.until_begun()
        assert queue.drop(ChoiceKey(0))
        assert not queue.drop(ChoiceKey(0))
        bench.compiler.released.set()
        await until(lambda: len(queue) == 0)
        assert bench.counted("num_grammar_aborted_total") == 2


async def test_nothing_is_opened_before_it_is_needed() -> None:
    async with benched() as bench:
        assert bench.opened == 0
        with pytest.raises(InvalidRequest, match="empty"):
            await bench.guide("")
        assert bench.opened == 1
        await bench.guide("a")
        assert bench.opened == 1


async def test_a_failure_is_kept_too() -> None:
    async with benched() as bench:
        for _ in range(3):
            with pytest.raises(InvalidRequest, match="grammar: bad") as caught:
                await bench.guide("bad")
            assert caught.value.param == "grammar"
        assert bench.compiler.compiled == {"bad": 1}


async def test_a_bug_of_the_compiler_ends_its_requests_only(caplog) -> None:
    async with benched() as bench:
        for _ in range(2):
            with pytest.raises(Internal):
                await bench.guide("bug")
        assert "ZeroDivisionError" in caplog.text
        assert first(await bench.guide("a")) == 3


async def test_a_grammar_does_not_wait_for_another() -> None:
    async with benched(workers=2) as bench:
        slow = bench.ask("slow")
        await bench.until_begun()
        assert first(await bench.guide("a")) == 3
        assert not slow.done()
        bench.compiler.released.set()
        assert first(await slow) == 21


async def test_a_known_grammar_waits_for_no_compile() -> None:
    async with benched(workers=1) as bench:
        await bench.guide("a")
        slow = bench.ask("slow")
        await bench.until_begun()
        assert first(await bench.guide("a")) == 3
        bench.compiler.released.set()
        await slow


async def test_the_first_request_of_a_grammar_may_be_cancelled() -> None:
    async with benched() as bench:
        leaver = bench.ask("slow")
        await bench.until_begun()
        stayer = bench.ask("slow")
        await asyncio.sleep(0)
        leaver.cancel()
        bench.compiler.released.set()
        assert first(await stayer) == 21
        assert bench.compiler.compiled == {"slow": 1}


async def test_a_grammar_that_takes_too_long_is_refused_for_a_while() -> None:
    async with benched(workers=1, compile_timeout_s=0.05) as bench:
        with pytest.raises(Overloaded, match=r"longer than 0\.05 s to compile") as caught:
            await bench.guide("slow")
        assert caught.value.retry_after_s == 30
        bench.now += 20
        with pytest.raises(Overloaded, match="took too long") as caught:
            await bench.guide("slow")
        assert caught.value.retry_after_s == 10
        assert bench.compiler.compiled == {"slow": 1}
        assert first(await bench.guide("a")) == 3, "it has given up its place"


async def test_what_was_late_once_may_not_be_the_next_time() -> None:
    async with benched(workers=1, compile_timeout_s=0.05) as bench:
        with pytest.raises(Overloaded):
            await bench.guide("slow")
        bench.compiler.released.set()
        bench.now += 31
        assert first(await bench.guide("slow")) == 21
        assert first(await bench.guide("slow")) == 21
        assert bench.compiler.compiled == {"slow": 2}


async def test_a_monster_is_compiled_ever_more_seldom() -> None:
    async with benched(workers=1, compile_timeout_s=0.02) as bench:
        waits: list[float] = []
        for tenant in (ACME, GLOBEX) * 2:
            with pytest.raises(Overloaded) as caught:
                await bench.guide("slow", tenant)
            assert caught.value.retry_after_s is not None
            waits.append(caught.value.retry_after_s)
            bench.now += waits[-1]
        assert waits == [30, 60, 120, 240]
        assert bench.compiler.compiled == {"slow": 4}


async def test_too_many_that_take_too_long_refuse_more_until_they_are_done() -> None:
    async with benched(compile_timeout_s=0.02) as bench:
        for number, tenant in enumerate((ACME, ACME, GLOBEX, GLOBEX)):
            with pytest.raises(Overloaded, match="longer than"):
                await bench.guide(f"slow{'a' * number}", tenant)
        with pytest.raises(Overloaded):
            await bench.guide("b", INITECH)
        bench.compiler.released.set()
        async with asyncio.timeout(10):
            while True:
                with contextlib.suppress(Overloaded):
                    assert first(await bench.guide("b")) == 4
                    return


async def test_grammars_of_one_tenant_that_take_too_long_refuse_only_its_own() -> None:
    async with benched(compile_timeout_s=0.02) as bench:
        for number in range(2):
            with pytest.raises(Overloaded, match="longer than"):
                await bench.guide(f"slow{'a' * number}", ACME)
        with pytest.raises(Overloaded, match="too many"):
            await bench.guide("b", ACME)
        assert first(await bench.guide("b", GLOBEX)) == 4


async def test_small_grammar_of_a_tenant_waits_for_no_large_ones_of_another() -> None:
    async with benched(workers=1) as bench:
        large = [bench.ask(f"slow{'a' * number}", ACME) for number in range(8)]
        await bench.until_begun()
        assert first(await bench.guide("b", GLOBEX)) == 4
        assert bench.compiler.compiled == {"slow": 1, "b": 1}
        bench.compiler.released.set()
        await asyncio.gather(*large)


async def test_tenants_take_turns_in_having_their_grammars_compiled() -> None:
    places, order = TenantSlots(1), list[str]()
    events = [asyncio.Event() for _ in range(2)]

    async def work(tenant: TenantId, name: str, until: asyncio.Event | None = None) -> None:
        await places.acquire(tenant)
        order.append(name)
        if until is not None:
            await until.wait()
        places.release(tenant)

    async with asyncio.TaskGroup() as group:
        for tenant, event in zip((ACME, GLOBEX), events, strict=True):
            group.create_task(work(tenant, f"{tenant} 0", event))
        await until(lambda: len(order) == 2)
        for number in (1, 2, 3):
            group.create_task(work(ACME, f"acme {number}"))
        group.create_task(work(INITECH, "initech 1"))
        left = group.create_task(work(INITECH, "initech 2"))
        group.create_task(work(INITECH, "initech 3"))
        group.create_task(work(GLOBEX, "globex 1"))
        await asyncio.sleep(0)
        left.cancel()
        assert len(order) == 2, "one place, and one for a tenant that has none"
        for event in events:
            event.set()
    assert order[2:] == [
        "acme 1", "initech 1", "globex 1", "acme 2", "initech 3", "acme 3",
    ]  # fmt: skip
    assert not places._running
    assert not places._waiting


async def test_tenant_may_have_only_so_many_grammars_waiting() -> None:
    async with benched(workers=1) as bench:
        asked = [bench.ask(f"slow{'a' * number}", ACME) for number in range(WAITING_MAX + 1)]
        await bench.until_begun()
        with pytest.raises(Overloaded, match="wait to be compiled"):
            await bench.guide("b", ACME)
        assert first(await bench.guide("b", GLOBEX)) == 4
        bench.compiler.released.set()
        await asyncio.gather(*asked)


async def test_schema_with_too_many_properties_is_refused_before_it_is_compiled() -> None:
    async with benched(properties_max=20) as bench:
        inner = {"type": "object", "properties": {f"p{number}": True for number in range(10)}}
        for count, refused in ((9, False), (10, True)):
            outer = {f"o{number}": inner for number in range(count // 9)}
            outer |= {f"x{number}": {"type": "string"} for number in range(count)}
            text = msgspec.json.encode({"type": "object", "properties": outer}).decode()
            grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, text=text)
            sampling = SamplingParams(max_new_tokens=9, grammar=grammar)
            state = msgspec.structs.replace(state_of("a"), sampling=sampling)
            if refused:
                with pytest.raises(InvalidRequest, match="21 properties, more than 20"):
                    await bench.grammars.matcher(state)
                assert sum(bench.compiler.compiled.values()) == 1
            else:
                with contextlib.suppress(Exception):
                    await bench.grammars.matcher(state)
                assert sum(bench.compiler.compiled.values()) == 1


async def test_a_grammar_that_finds_no_place_may_come_again() -> None:
    async with benched(workers=1, compile_timeout_s=0.2) as bench:
        asked = (bench.guide(text) for text in ("slow", "a", "b"))
        slow, *others = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(slow, Overloaded)
        # Which of them the place went to when the slow one gave it up is a matter of chance.
        assert all(isinstance(other, GrammarMatcher | Overloaded) for other in others)
        assert first(await bench.guide("a")) == 3


async def test_grammars_are_forgotten_by_number_and_by_size() -> None:
    async with benched(cache_entries=2) as bench:
        for text in ("a", "b", "a", "c", "a", "b"):
            await bench.guide(text)
        assert bench.compiler.compiled == {"a": 1, "b": 2, "c": 1}
    async with benched(cache_bytes=5000) as bench:
        for text in ("aaa", "b", "aaa", "cc", "b"):
            await bench.guide(text)
        assert bench.compiler.compiled == {"aaa": 1, "b": 2, "cc": 1}


async def test_a_choice_begins_where_its_answer_stands() -> None:
    async with benched() as bench:
        assert first(await bench.grammars.matcher(state_of("cab", 5, 3))) == 4
        with pytest.raises(Internal, match="not of its grammar"):
            await bench.grammars.matcher(state_of("cab", 5, 5))
        deferred = await bench.grammars.matcher(state_of("cab", 30, 31, after=(31, 32)))
        assert deferred.masks[0] is None
        assert deferred.accept_token(32) is None
        assert first(deferred) == 5


async def test_choices_wait_in_a_queue_until_their_grammars_are_there() -> None:
    async with benched(workers=2) as bench, asyncio.TaskGroup() as group:
        queue = Queue(bench, group, "slow", "a", "bad", "slow")
        await until(lambda: len(queue) == 2)
        assert (queue.handed, list(queue.refused)) == ([1], [2])
        assert queue.drop(ChoiceKey(0))
        assert not queue.drop(ChoiceKey(1))
        bench.compiler.released.set()
        await until(lambda: not len(queue))
        assert queue.handed == [1, 3]


CARD = read_card(embedded.path())
DEVICE = msgspec.convert(
    {"kind": "cpu", "cores": 2, "memory_bytes": 2**34}, HostDevice, from_attributes=True
)


def test_grammars_need_a_token_that_ends_an_answer() -> None:
    endless = msgspec.structs.replace(CARD, eos_ids=())
    decided = resolve(Settings(), endless, DEVICE).grammar
    assert (decided.value, decided.reason) == (
        "none",
        "the model has no end-of-sequence token",
    )
    assert resolve(Settings(), CARD, DEVICE).grammar.value == "xgrammar"


def test_grammars_can_be_switched_off() -> None:
    off = Settings(grammar=GrammarConfig(backend="none"))
    decided = resolve(off, CARD, DEVICE).grammar
    assert (decided.value, decided.reason) == ("none", "grammar.backend")
    with pytest.raises(Unsupported, match=r"has no grammars: grammar\.backend"):
        no_compiler(decided.reason)


def test_a_folder_with_a_tokenizer_has_a_compiler() -> None:
    compiler = open_compiler(
        embedded.path(), CARD.vocabulary_size, frozenset(CARD.eos_ids), GrammarConfig()
    )
    made = compiler.compile(GrammarSource(GrammarKind.REGEX, "a"))
    assert made.size_bytes > 0
    assert made.start(()).accept(read_vocabulary(embedded.path(), 1024).tokens.index(b"a"))
