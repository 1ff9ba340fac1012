"""External corpora of a worker: added in parts by control calls, drafted from, removed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.wait import until
from tests.unit.model_worker.test_service import HeldRunner, admit, open_hash_engine, staged

from antiphon.config.settings import Settings
from antiphon.config.speculation import SpeculationConfig
from antiphon.model_worker.batching.engine_core import EngineCore
from antiphon.model_worker.batching.plan import PlanRunner
from antiphon.model_worker.speculation.ngram import NgramDrafter
from antiphon.model_worker.speculation.policy import Speculation
from antiphon.model_worker.speculation.request_texts import RequestTexts
from antiphon.model_worker.startup.engine import Engine
from antiphon.wire.codec import pack_ids
from antiphon.wire.command import CORPORA_MAX, AddCorpus, ListCorpora, RemoveCorpus
from antiphon.wire.errors import InvalidRequest, Overloaded, Unsupported
from antiphon.wire.ids import RequestId

if TYPE_CHECKING:
    from collections.abc import Iterable

    from antiphon.model_worker.control import ControlMessage

Opener = Callable[[Settings], Engine]
Runner = Callable[[PlanRunner], PlanRunner]

CORPORA = SpeculationConfig(algorithm="ngram", corpus_draft_tokens=4, corpus_tokens_max=40)


def drafting(ngrams: NgramDrafter, runner: Runner = lambda runner: runner) -> Opener:
    """Open an engine that drafts tokens."""

    def opener(settings: Settings) -> Engine:
        engine = open_hash_engine(settings)
        limits = engine.core.limits
        core = EngineCore(
            limits,
            engine.core.pools,
            speculation=Speculation(RequestTexts(ngrams), 7, limits.running_max),
        )
        return Engine(core, runner(engine.runner))

    return opener


def part_of(corpus: str, *documents: Iterable[int], **fields: Any) -> AddCorpus:
    whole: dict[str, Any] = {"corpus_id": corpus, "upload": RequestId(corpus)}
    return AddCorpus(**whole | fields, documents=tuple(map(pack_ids, documents)))


async def test_drafts_continue_a_corpus_until_it_is_removed() -> None:
    drafter = NgramDrafter(CORPORA)
    async with staged(drafting(drafter)) as stage:
        parts = part_of("code", [1, 2, 3], last=False), part_of("code", range(20, 30), part=1)
        assert (await stage.control(parts[0])).corpora == {}
        assert drafter.propose(b"", pack_ids([2]), 8) == []
        assert (await stage.control(parts[1])).corpora == {"code": 13}
        assert drafter.propose(b"", pack_ids([2]), 8) == [3]
        assert drafter.propose(b"tenant", pack_ids([20]), 8) == [21, 22, 23, 24]
        assert (await stage.control(ListCorpora())).corpora == {"code": 13}
        for _ in range(2):  # without effect the second time
            assert (await stage.control(RemoveCorpus(corpus_id="code"))).corpora == {}
        assert drafter.propose(b"", pack_ids([2]), 8) == []


async def test_corpus_is_added_while_a_step_runs() -> None:
    held = HeldRunner()
    async with staged(drafting(NgramDrafter(CORPORA), held.around)) as stage:
        held.go.clear()
        await stage.command(admit("a"))
        await until(lambda: stage.metric("held_reqs") == 1.0)
        assert (await stage.control(part_of("code", [1, 2, 3]))).corpora == {"code": 3}
        held.go.set()
        await until(lambda: stage.ended("a"))


async def test_corpus_that_does_not_fit_is_refused_at_the_first_part_beyond_the_limit() -> None:
    async with staged(drafting(NgramDrafter(CORPORA))) as stage:
        await stage.control(part_of("code", range(10)))
        with pytest.raises(InvalidRequest, match="'code' already exists; remove it first"):
            await stage.control(part_of("code", [1]))
        await stage.control(part_of("prose", range(20), last=False))
        with pytest.raises(InvalidRequest, match=r"more than 40 tokens .*corpus_tokens_max"):
            await stage.control(part_of("prose", range(20), part=1, last=False))
        with pytest.raises(Overloaded):  # what came before is discarded
            await stage.control(part_of("prose", [1], part=2))
        assert (await stage.control(part_of("prose", range(30)))).corpora["prose"] == 30


async def test_parts_of_two_uploads_are_not_mixed() -> None:
    async with staged(drafting(NgramDrafter(CORPORA))) as stage:
        await stage.control(part_of("one", [1], last=False))
        await stage.control(part_of("two", [2], last=False))
        with pytest.raises(Overloaded, match="another corpus is being added"):
            await stage.control(part_of("one", [3], part=1))
        await stage.control(part_of("two", [2], last=False))
        with pytest.raises(Overloaded):
            await stage.control(part_of("two", [3], part=2))
        assert (await stage.control(ListCorpora())).corpora == {}


@pytest.mark.parametrize(
    ("opener", "setting"),
    [
        (open_hash_engine, "speculation.algorithm is none"),
        (drafting(NgramDrafter(SpeculationConfig(algorithm="ngram"))), "corpus_draft_tokens is 0"),
    ],
)
@pytest.mark.parametrize(
    "command", [part_of("code", [1]), RemoveCorpus(corpus_id="code"), ListCorpora()]
)
async def test_disabled_corpora_name_the_setting(
    opener: Opener, setting: str, command: ControlMessage
) -> None:
    async with staged(opener) as stage:
        with pytest.raises(Unsupported, match=setting):
            await stage.control(command)


async def test_number_of_corpora_is_limited() -> None:
    drafter = NgramDrafter(SpeculationConfig(algorithm="ngram", corpus_draft_tokens=4))
    for number in range(CORPORA_MAX):
        drafter.add_corpus(str(number), [pack_ids([number])])
    async with staged(drafting(drafter)) as stage:
        with pytest.raises(InvalidRequest, match=f"there are {CORPORA_MAX} corpora, the limit"):
            await stage.control(part_of("code", [1]))
        await stage.control(RemoveCorpus(corpus_id="0"))
        assert len((await stage.control(part_of("code", [1]))).corpora) == CORPORA_MAX
