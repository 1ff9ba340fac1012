"""Bugs in planning and committing: they end the request that they belong to, and nothing else."""

from __future__ import annotations

import functools
from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Any, NoReturn, cast

import msgspec
import pytest
from tests.simulation.test_worker_overlap import CURSE, VOCAB_SIZE, Stage, both, harmless, staged
from tests.support.worker import error_of, limits, page_group, plain_runs, state

from antiphon.model_worker.batching import (
    engine_core,
    outcome,
    plan_builder,
    prefixes,
)
from antiphon.model_worker.batching.engine_core import EngineCore
from antiphon.model_worker.batching.faults import SHARED
from antiphon.model_worker.batching.logits import LogitsProcessors
from antiphon.model_worker.batching.logprobs import LogprobsParams
from antiphon.model_worker.batching.mailbox import ControlCommand, Mail
from antiphon.model_worker.batching.outcome import OutcomeProcessor, ProgressLog
from antiphon.model_worker.batching.plan import DeviceLost, Flight, StepPlan
from antiphon.model_worker.batching.planner import StepPlanner
from antiphon.model_worker.batching.prefixes import Prefixes
from antiphon.model_worker.batching.request import Request
from antiphon.model_worker.batching.rows import SlotSet, StepRows
from antiphon.model_worker.batching.running_batch import RunningBatch
from antiphon.model_worker.batching.state import ChoiceKey, RequestState, SampledTokens
from antiphon.model_worker.batching.token_masks import TokenFilter
from antiphon.model_worker.cache import tree
from antiphon.model_worker.cache.events import BlockTracker
from antiphon.model_worker.cache.groups import GroupKind
from antiphon.model_worker.cache.pages import CachePools
from antiphon.model_worker.cache.pool import PagePool
from antiphon.model_worker.cache.radix import RadixIndex
from antiphon.service.inbox import SharedStateBroken
from antiphon.wire.codec import pack_ids
from antiphon.wire.command import ContinueWorker, PauseMode, PauseWorker, SetWeightVersion
from antiphon.wire.sampling import AllowRange, LogitBias
from antiphon.wire.token_outputs import pack_floats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


AT_FAULT = ChoiceKey(3)
"""The choice whose handling fails, of those of a test."""


def keys(batch: RunningBatch, arguments: Iterable[object]) -> set[ChoiceKey]:
    """The choices that a call is about."""
    found: set[ChoiceKey] = set()
    for argument in arguments:
        match argument:
            case Request():
                found.add(argument.key)
            case RequestState():
                found.add(ChoiceKey(int(argument.request_id[1:])))
            case StepRows():
                found |= keys(batch, [argument.slots])
            case SlotSet():
                slots = argument.slots.tolist()
                found |= {batch.running[slot].key for slot in slots if slot in batch.running}
            case list():
                found |= keys(batch, argument)
            case TokenFilter():
                found.add(AT_FAULT)  # no other has one
            case _:
                pass
    return found


def fail(*_: object, **__: object) -> NoReturn:
    raise AssertionError("a bug, on purpose")


class Fault:
    """Makes a function fail from its n-th call on that is about the choice at fault."""

    def __init__(
        self, patch: pytest.MonkeyPatch, stage: Stage, owner: Any, name: str, after: int = 0
    ) -> None:
        self.raised = 0
        self.calls = 0
        self.after = after
        self._batch = stage.batching.batch
        found = owner.__dict__[name]
        if isinstance(found, property):
            assert found.fget is not None
            patch.setattr(owner, name, property(self._failing(found.fget)))
        else:
            patch.setattr(owner, name, self._failing(found))

    def _failing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            if AT_FAULT in keys(self._batch, arguments):
                self.calls += 1
                if self.calls > self.after:
                    self.raised += 1
                    fail()
            return function(*arguments, **named)

        return call


