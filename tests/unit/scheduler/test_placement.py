"""Where a request goes: to its prefix, unless too much waits there, and where it fits."""

from __future__ import annotations

import pytest
from tests.unit.scheduler.stage import Actor, Stage, held, running, usual

from antiphon.scheduler.leader_config import LeaderConfig
from antiphon.scheduler.worker_caches import EXPECT_S
from antiphon.wire.base import ProcessState, Role
from antiphon.wire.claim import Claim, PromptClaim
from antiphon.wire.codec import pack_ids
from antiphon.wire.digests import BLOCK_TOKENS, DIGEST_BYTES, block_digests
from antiphon.wire.errors import PromptTooLong, decode_error
from antiphon.wire.sampling import SamplingParams

LONG = pack_ids(range(12 * BLOCK_TOKENS))
BLOCKS = block_digests(b"root", LONG)


def two_workers(rules: LeaderConfig | None = None) -> tuple[Stage, Actor, Actor]:
    """A leader and two workers with room for eight requests each."""
    stage, _, first, _ = usual(rules)
    second = stage.enter(Role.WORKER, "worker-1")
    for worker in (first, second):
        worker.set_load(running_max=8, pages_free=1000, pages_total=1000)
    stage.pass_s(1.0)
    return stage, first, second


def busy(stage: Stage, worker: Actor, count: int) -> None:
    """A worker decodes so many requests, which is all that is known of them."""
    stage.actions.clear()
    others = [actor for actor in stage.actors if actor.role is Role.WORKER and actor is not worker]
    for other in others:
        other.set_load(paused=True)
    stage.pass_s(0.5)
    stage.submit_all(count, f"busy-{worker.process.instance}-")
    worker.runs(*(running(admit) for admit in stage.admits(worker)))
    for other in others:
        other.set_load(paused=False)
    stage.pass_s(0.6)
    stage.actions.clear()


def went_to(stage: Stage) -> str:
    (batch,) = stage.batches()
    stage.actions.clear()
    return batch.worker.instance


def test_prompt_that_is_elsewhere_goes_to_a_worker_that_fetches_it() -> None:
    stage, first, second = two_workers()
    claim = Claim(
        address="a:1", token="00", size_bytes=len(LONG), digest=bytes(32), expires_unix_ms=0
    )
    prompt = PromptClaim(claim=claim)
    head = BLOCKS[: 2 * DIGEST_BYTES]
    stage.actions.clear()
    stage.submit("r", prompt_ids=b"", prompt=prompt, block_digests=head)
    assert not stage.bound()
    second.reads = (PromptClaim.__name__,)
    stage.pass_s(0.6)
    (bound,) = stage.bound()
    assert bound.blocks == 12  # those of which it was sent no digests are to be computed, too
    (admit,) = stage.admits(second)
    assert (admit.prompt, admit.prompt_ids) == (prompt, b"")
    assert not stage.admits(first)


def test_a_prompt_goes_to_the_worker_that_has_its_beginning() -> None:
    stage, _, second = two_workers()
    stage.actions.clear()
    stage.store(second, BLOCKS[: 8 * DIGEST_BYTES])
    stage.submit_prompt("r", LONG)
    (bound,) = stage.bound()
    assert (bound.blocks, bound.cached_blocks) == (12, 8)
    assert went_to(stage) == "worker-1"


def test_uncached_prompt_goes_to_the_least_loaded_worker() -> None:
    stage, first, second = two_workers()
    busy(stage, first, 1)
    stage.store(second, BLOCKS[DIGEST_BYTES:])
    stage.submit_prompt("r", LONG)
    assert went_to(stage) == "worker-1"


@pytest.mark.parametrize(("ahead", "expected"), [(2, "worker-0"), (4, "worker-1")])
def test_a_beginning_is_computed_again_where_that_is_cheaper_than_the_load(
    ahead: int, expected: str
) -> None:
    stage, first, _ = two_workers(LeaderConfig(request_blocks=4.0))
    busy(stage, first, ahead)
    stage.store(first, BLOCKS)
    stage.submit_prompt("r", LONG)
    assert went_to(stage) == expected


def test_with_no_weight_on_prompts_only_the_load_counts() -> None:
    stage, first, _ = two_workers(LeaderConfig(prefill_weight=0.0))
    busy(stage, first, 1)
    stage.store(first, BLOCKS)
    stage.submit_prompt("r", LONG)
    assert went_to(stage) == "worker-1"


def test_a_worker_that_runs_twice_as_many_is_loaded_half_as_much_by_each() -> None:
    stage, first, second = two_workers()
    second.set_load(running_max=16)
    stage.pass_s(0.5)
    busy(stage, first, 2)
    busy(stage, second, 3)
    stage.submit("r")
    assert went_to(stage) == "worker-1"


def test_prefill_of_a_worker_counts_until_its_first_token_is_reported() -> None:
    stage, first, second = two_workers(LeaderConfig(request_blocks=0.0))
    stage.actions.clear()
    stage.store(second, BLOCKS)
    stage.submit_prompt("slow", pack_ids(range(1, 1 + 2 * BLOCK_TOKENS)))
    (admit,) = stage.admits(first)
    stage.actions.clear()
    stage.submit_prompt("r0", pack_ids(range(9, 9 + BLOCK_TOKENS)))
    assert went_to(stage) == "worker-1"
    first.runs(held(admit.request_id, admit.attempt, tokens=0))
    stage.pass_s(0.6)
    stage.actions.clear()
    stage.submit_prompt("r1", pack_ids(range(7, 7 + 2 * BLOCK_TOKENS)))
    assert went_to(stage) == "worker-1"
    first.runs(running(admit))
    stage.pass_s(0.6)
    stage.actions.clear()
    stage.submit_prompt("r2", pack_ids(range(5, 5 + 2 * BLOCK_TOKENS)))
    assert went_to(stage) == "worker-0"


