"""Drafts of a draft model change nothing, whatever the draft model is."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from tests.kernels.rows import ISAS
from tests.models.draft_models import DRAFT_MODELS, open_draft, stubborn, with_draft, with_noise
from tests.models.model_loop import ModelLoop, Output
from tests.models.test_grammars import SETTINGS, Worker
from tests.models.test_speculation import (
    EVERY,
    MODELS,
    MODES,
    ROUNDING,
    Bench,
    Mode,
    compare,
    guided_states,
    open_any,
)
from tests.models.tiny import VOCABULARY, write_llama
from tests.support.models import load, open_model
from tests.support.worker import state

from antiphon import embedded
from antiphon.config.speculation import SpeculationConfig
from antiphon.model_worker.batching.flights import ForwardThread, InTurn
from antiphon.model_worker.observability.flight_recorder import StepRecord
from antiphon.model_worker.observability.replay import replay
from antiphon.model_worker.runner.draft_model import NO_DRAFT, DraftModel
from antiphon.model_worker.startup.engine import open_engine
from antiphon.model_worker.startup.warm_up import warm_up
from antiphon.wire.codec import pack_ids
from antiphon.wire.ids import RequestId
from antiphon.wire.sampling import LogitBias
from antiphon.wire.token_outputs import pack_floats

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from antiphon.model_worker.batching.plan import Ints, StepOutcome, StepPlan
    from antiphon.model_worker.batching.state import RequestState


def check(
    bench: Bench,
    states: Sequence[RequestState],
    mode: Mode,
    wanted: Sequence[Output],
    rounding: float = ROUNDING,
) -> float:
    """Run with the draft model, and compare with a run without; the share of right drafts."""
    for request, one, expected in zip(states, bench.run(states, mode), wanted, strict=True):
        try:
            compare(one, expected, rounding)
        except AssertionError as error:
            raise AssertionError(f"{request.request_id}: {error}") from error
    counts = bench.counts
    assert counts.rows >= 20
    return counts.accepted / counts.proposed


@pytest.fixture(scope="module")
def drafted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Bench, str]:
    opened = open_any(write_llama(tmp_path_factory.mktemp("model")), pages=4096)
    draft = open_draft(DRAFT_MODELS[request.param](tmp_path_factory.mktemp("draft")))
    return Bench(with_draft(opened, draft)), request.param


@pytest.fixture(scope="module")
def wanted(llama: Path) -> list[Output]:
    """What is said without drafts."""
    return Bench(open_any(llama, pages=4096)).run(EVERY, MODES["all at once"])


OFTEN = {
    "the model itself": ("all at once", "three ahead"),
    "with noise": ("all at once", "retracted and cached", "overlapped", "three ahead", "held back"),
    "another": ("overlapped",),
}
"""Draft models and modes that are run often; "few slots and pages" has a test of its own."""


@pytest.mark.parametrize(
    ("drafted", "mode"),
    [
        pytest.param(
            kind,
            mode,
            id=f"{kind}-{name}",
            marks=() if name in OFTEN[kind] else pytest.mark.long,
        )
        for kind, (name, mode) in product(DRAFT_MODELS, MODES.items())
    ],
    indirect=["drafted"],
)
def test_drafts_of_a_model_change_nothing(
    drafted: tuple[Bench, str], wanted: list[Output], mode: Mode
) -> None:
    bench, kind = drafted
    right = check(bench, EVERY, mode, wanted)
    # Most requests are sampled at random, biased or penalised, and the drafts are not.
    assert right < 0.05 if kind == "another" else 0.02 < right < 0.5


def test_the_model_itself_is_right_about_all_that_is_greedy(llama: Path) -> None:
    states = [state(30, temperature=0.0, max_new_tokens=101)]
    plain = Bench(open_any(llama, pages=4096)).run(states, MODES["all at once"])
    for mode, steps in (("all at once", 20), ("overlapped", 20)):
        bench = Bench(with_draft(open_any(llama, pages=4096), open_draft(llama)))
        assert check(bench, states, MODES[mode], plain) == 1.0
        assert bench.decode_steps == steps


OFTEN_FIRST = {
    "temperature": 0.9,
    "logit_bias": LogitBias(token_ids=pack_ids([0]), values=pack_floats([6.0])),
}


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("all at once", marks=pytest.mark.long),
        pytest.param("overlapped", marks=pytest.mark.long),
        "in chunks",
        "three ahead",
    ],
)
@pytest.mark.parametrize("name", MODELS)
def test_drafts_of_a_model_change_nothing_whichever_way_a_model_caches(
    name: str, mode: str, tmp_path: Path
) -> None:
    opened = MODELS[name](tmp_path / "model", pages=4096, states=512)
    dice = np.random.default_rng(5)
    states = [
        state(
            dice.integers(0, VOCABULARY, 9 + number).tolist(),
            request_id=RequestId(str(number)),
            seed=number,
            max_new_tokens=40,
            **OFTEN_FIRST,
        )
        for number in range(9)
    ]
    plain = Bench(opened).run(states, MODES["all at once"])
    bench = Bench(with_draft(opened, open_draft(stubborn(tmp_path / "draft"))))
    assert 0.05 < check(bench, states, MODES[mode], plain) < 0.95


@pytest.mark.parametrize("name", ["llama", "falcon-h1"])
def test_what_was_run_ahead_with_a_draft_model_is_replayed_without_it(
    name: str, tmp_path: Path
) -> None:
    opened = MODELS[name](tmp_path / "model", pages=4096, states=512)
    bench = Bench(with_draft(opened, open_draft(stubborn(tmp_path / "draft"))))
    bench.run(EVERY, MODES["three ahead"])
    assert bench.loop is not None
    records = list(bench.loop.loop.recorder.records())
    parts = [record.plan.part for record in records]
    assert sum(part is not None and part.changes_logits for part in parts) > len(parts) // 2
    # The last ones had not ended, and one of them was still to get its sampling part.
    last = records[-1]
    unknown = msgspec.structs.replace(last.plan, step=last.plan.step + 1, part=None)
    records.append(StepRecord(unknown))
    again = MODELS[name](tmp_path / "again", pages=4096, states=512)
    result = replay(records, bench.opened.groups, again.runner)
    assert (result.difference, result.passed, result.unended) == (None, 0, 1)


@pytest.mark.skipif(not ISAS, reason="the CPU's own kernels are not built")
@pytest.mark.parametrize("mode", ["in chunks", "few slots and pages", "overlapped"])
def test_in_deterministic_mode_drafts_of_a_model_change_no_bit(
    llama: Path, mode: str, tmp_path: Path
) -> None:
    opened = open_model(
        llama, page_tokens=4, pages=1024, dtype="bfloat16", linear="packed", deterministic=True
    )
    plain = Bench(opened).run(EVERY, MODES["all at once"])
    draft = open_draft(with_noise(tmp_path), pages=1024, dtype="bfloat16", linear="packed")
    check(Bench(with_draft(opened, draft)), EVERY, MODES[mode], plain, rounding=0.0)


def test_few_pages_leave_no_trace(llama: Path, wanted: list[Output], tmp_path: Path) -> None:
    """Drafts take no page from whoever needs one, and give theirs back."""
    draft = open_draft(with_noise(tmp_path), pages=48)
    bench = Bench(with_draft(open_any(llama, pages=48), draft))
    for mode in ("few slots and pages", "three ahead"):
        check(bench, EVERY, MODES[mode], wanted)
        assert bench.loop is not None
        assert bench.loop.reports[-1].totals.retractions > 0


def test_a_draft_model_that_fails_costs_only_time(
    llama: Path, wanted: list[Output], caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(DraftModel):
        def draft(self, *_: Any, **__: Any) -> Ints:
            raise RuntimeError("out of memory, on purpose")

    broken = Broken(load(llama, dtype="float32"), page_tokens=4, pages=4096)
    bench = Bench(with_draft(open_any(llama, pages=4096), broken), drafting_fails=True)
    assert check(bench, EVERY, MODES["overlapped"], wanted) < 0.1
    assert "drafting failed" in caplog.text


@pytest.mark.parametrize("name", ["llama", "falcon-h1"])
def test_plans_that_fail_leave_later_ones_to_read_and_write_what_is_theirs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two in a row: the third may follow one that has never ended, in a slot of another request."""
    opened = MODELS[name](tmp_path / "model", pages=4096, states=512)
    states = [
        state([*range(20), number], seed=number, max_new_tokens=9 + number % 5, **OFTEN_FIRST)
        for number in range(40)
    ]
    plain = Bench(opened).run(states, MODES["all at once"])
    opened = with_draft(opened, open_draft(stubborn(tmp_path / "draft")))
    runner, compute, raised = opened.runner, opened.runner._compute, [0]

    def fail_some(plan: StepPlan, *others: Any) -> StepOutcome:
        if plan.step % 7 < 2 and len(plan.slot) > 1:
            raised[0] += 1
            raise RuntimeError("on purpose")
        return compute(plan, *others)

    monkeypatch.setattr(runner, "_compute", fail_some)
    runner._step = None
    loop = ModelLoop(opened, tree=True, overlap=True, ahead=3, running_max=6, queue_max=100)
    outputs = loop.run(states, one_a_turn=True)
    assert [one.ids for one in outputs] == [other.ids for other in plain]
    assert loop.reports[-1].failures == raised[0] > 10