PLACES: dict[str, tuple[Any, str]] = {
    "check": (engine_core, "check"),
    "prefix": (Prefixes, "cached"),
    "wait": (StepPlanner, "_should_wait"),
    "table": (Prefixes, "table"),
    "start": (StepPlanner, "_start"),
    "fill": (LogitsProcessors, "fill"),
    "outputs": (LogprobsParams, "fill"),
    "build": (engine_core, "build_plan"),
    "chunks": (plan_builder, "_tokens"),
    "ids": (Request, "ids"),
    "mask": (TokenFilter, "restrict"),
    "bias": (LogitsProcessors, "_bias"),
    "commit chunk": (OutcomeProcessor, "_commit_chunk"),
    "write": (outcome, "write_outputs"),
    "finish": (OutcomeProcessor, "_finish_row"),
    "committed_table": (RunningBatch, "committed_table"),
    "share": (RunningBatch, "cache_prefix"),
    "report": (Request, "progress"),
}
"""Code that runs for one request, or for the requests of one plan, which is then cut in halves."""


@pytest.fixture(params=[False, True], ids=["in turn", "overlapped"])
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    with staged(overlap=request.param, curse=-1) as stage:
        yield stage


def eight_prompts() -> list[list[int]]:
    """That of the choice at fault is longer than a chunk."""
    return [harmless(25 if salt == AT_FAULT else 5 + salt, salt) for salt in range(8)]


def run_eight(stage: Stage) -> None:
    """Send eight requests. The sampled tokens do not depend on what is peculiar to one."""
    everything = (AllowRange(first=0, last=VOCAB_SIZE),)
    runs = dict(stage.request(p, seed=i) for i, p in enumerate(eight_prompts()))
    state = runs[AT_FAULT]
    bias = LogitBias(token_ids=pack_ids([5]), values=pack_floats([0.0]))
    sampling = msgspec.structs.replace(
        state.sampling, processors=everything, logit_bias=bias, frequency_penalty=0.1
    )
    runs[AT_FAULT] = msgspec.structs.replace(state, sampling=sampling)
    stage.reported[AT_FAULT].penalised = True
    stage.turn(Mail(runs=plain_runs(runs)))


def verify_others(stage: Stage) -> None:
    culprit = stage.reported.pop(AT_FAULT)
    assert error_of(culprit.finish).code == "internal"
    stage.verify()