def test_burst_with_one_beginning_follows_the_first_one_before_any_event_reports_it() -> None:
    stage, _, _ = two_workers(LeaderConfig(request_blocks=0.0))
    stage.actions.clear()
    for number in range(4):
        stage.submit_prompt(f"r{number}", pack_ids([*range(12 * BLOCK_TOKENS), number, number]))
    firsts = {bound.worker.instance: bound.cached_blocks for bound in reversed(stage.bound())}
    assert set(firsts.values()) == {0}
    later = [bound.cached_blocks for bound in stage.bound()][len(firsts) :]
    assert later == [12] * (4 - len(firsts))
    assert stage.leader.caches.blocks > 0
    stage.pass_s(EXPECT_S + 0.5)
    assert stage.leader.caches.blocks == 0, "no event came, so it is expected no more"


def test_a_dead_worker_takes_nothing_whatever_it_had() -> None:
    stage, first, second = two_workers()
    stage.store(second, BLOCKS)
    second.silent = True
    stage.pass_s(4.0)
    assert stage.leader.caches.blocks == 0
    stage.actions.clear()
    stage.submit_prompt("r", LONG)
    assert [batch.worker for batch in stage.batches()] == [first.process]


@pytest.mark.parametrize("reads", [(), ("TokenStep",), ("Another",), ("TokenStep", "TokenColumns")])
def test_admit_names_what_the_detokenizer_reads(reads: tuple[str, ...]) -> None:
    stage, _, worker, detokenizer = usual()
    detokenizer.reads = reads
    stage.pass_s(1.0)
    stage.submit_prompt("r", LONG)
    (admit,) = stage.admits(worker)
    assert (admit.steps, admit.columns) == ("TokenStep" in reads, "TokenColumns" in reads)


def small_and_large(rules: LeaderConfig | None = None) -> tuple[Stage, Actor, Actor]:
    stage, _, small, _ = usual(rules)
    large = stage.enter(Role.WORKER, "worker-1")
    for worker, tokens in ((small, 100), (large, 400)):
        worker.set_load(context_tokens=tokens)
    stage.pass_s(0.6)
    stage.actions.clear()
    return stage, small, large


def ask_tokens(stage: Stage, name: str, prompt_tokens: int, answer_tokens: int = 10) -> None:
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
        ask_tokens(stage, f"r{number}", prompt, answer)
    assert (given(stage, small), len(given(stage, large))) == ([], 3)


def test_what_fits_everywhere_goes_everywhere() -> None:
    stage, small, large = small_and_large()
    for number in range(4):
        ask_tokens(stage, f"r{number}", 90, 10)
    assert (len(given(stage, small)), len(given(stage, large))) == (2, 2)


def test_request_for_the_large_worker_does_not_block_the_small_one() -> None:
    stage, small, large = small_and_large(LeaderConfig(look_ahead=1))
    for number in range(4):
        ask_tokens(stage, f"long-{number}", 300)
    assert len(given(stage, large)) == 3
    ask_tokens(stage, "short", 8)
    assert given(stage, small) == ["short"]
    assert stage.leader.waiting == 1


def test_request_for_any_worker_is_not_overtaken_at_the_small_one() -> None:
    stage, small, large = small_and_large(LeaderConfig(look_ahead=1))
    for number in range(8):
        ask_tokens(stage, f"short-{number}", 8)
    ask_tokens(stage, "long", 300)
    gateway = stage.actors[0]
    gateway.closes(stage.admits(large)[0].request_id)
    assert given(stage, large)[-1] == "short-6"
    gateway.closes(stage.admits(small)[0].request_id)
    assert given(stage, small)[-1] == "short-7"
    gateway.closes(stage.admits(large)[1].request_id)
    assert given(stage, large)[-1] == "long"


def test_request_that_no_live_worker_can_take_ends_as_too_long() -> None:
    stage, _, large = small_and_large()
    ask_tokens(stage, "r0", 300)
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
    ask_tokens(stage, "r0", 8, 100_000)
    assert (given(stage, small), given(stage, large)) == ([], ["r0"])


@pytest.mark.parametrize("why", ["it leaves", "it loads its model"])
def test_only_of_workers_that_are_known_and_stay_is_anything_concluded(why: str) -> None:
    stage, small, large = small_and_large()
    if why == "it leaves":
        large.state = ProcessState.DRAINING
        stage.pass_s(0.6)
        ask_tokens(stage, "r0", 8, 200)
        assert given(stage, small) == ["r0"], "it waits for one that leaves"
        return
    stage.enter(Role.WORKER, "worker-2").loading = True
    stage.pass_s(0.6)
    ask_tokens(stage, "r0", 1000)
    stage.pass_s(3.0)
    assert (stage.leader.waiting, stage.lost()) == (1, [])
    assert given(stage, large) == []
