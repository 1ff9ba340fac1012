"""A worker whose requests have grammars, on a bus, with a runner that needs no model."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.simulation.test_guided_choices import MaskedRunner
from tests.support.wait import until
from tests.unit.model_worker.grammar.words import Compiler
from tests.unit.model_worker.test_service import Stage, abort, admit, open_hash_engine, staged

from antiphon.wire.base import FinishReason
from antiphon.wire.sampling import Grammar, GrammarKind

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from antiphon.config.settings import Settings
    from antiphon.model_worker.startup.engine import Engine
    from antiphon.wire.command import Admit


def guided(name: str, text: str) -> Admit:
    plain = admit(name, 50)
    grammar = Grammar(kind=GrammarKind.REGEX, text=text)
    sampling = msgspec.structs.replace(plain.sampling, grammar=grammar)
    return msgspec.structs.replace(plain, sampling=sampling)


@pytest.fixture
def compiler() -> Compiler:
    return Compiler()


@pytest.fixture
async def stage(compiler: Compiler) -> AsyncGenerator[Stage]:
    def open_guided(settings: Settings) -> Engine:
        engine = open_hash_engine(settings)
        runner = MaskedRunner(engine.core.pools.groups, engine.core.limits.vocab_size)
        return dataclasses.replace(engine, runner=runner, open_compiler=lambda: compiler)

    async with staged(open_guided) as stage:
        yield stage
        compiler.released.set()


async def test_a_guided_request_writes_the_text_of_its_grammar_and_stops(stage: Stage) -> None:
    await stage.finish(guided("a", "cab"))
    assert stage.ids("a") == [5, 3, 4]
    assert (stage.rows[-1].finish_reason, stage.rows[-1].matched_stop) == (FinishReason.STOP, 2)


async def test_others_go_on_while_a_grammar_is_compiled(stage: Stage, compiler: Compiler) -> None:
    await stage.command(guided("slow", "slow"))
    assert await asyncio.to_thread(compiler.begun.wait, 5)
    await stage.finish(admit("b"))
    assert not stage.ids("slow")
    await stage.load_is(1)
    assert stage.load.step_age_s == 0.0, "waiting for a grammar passes for a stall"
    compiler.released.set()
    await until(lambda: stage.ended("slow"))
    assert len(stage.ids("slow")) == 4


async def test_a_bad_grammar_ends_its_request_with_the_reason(stage: Stage) -> None:
    await stage.command(guided("a", "bad"), admit("b"))
    await until(lambda: stage.ended("a") and stage.ended("b"))
    (end,) = [row for row in stage.rows if row.request_id == "a"]
    assert end.error is not None
    assert (end.error.code, end.error.message) == ("invalid_request", "grammar: bad")


async def test_an_abort_reaches_a_request_that_waits_for_its_grammar(
    stage: Stage, compiler: Compiler
) -> None:
    await stage.command(guided("slow", "slow"))
    assert await asyncio.to_thread(compiler.begun.wait, 5)
    await stage.command(abort("slow"))
    await stage.load_is(0)
    compiler.released.set()
    await stage.finish(guided("a", "slow"))
    assert not stage.ids("slow")
