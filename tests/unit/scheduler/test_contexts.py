"""Workers with different context lengths: placement, and requests that are too long for all."""

from __future__ import annotations

import pytest
from tests.unit.scheduler.stage import Actor, Stage, running, usual

from antiphon.scheduler.leader_config import LeaderConfig
from antiphon.wire.base import ProcessState, Role
from antiphon.wire.codec import pack_ids
from antiphon.wire.errors import PromptTooLong, decode_error
from antiphon.wire.sampling import SamplingParams


def small_and_large(rules: LeaderConfig | None = None) -> tuple[Stage, Actor, Actor]:
    """Workers of 100 and of 400 tokens."""
    stage, _, small, _ = usual(rules)
    large = stage.enter(Role.WORKER, "worker-1")
    for worker, tokens in ((small, 100), (large, 400)):
        worker.set_load(context_tokens=tokens)
    stage.pass_s(0.6)
    stage.actions.clear()
    return stage, small, large


def ask(stage: Stage, name: str, prompt_tokens: int, answer_tokens: int = 10) -> None:
    sampling = SamplingParams(max_new_tokens=answer_tokens)
    stage.submit(name, prompt_ids=pack_ids(range(prompt_tokens)), sampling=sampling)


def given(stage: Stage, worker: Actor) -> list[str]:
    return [str(admit.request_id) for admit in stage.admits(worker)]


@pytest.mark.parametrize(("prompt", "answer"), [(101, 1), (95, 6), (8, 93), (100, 1)])
def test_what_a_worker_could_not_hold_to_the_end_does_not_go_there(
    prompt: int, answer: int
) -> None:
    stage, small, large = small_and_large()
    for number in range(3):
        ask(stage, f"r{number}", prompt, answer)
    assert (given(stage, small), len(given(stage, large))) == ([], 3)


def test_what_fits_everywhere_goes_everywhere() -> None:
    stage, small, large = small_and_large()
    for number in range(4):
        ask(stage, f"r{number}", 90, 10)
    assert (len(given(stage, small)), len(given(stage, large))) == (2, 2)


def test_request_for_the_large_worker_does_not_block_the_small_one() -> None:
    stage, small, large = small_and_large(LeaderConfig(look_ahead=1))
    for number in range(4):
        ask(stage, f"long-{number}", 300)
    assert len(given(stage, large)) == 3
    ask(stage, "short", 8)
    assert given(stage, small) == ["short"]
    assert stage.leader.waiting == 1


def test_request_for_any_worker_is_not_overtaken_at_the_small_one() -> None:
    stage, small, large = small_and_large(LeaderConfig(look_ahead=1))
    for number in range(8):
        ask(stage, f"short-{number}", 8)
    ask(stage, "long", 300)
    gateway = stage.actors[0]
    gateway.closes(stage.admits(large)[0].request_id)
    assert given(stage, large)[-1] == "short-6"
    gateway.closes(stage.admits(small)[0].request_id)
    assert given(stage, small)[-1] == "short-7"
    gateway.closes(stage.admits(large)[1].request_id)
    assert given(stage, large)[-1] == "long"


def test_request_that_no_live_worker_can_take_ends_as_too_long() -> None:
    stage, _, large = small_and_large()
    ask(stage, "r0", 300)
    (admit,) = stage.admits(large)
    large.runs(running(admit))
    large.silent = True
    stage.pass_s(4.0)
    (lost, *_) = stage.lost()
    error = decode_error(lost.error)
    assert isinstance(error, PromptTooLong)
    assert error.details == {"prompt_tokens": "300", "tokens_max": "100"}
    assert stage.leader.open_requests == 0


def test_answer_too_long_for_all_workers_is_cut_by_the_longest_one() -> None:
    stage, small, large = small_and_large()
    ask(stage, "r0", 8, 100_000)
    assert (given(stage, small), given(stage, large)) == ([], ["r0"])


@pytest.mark.parametrize("why", ["it leaves", "it loads its model"])
def test_only_of_workers_that_are_known_and_stay_is_anything_concluded(why: str) -> None:
    stage, small, large = small_and_large()
    if why == "it leaves":
        large.state = ProcessState.DRAINING
        stage.pass_s(0.6)
        ask(stage, "r0", 8, 200)
        assert given(stage, small) == ["r0"], "it waits for one that leaves"
        return
    stage.enter(Role.WORKER, "worker-2").loading = True
    stage.pass_s(0.6)
    ask(stage, "r0", 1000)
    stage.pass_s(3.0)
    assert (stage.leader.waiting, stage.lost()) == (1, [])
    assert given(stage, large) == []