def test_where_a_draft_model_has_no_draft_the_host_knows_what_is_verified(
    llama: Path, wanted: list[Output], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask is made along the drafts: these are the ones that the runner has kept."""

    class Blind(DraftModel):
        def draft(self, *args: Any, **kwargs: Any) -> Ints:
            return np.full_like(super().draft(*args, **kwargs), NO_DRAFT)

    blind = Blind(load(llama, dtype="float32"), page_tokens=4, pages=4096)
    bench = Bench(with_draft(open_any(llama, pages=4096), blind))
    made: list[Ints] = []
    make_drafts = bench.opened.runner.make_drafts

    def kept() -> Ints:
        made.append(make_drafts())
        return made[-1]

    monkeypatch.setattr(bench.opened.runner, "make_drafts", kept)
    assert check(bench, EVERY, MODES["overlapped"], wanted) < 0.1
    assert all((drafts == 0).all() for drafts in made)


def test_the_settings_open_a_draft_model_whose_drafts_change_nothing_under_a_grammar() -> None:
    """The embedded model drafts for itself: what it would say without the grammar."""
    speculation = SpeculationConfig(
        algorithm="standalone", draft_model=str(embedded.path()), draft_steps=5
    )
    drafting = msgspec.structs.replace(SETTINGS, speculation=speculation)
    states = guided_states()
    plain = Worker(open_engine(SETTINGS), SETTINGS).run(*states)
    worker = Worker(open_engine(drafting), drafting)
    report = warm_up(worker.loop, worker.engine)
    costs = worker.engine.core.speculation and worker.engine.core.speculation.costs
    assert costs is not None
    assert costs.tokens[:6] == (1, 2, 3, 4, 5, 6)
    assert report.totals.drafts_proposed == 0
    for ahead in (0, 1):
        forward = ForwardThread(worker.engine.runner)
        worker.loop.use(forward if ahead else InTurn(worker.engine.runner), ahead=ahead)
        drafted = worker.run(*states)
        assert [one.ids for one in drafted] == [other.ids for other in plain]
        assert [one.finish for one in drafted] == [other.finish for other in plain]
        assert worker.engine.core.totals().drafts_accepted > 50 * (1 + ahead)
        forward.close()