@pytest.mark.parametrize("after", [0, 1, 6])
@pytest.mark.parametrize("place", PLACES)
def test_fault_of_one_request_ends_that_request_alone(
    place: str, after: int, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault(monkeypatch, stage, *PLACES[place], after)
    run_eight(stage)
    stage.drain()
    reported = stage.reported[AT_FAULT]
    if reported.finish is not None and reported.finish.error is not None:
        verify_others(stage)
        return
    # It was not called so often, or the plan was built after all, in halves.
    assert fault.calls <= after or place == "build"
    stage.verify()


def test_code_for_one_request_runs_in_every_place(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = {
        place: Fault(monkeypatch, stage, *where, after=1_000) for place, where in PLACES.items()
    }
    run_eight(stage)
    stage.drain()
    assert [place for place, fault in faults.items() if not fault.calls] == []


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (StepPlanner, "_preempt"),
        (RunningBatch, "next_decodes"),
        (RunningBatch, "launch"),
        (OutcomeProcessor, "commit"),
        (OutcomeProcessor, "_advance_matchers"),
        (RunningBatch, "append"),
        (ProgressLog, "add_sampled"),
    ],
    ids=lambda part: part if isinstance(part, str) else part.__name__,
)
def test_fault_of_no_request_ends_those_of_the_step_and_the_worker_goes_on(
    owner: type, name: str, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = [stage.run(harmless(5, salt), seed=salt) for salt in range(3)]
    real = owner.__dict__[name]

    def fail(*_: object) -> None:
        monkeypatch.setattr(owner, name, real)
        raise AssertionError("a bug, on purpose")

    if name == "_advance_matchers":  # it is called only where a request has a grammar
        stage.batching.batch.has_grammar[:] = True
        stage.batching.batch.grammars = 1
    monkeypatch.setattr(owner, name, fail)
    for _ in range(3):
        stage.turn()
    assert owner.__dict__[name] is real, "it was never made to fail"
    codes = [
        reported.finish.error.code
        for reported in first
        if reported.finish and reported.finish.error
    ]
    assert set(codes) == {"internal"}
    stage.reported = {
        key: reported for key, reported in stage.reported.items() if reported not in first
    }
    stage.run(harmless(9, 9))
    stage.finish()


@pytest.mark.parametrize(
    "order",
    [
        PauseWorker(mode=PauseMode.ABORT),
        PauseWorker(mode=PauseMode.RETRACT),
        SetWeightVersion(version="2", abort_all=True),
        SetWeightVersion(version="2", abort_all=False),
    ],
    ids=["abort", "retract", "other weights, abort", "other weights"],
)
@pytest.mark.parametrize("name", ["progress", "discard_prompt_logprobs"])
def test_fault_of_one_request_keeps_no_order_from_being_obeyed(
    name: str, order: ControlCommand, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_eight(stage)
    for _ in range(5):
        stage.turn()
    fault = Fault(monkeypatch, stage, Request, name)
    assert len(stage.order(order)) == 1
    stage.order(ContinueWorker())
    stage.drain()
    if fault.raised:
        verify_others(stage)
    else:  # this order does not come there
        stage.verify()


def test_request_that_cannot_be_handed_back_ends_alone(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = EngineCore.requeue

    def fail(batching: EngineCore, keys: Sequence[ChoiceKey]) -> bool:
        if AT_FAULT in keys:
            raise AssertionError("a bug, on purpose")
        return real(batching, keys)

    monkeypatch.setattr(EngineCore, "requeue", fail)
    prompts = eight_prompts()
    runs = dict(stage.request(p, seed=i) for i, p in enumerate(prompts))
    returned = ChoiceKey(4)
    stage.turn(Mail(runs=plain_runs(runs), requeues={(AT_FAULT,): None, (returned,): None}))
    assert stage.reports[-1].returned == (returned,)
    del stage.reported[returned]
    stage.drain()
    verify_others(stage)


@both
def test_request_that_cannot_be_reported_does_not_stop_the_loop_when_its_plan_fails(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with staged(overlap=overlap) as stage:
        fault = Fault(monkeypatch, stage, Request, "progress")
        prompts = eight_prompts()
        prompts[AT_FAULT][-1] = CURSE
        stage.run_all(prompts)
        stage.drain()
        assert fault.raised
        verify_others(stage)


def test_plan_that_cannot_be_built_once_is_built_in_halves(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for salt in range(3):
        stage.run(harmless(5, salt), tokens_max=60, seed=salt)
    calls = 0
    real = RunningBatch.next_tokens

    def next_tokens(batch: RunningBatch, rows: StepRows) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise AssertionError("a bug, on purpose")
        return real(batch, rows)

    monkeypatch.setattr(RunningBatch, "next_tokens", next_tokens)
    stage.drain()
    assert calls > 3
    stage.verify()


@both
def test_checkpoint_that_cannot_be_cached_ends_its_request_alone(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with staged(overlap=overlap, states=64, curse=-1, checkpoint_tokens=8) as stage:
        runs = dict(stage.request(harmless(5, salt), seed=salt) for salt in range(8))
        stage.turn(Mail(runs=plain_runs(runs)))
        stage.turn()
        fault = Fault(monkeypatch, stage, RunningBatch, "cache_prefix")
        while not fault.raised:
            stage.turn()
        rows = [len(p.slots) for p in stage.reports[-1].progress if isinstance(p, SampledTokens)]
        assert rows == [7], "the others are reported together"
        stage.drain()
        verify_others(stage)


@both
def test_plan_that_cannot_be_launched_loses_nothing(overlap: bool) -> None:
    """The next plan has its number and its changes, and nothing is launched meanwhile."""
    with staged(overlap=overlap, curse=-1) as stage:
        launch, calls = stage.loop._launcher.launch, 0

        def fail_some(plan: StepPlan) -> Flight:
            nonlocal calls
            calls += 1
            if calls in {1, 6, 11}:
                fail()
            return launch(plan)

        stage.loop._launcher.launch = fail_some  # type: ignore[method-assign]
        stage.run_all(eight_prompts())
        stage.drain()
        assert calls > 20
        assert stage.reports[-1].failures == 3
        stage.verify()


def test_broken_page_pool_ends_the_loop(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.run(harmless(9, 1))
    release = PagePool.release

    def twice(pool: PagePool, *arguments: Any) -> None:
        release(pool, *arguments)
        release(pool, *arguments)

    monkeypatch.setattr(PagePool, "release", twice)
    with pytest.raises(SharedStateBroken):
        stage.drain()


@pytest.mark.parametrize(
    ("owner", "name"),
    [(PagePool, "allocate"), (PagePool, "release"), (tree, "RadixNode")],
    ids=lambda part: part if isinstance(part, str) else part.__name__.rpartition(".")[2],
)
def test_fault_in_a_helper_of_shared_structures_ends_the_loop(
    owner: Any, name: str, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However deep: the structure that called it has begun a change, and not finished it."""

    stage.run(harmless(40, 1))
    stage.drain()
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(SharedStateBroken):  # noqa: PT012  # in the turn of either
        stage.run(harmless(60, 1))
        stage.drain()


def test_prompt_that_cannot_be_hashed_ends_its_request_alone(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing shared was begun; should it end the worker, it would end the next one as well."""
    real = prefixes.cache_namespace

    def fail(origin: Any, salt: bytes) -> Any:
        if salt:
            raise AssertionError("a bug, on purpose")
        return real(origin, salt)

    monkeypatch.setattr(prefixes, "cache_namespace", fail)
    prompts = eight_prompts()
    requests = [stage.request(p, seed=i) for i, p in enumerate(prompts)]
    at = [key for key, _ in requests].index(AT_FAULT)
    salted = msgspec.structs.replace(requests[at][1], cache_salt=b"salt")
    requests[at] = (AT_FAULT, salted)
    stage.turn(Mail(runs=plain_runs(requests)))
    stage.drain()
    verify_others(stage)


def held_by(found: object) -> Iterator[object]:
    """What an object holds: the items of a container, or the attributes of one of ours."""
    if isinstance(found, dict):
        yield from cast("dict[object, object]", found).items()
    elif isinstance(found, list | tuple | set | frozenset | deque):
        yield from cast("Iterable[object]", found)
    elif type(found).__module__.startswith("antiphon."):
        slots = [name for base in type(found).__mro__ for name in getattr(base, "__slots__", ())]
        names = {*slots, *getattr(found, "__struct_fields__", ()), *getattr(found, "__dict__", ())}
        yield from (getattr(found, name, None) for name in names)


def changes(kind: type) -> bool:
    """Whether objects of this kind have state of their own."""
    configs = (getattr(kind, name, None) for name in ("__struct_config__", "__dataclass_params__"))
    frozen = any(config is not None and config.frozen for config in configs)
    return not (frozen or issubclass(kind, Enum | tuple))


def test_shared_modules_are_those_of_all_that_changes_in_the_cache_of_an_engine_core() -> None:
    """They are compared with tracebacks: a module that is not named would end no worker."""
    pools = CachePools([page_group(30), page_group(9, GroupKind.STATE)])
    core = EngineCore(limits(), pools, RadixIndex(pools, tracker=BlockTracker()))
    core.add(ChoiceKey(1), state([5, 6, 7]), 0.0)
    assert len(core.next_rows(0.0))
    reached: dict[int, object] = {}
    unread: list[object] = [core]
    while unread:
        found = unread.pop()
        if id(found) not in reached:
            reached[id(found)] = found
            unread += held_by(found)
    modules = {type(found).__module__ for found in reached.values() if changes(type(found))}
    package = CachePools.__module__.rpartition(".")[0]
    assert {module for module in modules if module.startswith(package)} == SHARED


@both
def test_a_lost_device_ends_the_process_and_no_request(overlap: bool) -> None:
    with staged(overlap=overlap, curse=-1) as stage:
        lost = [stage.run(harmless(5, salt), tokens_max=30, seed=salt) for salt in range(3)]

        def lose(*_: object) -> NoReturn:
            raise DeviceLost("the driver has gone")

        stage.cursed.run = lose  # type: ignore[method-assign]
        with pytest.raises(DeviceLost):  # noqa: PT012  # in the turn that reads the step
            for _ in range(3):
                stage.turn()
        assert all(reported.finish is None for reported in lost)
