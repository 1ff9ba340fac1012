from __future__ import annotations

import msgspec
import pytest
from tests.unit.scheduler.stage import (
    Actor,
    Stage,
    held,
    open_entry,
    other_attempt,
    process,
    running,
    sent_to,
    usual,
    waiting,
)

from antiphon.scheduler.leader_config import LeaderConfig
from antiphon.scheduler.outbox import SealCall
from antiphon.wire.base import FinishReason, ProcessState, Role
from antiphon.wire.claim import Claim
from antiphon.wire.codec import pack_ids
from antiphon.wire.command import Admit, ChoiceOutput
from antiphon.wire.errors import (
    Cancelled,
    DeadlineExceeded,
    DuplicateRequest,
    InvalidRequest,
    Overloaded,
    RequestTooLarge,
    Unavailable,
    UnknownStream,
    WorkerLost,
)
from antiphon.wire.ids import RequestId, TenantId
from antiphon.wire.media import Medium, MediumSpan
from antiphon.wire.sampling import SamplingParams, TokenOutputParams
from antiphon.wire.seal import DETAILS_BYTES_MAX, AttemptsSealed, SealedRequest, SealRequest
from antiphon.wire.submit import AdoptRequest, NoticeBatch, OwnerSeal, ResumeWindow, SubmitRequest
from antiphon.wire.token_outputs import TokenOutputs


def test_request_is_bound_to_a_worker_and_its_detokenizer_with_all_its_fields() -> None:
    stage, _, worker, _ = usual()
    request = stage.submit("r", traceparent="00-1")
    (admit,) = stage.admits(worker)
    assert (admit.attempt.term, admit.attempt.n) == (stage.leader.term, 1)
    assert admit.detokenizer == "detokenizer-0"
    assert (admit.prompt_ids, admit.sampling) == (request.prompt_ids, request.sampling)
    assert (admit.owner, admit.deadline_unix_ms) == (request.owner, request.deadline_unix_ms)
    assert admit.traceparent == "00-1"
    assert [bound.request_id for bound in stage.bound()] == ["r"]


def test_new_leader_binds_nothing_before_all_have_reported_or_two_beats_have_passed() -> None:
    stage = Stage()
    stage.pass_s(1.2)
    assert stage.leader.term is not None
    stage.clock.advance(0.01)
    for role in (Role.GATEWAY, Role.WORKER, Role.DETOKENIZER):
        stage.enter(role, f"{role}-0").silent = True
    stage.enter(Role.WORKER, "worker-1").silent = True
    stage.leader.submit(stage.request("r"))
    stage.pass_s(0.4)
    # All have reported: that is enough.
    assert len(stage.admits()) == 1


def test_leader_without_all_reports_waits_two_beats() -> None:
    stage = Stage()
    for role in (Role.GATEWAY, Role.WORKER, Role.DETOKENIZER):
        stage.enter(role, f"{role}-0").silent = True
    stage.pass_s(1.2)
    assert stage.leader.term is not None
    stage.leader.submit(stage.request("r"))
    stage.pass_s(0.5)
    assert not stage.admits()


def test_what_the_workers_have_no_room_for_waits_in_order() -> None:
    stage, gateway, worker, _ = usual(LeaderConfig(look_ahead=1))
    stage.submit_all(5)
    assert [admit.request_id for admit in stage.admits()] == ["r0", "r1", "r2"]
    assert stage.leader.submit(stage.request("r4")).position == 1
    worker.runs(*(running(admit) for admit in stage.admits()))
    gateway.closes(stage.admits()[1].request_id)
    assert [admit.request_id for admit in stage.admits()][3:] == ["r3"]


def test_a_request_that_has_ended_at_its_worker_gives_its_place_back() -> None:
    stage, _, worker, _ = usual(LeaderConfig(look_ahead=1))
    stage.submit_all(4)
    first, *others = stage.admits()
    worker.runs(running(first, ended=True), *map(running, others))
    stage.pass_s(0.6)
    assert [admit.request_id for admit in stage.admits()][3:] == ["r3"]


def test_full_queue_rejects_with_retry_after() -> None:
    stage, *_ = usual(LeaderConfig(queue_max=2, look_ahead=1))
    stage.submit_all(4)
    with pytest.raises(Overloaded, match="2 requests wait, at most 2 may") as refused:
        stage.leader.submit(stage.request("r4"))
    assert refused.value.retry_after_s is not None
    assert refused.value.retry_after_s >= 1.0


@pytest.mark.parametrize("look_ahead", [1, 2, 5])
@pytest.mark.parametrize("queue_max", [1, 2, 4])
def test_queue_bound_counts_requests_that_wait_at_a_worker(look_ahead: int, queue_max: int) -> None:
    stage, gateway, worker, _ = usual(LeaderConfig(queue_max=queue_max, look_ahead=look_ahead))
    worker.set_load(running_max=1)
    worker.beat()
    accepted = accepted_of(stage, 10)
    assert accepted == 1 + queue_max
    # A slot that gets free is one more place at once, without a report of the worker.
    gateway.closes(stage.admits()[0].request_id)
    assert accepted_of(stage, 10, "later") == 1


def test_queue_bound_counts_no_request_that_has_a_slot() -> None:
    stage, *_ = usual(LeaderConfig(queue_max=1))
    other = stage.enter(Role.WORKER, "worker-1")
    assert other.load.running_max == 2
    stage.pass_s(0.6)
    assert accepted_of(stage, 10) == 2 + 2 + 1


def accepted_of(stage: Stage, count: int, name: str = "r") -> int:
    accepted = 0
    for number in range(count):
        try:
            stage.submit(f"{name}-{number}")
            accepted += 1
        except Overloaded:
            del stage.first(Role.GATEWAY).open[RequestId(f"{name}-{number}")]
    return accepted


def test_the_same_request_again_is_a_retry_and_anything_else_of_its_id_a_clash() -> None:
    stage, *_ = usual()
    stage.submit("r")
    assert stage.leader.submit(stage.request("r")).position == 0
    with pytest.raises(DuplicateRequest):
        stage.leader.submit(stage.request("r", digest=b"another"))
    with pytest.raises(DuplicateRequest):
        stage.leader.submit(stage.request("r", process("gateway-1")))
    assert len(stage.admits()) == 1


def test_a_prompt_that_fits_into_no_message_is_refused_at_once() -> None:
    stage, *_ = usual(LeaderConfig(payload_bytes_max=16 * 1024))
    with pytest.raises(RequestTooLarge):
        stage.leader.submit(stage.request("r", prompt_ids=pack_ids(range(4096))))


def test_the_least_loaded_worker_gets_the_next_request() -> None:
    stage, *_ = usual()
    second = stage.enter(Role.WORKER, "worker-1")
    second.set_load(running_max=4)
    second.beat()
    stage.submit_all(6)
    assert len(stage.admits(second)) == 4


@pytest.mark.parametrize("fault", ["draining", "suspect", "stalled", "paused", "no pages"])
def test_a_worker_that_should_not_work_gets_nothing_new(fault: str) -> None:
    stage, _, worker, _ = usual(LeaderConfig(stall_s=5.0))
    stage.submit("r0")
    worker.runs(running(stage.admits()[0]))
    match fault:
        case "draining":
            worker.state = ProcessState.DRAINING
        case "suspect":
            worker.silent = True
            stage.pass_s(1.2)
        case "stalled":
            worker.set_load(step_age_s=6.0)
        case "paused":
            worker.set_load(paused=True)
        case _:
            worker.set_load(pages_free=0)
    stage.pass_s(0.6)
    stage.submit("r1")
    stage.pass_s(0.5)
    assert [admit.request_id for admit in stage.admits()] == ["r0"]


def test_each_worker_keeps_one_detokenizer() -> None:
    stage, _, first, _ = usual()
    second = stage.enter(Role.WORKER, "worker-1")
    stage.enter(Role.DETOKENIZER, "detokenizer-1")
    stage.submit_all(8)
    chosen = [{admit.detokenizer for admit in stage.admits(one)} for one in (first, second)]
    assert chosen == [{"detokenizer-0"}, {"detokenizer-1"}]


def test_lost_admit_is_sent_again_as_the_same_attempt() -> None:
    stage, _, worker, _ = usual()
    stage.submit("r")
    stage.pass_s(1.2)
    assert len(stage.admits()) == 1
    stage.pass_s(1.0)
    first, second = stage.admits()
    assert first.attempt == second.attempt
    worker.runs(running(second))
    stage.pass_s(5.0)
    assert len(stage.admits()) == 2


def test_commands_to_a_worker_are_numbered_without_a_gap() -> None:
    stage, *_ = usual()
    stage.submit_all(3)
    assert [batch.seq for batch in stage.batches()] == [1, 2, 3]
    assert {batch.leader for batch in stage.batches()} == {stage.leader.term}


def test_frozen_worker_does_not_get_old_sequence_numbers() -> None:
    stage, _, worker, _ = usual()
    stage.submit("r0")
    stage.submit("r1")
    worker.silent = True
    stage.pass_s(3.0)
    worker.silent = False
    stage.pass_s(1.0)
    assert len(stage.admits()) == 4
    seqs = [batch.seq for batch in stage.batches()]
    assert seqs == sorted(set(seqs))


def test_a_cancelled_request_is_aborted_and_stays_dead_until_long_after_its_deadline() -> None:
    stage, _, worker, _ = usual()
    request = stage.submit("r", deadline_s=5.0)
    stage.cancel(request)
    assert [abort.attempt for abort in stage.aborts(worker)] == [stage.admits()[0].attempt]
    with pytest.raises(Cancelled):
        stage.leader.submit(request)
    stage.pass_s(14.0)
    late = msgspec.structs.replace(request, deadline_unix_ms=stage.clock.unix_ms() + 1000)
    with pytest.raises(Cancelled):
        stage.leader.submit(late)
    stage.pass_s(2.0)
    later = msgspec.structs.replace(request, deadline_unix_ms=stage.clock.unix_ms() + 1000)
    assert stage.leader.submit(later)


def test_a_cancel_that_overtakes_its_submit_wins() -> None:
    stage, *_ = usual()
    request = stage.request("r")
    stage.cancel(request)
    with pytest.raises(Cancelled):
        stage.leader.submit(request)


def test_only_its_owner_cancels_a_request() -> None:
    stage, *_ = usual()
    stage.submit("r")
    stage.cancel(stage.request("r", process("gateway-1")))
    assert stage.leader.open_requests == 1
    assert not stage.aborts()


def test_a_deadline_frees_a_waiting_request_at_once_and_a_bound_one_two_seconds_later() -> None:
    stage, _, worker, _ = usual(LeaderConfig(look_ahead=1))
    stage.submit_all(4, deadline_s=2.0)
    worker.runs(*map(running, stage.admits()))
    with pytest.raises(DeadlineExceeded):
        stage.leader.submit(stage.request("late", deadline_s=0.0))
    stage.pass_s(2.1)
    assert (stage.leader.waiting, stage.leader.open_requests) == (0, 3)
    stage.pass_s(2.0)
    assert stage.leader.open_requests == 0
    assert {abort.request_id for abort in stage.aborts()} == {"r0", "r1", "r2"}


def test_what_runs_and_is_not_open_is_aborted_after_a_grace() -> None:
    stage, _, worker, _ = usual()
    stage.submit("r")
    (admit,) = stage.admits()
    worker.runs(running(msgspec.structs.replace(admit, request_id="stray")), running(admit))
    stage.pass_s(1.2)
    assert not stage.aborts()
    stage.pass_s(1.5)
    assert {abort.request_id for abort in stage.aborts()} == {"stray"}


def test_what_runs_and_is_open_is_taken_over_by_a_new_leader() -> None:
    stage = Stage()
    gateway = stage.enter(Role.GATEWAY, "gateway-0")
    worker = stage.enter(Role.WORKER, "worker-0")
    stage.enter(Role.DETOKENIZER, "detokenizer-0")
    old = other_attempt(3)
    request = stage.request("r")
    gateway.open[request.request_id] = open_entry(request, old)
    worker.runs(held(request.request_id, old))
    stage.pass_s(5.0)
    assert stage.leader.open_requests == 1
    stage.leader.submit(msgspec.structs.replace(request, attempt_floor=old))
    stage.pass_s(5.0)
    assert not stage.commands()


def test_what_was_accepted_and_is_not_open_is_dropped_after_a_grace() -> None:
    stage, gateway, worker, _ = usual()
    stage.submit("r")
    gateway.open.clear()
    for _ in range(8):
        gateway.list(whole=True)  # sent before the submit, and late
    stage.pass_s(1.0)
    assert stage.leader.open_requests == 1
    stage.pass_s(1.5)
    assert stage.leader.open_requests == 0
    assert [abort.request_id for abort in stage.aborts(worker)] == ["r"]


def test_what_its_owner_has_closed_is_forgotten_without_a_word() -> None:
    stage, gateway, _, _ = usual()
    request = stage.submit("r")
    gateway.closes(request.request_id)
    stage.pass_s(3.0)
    assert stage.leader.open_requests == 0
    assert not stage.aborts()
    with pytest.raises(Cancelled):
        stage.leader.submit(request)


def test_a_list_that_comes_late_changes_nothing() -> None:
    stage, gateway, _, _ = usual()
    request = stage.submit("r")
    gateway.list(whole=False, closed=(request.request_id,), version=1)
    assert stage.leader.open_requests == 1


def test_unknown_open_request_is_requested_until_it_is_submitted() -> None:
    stage, gateway, _, _ = usual()
    request = stage.request("r")
    gateway.open[request.request_id] = open_entry(request)
    gateway.list(whole=False)
    stage.listen()
    assert not stage.asked(), "its submit is under way"
    stage.pass_s(1.0)
    assert stage.asked() == ["r", "r"], "once a list"
    stage.actions.clear()
    stage.leader.submit(request)
    stage.pass_s(1.0)
    assert not stage.asked()


@pytest.mark.parametrize("followed", [True, False])
def test_what_is_known_by_an_attempt_alone_is_requested_until_it_is_submitted(
    followed: bool,
) -> None:
    """Its submit was dropped or lost: without it, the request could only be lost, too."""
    stage, gateway, worker, detokenizer = usual()
    request, old = stage.request("r"), other_attempt(0)
    gateway.open[request.request_id] = open_entry(request, old if followed else None)
    if not followed:
        worker.reports(held(request.request_id, old))
    gateway.list(whole=True)
    stage.listen()
    assert stage.asked() == ["r"]
    worker.silent = True
    stage.enter(Role.WORKER, "worker-1")
    output = ChoiceOutput(choice=0, output_ids=pack_ids([5]))
    detokenizer.outputs[request.request_id] = SealedRequest(
        request_id=request.request_id, attempt=old, choices=(output,)
    )
    stage.pass_s(4.0)
    stage.actions.clear()
    stage.pass_s(1.0)
    assert set(stage.asked()) == {"r"}
    assert not stage.admits()
    stage.leader.submit(request)
    stage.pass_s(1.0)
    assert [(each.continues, each.choices) for each in stage.admits()][:1] == [(old, (output,))]
    assert not stage.lost()


def test_what_is_lost_or_cancelled_is_not_asked_for() -> None:
    stage, gateway, worker, _ = usual()
    request = stage.submit("r")
    (admit,) = stage.admits()
    worker.runs(running(admit))
    gateway.follows(request.request_id, admit.attempt)
    stage.actors.remove(worker)
    stage.pass_s(14.0)
    assert {lost.request_id for lost in stage.lost()} == {"r"}
    stage.cancel(request)
    stage.pass_s(1.0)
    assert not stage.asked()


def test_the_requests_of_a_dead_gateway_are_aborted() -> None:
    stage, gateway, worker, _ = usual(LeaderConfig(look_ahead=1))
    stage.submit_all(4)
    worker.runs(*map(running, stage.admits()))
    gateway.silent = True
    stage.pass_s(14.0)
    assert stage.leader.open_requests == 4, "it may only pause"
    stage.pass_s(2.0)
    assert stage.leader.open_requests == 0
    assert {abort.request_id for abort in stage.aborts()} == {"r0", "r1", "r2"}


def test_request_of_a_dead_gateway_waits_for_its_window_and_is_adopted() -> None:
    stage, gateway, worker, _ = usual()
    window = ResumeWindow(window_ms=20_000, fingerprint=b"f")
    request = stage.submit("r", resume=window)
    stage.submit("other")
    admit, other = stage.admits(worker)
    worker.runs(running(admit), running(other))
    stage.enter(Role.GATEWAY, "gateway-1")
    gateway.silent = True
    stage.pass_s(18.0)
    assert {abort.request_id for abort in stage.aborts(worker)} == {"other"}
    message = adopting(request)
    for wrong, error in (
        (msgspec.structs.replace(message, tenant=TenantId("else")), UnknownStream),
        (msgspec.structs.replace(message, request_id=RequestId("none")), UnknownStream),
        (msgspec.structs.replace(message, fingerprint=b"g"), InvalidRequest),
        (msgspec.structs.replace(message, owner=process("gateway-9")), Unavailable),
    ):
        with pytest.raises(error):
            stage.leader.adopt(wrong)
    adopted = stage.leader.adopt(message)
    assert adopted.changed
    assert adopted.submit.owner == message.owner
    stage.pass_s(0.1)
    (rebind,) = stage.rebinds()
    assert (rebind.owner, rebind.continues) == (message.owner, admit.attempt)
    assert not stage.leader.adopt(message).changed


def adopting(request: SubmitRequest, gateway: str = "gateway-1") -> AdoptRequest:
    """What a gateway sends at which the client of a request resumes it."""
    assert request.resume is not None
    return AdoptRequest(
        request_id=request.request_id,
        tenant=request.tenant,
        owner=process(gateway),
        fingerprint=request.resume.fingerprint,
    )


def test_output_that_ended_before_its_worker_died_is_sent_to_the_gateway_that_adopts_it() -> None:
    """No worker has it, so that it is begun again with its end."""
    stage, gateway, worker, detokenizer = usual()
    request = stage.submit("r", resume=ResumeWindow(window_ms=20_000))
    (first,) = stage.admits()
    gateway.follows(request.request_id, first.attempt)
    ended = ChoiceOutput(choice=0, output_ids=pack_ids([1]), finish_reason=FinishReason.STOP)
    detokenizer.accepted(first, choices=(ended,))
    stage.actors.remove(worker)
    stage.enter(Role.WORKER, "worker-0", 2)
    stage.enter(Role.GATEWAY, "gateway-1")
    stage.pass_s(4.0)
    assert stage.admits() == [first]
    stage.leader.adopt(adopting(request))
    stage.listen()
    (second,) = stage.admits()[1:]
    assert (second.owner, second.continues) == (process("gateway-1"), first.attempt)
    assert second.choices == (ended,)


def test_request_that_waits_with_its_end_is_queued_once_though_it_is_adopted_twice() -> None:
    stage, gateway, worker, detokenizer = usual()
    request = stage.submit("r", resume=ResumeWindow(window_ms=20_000))
    (first,) = stage.admits()
    gateway.follows(request.request_id, first.attempt)
    ended = ChoiceOutput(choice=0, output_ids=pack_ids([1]), finish_reason=FinishReason.STOP)
    detokenizer.accepted(first, choices=(ended,))
    stage.actors.remove(worker)
    stage.pass_s(4.0)
    for name in ("gateway-1", "gateway-2"):
        stage.enter(Role.GATEWAY, name).open[request.request_id] = open_entry(request)
        stage.leader.adopt(adopting(request, name))
        stage.pass_s(1.0)
    assert stage.leader.waiting == 1
    stage.enter(Role.WORKER, "worker-0", 2)
    stage.pass_s(1.0)
    (second,) = stage.admits()[1:]
    assert second.owner == process("gateway-2")


def test_output_that_had_ended_is_sent_to_a_gateway_that_adopts_it_while_its_worker_dies() -> None:
    """What is sealed then has been sent to the gateway before."""
    stage, gateway, worker, detokenizer = usual()
    request = stage.submit("r", resume=ResumeWindow(window_ms=20_000))
    (first,) = stage.admits()
    gateway.follows(request.request_id, first.attempt)
    ended = ChoiceOutput(choice=0, output_ids=pack_ids([1]), finish_reason=FinishReason.STOP)
    detokenizer.accepted(first, choices=(ended,))
    stage.enter(Role.GATEWAY, "gateway-1").open[request.request_id] = open_entry(request)
    worker.silent = True
    stage.leader.adopt(adopting(request))
    stage.enter(Role.WORKER, "worker-1")
    stage.pass_s(4.0)
    (second,) = stage.admits()[1:]
    assert (second.owner, second.choices) == (process("gateway-1"), (ended,))


def test_adopted_request_waits_for_a_gateway_that_has_not_got_the_answer() -> None:
    stage, gateway, worker, detokenizer = usual()
    request = stage.submit("r", resume=ResumeWindow(window_ms=20_000))
    (admit,) = stage.admits()
    worker.runs(sent_to(detokenizer.process, admit.request_id, admit.attempt))
    other = stage.enter(Role.GATEWAY, "gateway-1")
    assert stage.leader.adopt(adopting(request)).changed
    gateway.closes(request.request_id)
    stage.pass_s(5.0)
    assert not stage.leader.adopt(adopting(request)).changed
    stage.pass_s(5.0)
    other.open[request.request_id] = open_entry(request, admit.attempt)
    stage.pass_s(2.0)
    assert stage.leader.has_request(request.request_id)
    other.open.clear()
    stage.pass_s(2.0)
    assert not stage.leader.has_request(request.request_id)


def test_claims_of_media_where_a_request_is_adopted_go_to_its_worker_and_to_the_next_one() -> None:
    """The gateway that adopts it submits it again, once it has the media."""
    stage, gateway, worker, detokenizer = usual()
    resume, before = ResumeWindow(window_ms=20_000), (medium("gateway-0:1"),)
    request = stage.submit("r", resume=resume, media=before)
    (admit,) = stage.admits()
    gateway.follows(request.request_id, admit.attempt)
    worker.reports(sent_to(detokenizer.process, admit.request_id, admit.attempt))
    detokenizer.accepted(admit, [1, 2])
    other = stage.enter(Role.GATEWAY, "gateway-1")
    other.open[request.request_id] = open_entry(request, admit.attempt)
    adopted = stage.leader.adopt(adopting(request)).submit
    stage.listen()
    renewed = msgspec.structs.replace(adopted, media=(medium("gateway-1:1"),))
    for _ in range(2):  # a retry changes nothing
        stage.leader.submit(renewed)
        stage.listen()
    first, second = stage.rebinds()
    assert (first.media, second.media) == (before, renewed.media)
    assert (second.owner, second.continues) == (other.process, first.attempt)
    worker.silent = True
    stage.enter(Role.WORKER, "worker-1")
    stage.pass_s(4.0)
    (last,) = stage.admits()[1:]
    assert (last.media, last.choices[0].output_ids) == (renewed.media, pack_ids([1, 2]))


def test_rebind_of_a_request_that_no_other_gateway_can_adopt_leaves_its_media_as_they_are() -> None:
    stage, gateway, worker, detokenizer = usual()
    request = stage.submit("r", media=(medium("gateway-0:1"),))
    (admit,) = stage.admits()
    worker.reports(sent_to(detokenizer.process, admit.request_id, admit.attempt))
    gateway.follows(request.request_id, admit.attempt)
    detokenizer.silent = True
    stage.enter(Role.DETOKENIZER, "detokenizer-1")
    stage.pass_s(4.0)
    assert {rebind.media for rebind in stage.rebinds()} == {()}


def medium(address: str) -> Medium:
    claim = Claim(address=address, token="00", size_bytes=1, digest=bytes(32), expires_unix_ms=0)
    span = MediumSpan(start=0, tokens=4, key=bytes(32))
    return Medium(span=span, width=1, height=1, claim=claim)


def test_gateway_that_adopts_is_sent_all_though_the_rebinds_were_lost() -> None:
    """Two gateways have adopted it, and its worker has applied neither command."""
    stage, _, worker, detokenizer = usual()
    request = stage.submit("r", resume=ResumeWindow(window_ms=20_000))
    (admit,) = stage.admits()
    worker.runs(sent_to(detokenizer.process, admit.request_id, admit.attempt))
    for name in ("gateway-1", "gateway-2"):
        stage.enter(Role.GATEWAY, name).open[request.request_id] = open_entry(request)
        stage.leader.adopt(adopting(request, name))
    stage.listen()
    latest = stage.rebinds()[-1]
    stage.pass_s(3.0)
    again = stage.rebinds()[-1]
    assert (again.attempt, again.owner) == (latest.attempt, process("gateway-2"))
    assert again.continues == admit.attempt
    assert not stage.of(SealCall)


def test_rebound_request_that_its_worker_has_lost_continues_after_a_few_heartbeats() -> None:
    stage, gateway, worker, detokenizer = usual()
    request = stage.submit("r", resume=ResumeWindow(window_ms=20_000))
    (first,) = stage.admits()
    gateway.follows(request.request_id, first.attempt)
    worker.reports(sent_to(detokenizer.process, first.request_id, first.attempt))
    detokenizer.accepted(first, [1, 2])
    stage.enter(Role.GATEWAY, "gateway-1").open[request.request_id] = open_entry(
        request, first.attempt
    )
    stage.leader.adopt(adopting(request))
    worker.reports()
    stage.pass_s(3.0)
    (second,) = stage.admits()[1:]
    assert second.choices[0].output_ids == pack_ids([1, 2])
    assert second.owner == process("gateway-1")


def test_new_leader_calls_no_stream_unknown_before_all_have_reported() -> None:
    stage = Stage()
    stage.pass_s(1.2)
    assert stage.leader.term is not None
    stage.enter(Role.GATEWAY, "gateway-1").silent = True
    request = stage.request("r", resume=ResumeWindow(window_ms=20_000))
    with pytest.raises(Unavailable):
        stage.leader.adopt(adopting(request))
    stage.pass_s(2.0)
    with pytest.raises(UnknownStream):
        stage.leader.adopt(adopting(request))


def test_request_that_no_gateway_adopts_is_dropped_after_its_window() -> None:
    stage, gateway, worker, _ = usual()
    stage.submit("r", resume=ResumeWindow(window_ms=3000))
    (admit,) = stage.admits(worker)
    worker.runs(running(admit))
    gateway.silent = True
    stage.pass_s(30.0)
    assert {abort.request_id for abort in stage.aborts(worker)} == {"r"}
    assert not stage.leader.has_request(RequestId("r"))


def test_a_gateways_next_life_ends_the_requests_of_the_last() -> None:
    stage, gateway, _, _ = usual()
    stage.submit("r")
    stage.pass_s(2.0)
    stage.actors.remove(gateway)
    stage.enter(Role.GATEWAY, "gateway-0", life=2)
    stage.pass_s(2.0)  # until the last one counts as silent
    assert stage.leader.open_requests == 0


def test_unread_requests_of_a_dead_worker_keep_their_places_in_the_queue() -> None:
    """While they are sealed, the next one takes a slot."""
    stage, _, first, _ = usual(LeaderConfig(look_ahead=1))
    stage.submit_all(4)
    stage.actions.clear()
    stage.actors.remove(first)
    stage.enter(Role.WORKER, "worker-0", life=2)
    stage.pass_s(2.0)  # until the last one counts as silent
    again = stage.admits()
    assert [admit.request_id for admit in again] == ["r3", "r0", "r1"]
    assert [admit.attempt.n for admit in again] == [4, 5, 6]
    assert not stage.lost()


def test_read_request_without_output_anywhere_is_lost_with_notices_until_closed() -> None:
    stage, gateway, worker, _ = usual()
    request = stage.submit("r")
    (admit,) = stage.admits()
    gateway.follows(request.request_id, admit.attempt)
    worker.silent = True
    stage.pass_s(14.5)
    notices = stage.lost()
    assert len(notices) >= 3
    assert {(lost.attempt, lost.error.code) for lost in notices} == {(admit.attempt, "worker_lost")}
    with pytest.raises(WorkerLost):
        stage.leader.submit(request)
    gateway.closes(request.request_id)
    stage.actions.clear()
    stage.pass_s(2.0)
    assert not stage.lost()


def test_request_that_three_silent_workers_have_had_migrates_a_third_time_and_no_more() -> None:
    stage, _, worker, _ = usual()
    stage.submit("r")
    for life in (2, 3, 4, 5):
        stage.actors.remove(worker)
        stage.pass_s(3.0)
        worker = stage.enter(Role.WORKER, "worker-0", life)
        stage.pass_s(0.5)
    assert len(stage.admits()) == 4
    assert {(lost.request_id, lost.error.code) for lost in stage.lost()} == {("r", "worker_lost")}


def dead_twice(*others: str) -> tuple[Stage, Actor]:
    """Two workers have ended while they computed `poison`, of which one is back already."""
    stage, _, worker, _ = usual()
    stage.submit("poison")
    for name in others:
        stage.submit(name)
    for life in (2, 3):
        worker.runs(*map(running, stage.admits()))
        stage.pass_s(0.5)
        stage.actions.clear()
        stage.actors.remove(worker)
        stage.peers.on_exit(worker.process)
        worker = stage.enter(Role.WORKER, "worker-0", life)
        stage.pass_s(1.0)
    return stage, worker


def test_request_under_which_two_workers_have_ended_is_not_given_to_the_last_one() -> None:
    stage, _ = dead_twice()
    assert (stage.admits(), stage.lost()) == ([], [])
    stage.pass_s(10.0)
    (lost,) = {each.request_id: each for each in stage.lost()}.values()
    assert (lost.request_id, lost.error.code) == ("poison", "request_quarantined")
    assert not stage.admits()


def test_request_under_which_two_workers_have_ended_begins_alone_and_then_goes_on() -> None:
    stage, first = dead_twice()
    second = stage.enter(Role.WORKER, "worker-1")
    stage.pass_s(0.5)
    (admit,) = stage.admits()
    alone, other = (first, second) if stage.admits(first) else (second, first)
    for number in range(5):
        stage.submit(f"r{number}")
    assert not stage.admits(alone)[1:]
    assert [each.request_id for each in stage.admits(other)] == ["r0", "r1", "r2", "r3"]
    other.runs(*map(running, stage.admits(other)))
    alone.runs(held(RequestId("poison"), admit.attempt, tokens=7))
    stage.pass_s(1.0)
    assert not stage.admits(alone)[1:]
    alone.runs(held(RequestId("poison"), admit.attempt, tokens=8))
    stage.pass_s(1.0)
    assert [each.request_id for each in stage.admits(alone)[1:]] == ["r4"]


def test_request_that_is_too_long_for_all_workers_does_not_wait_to_begin_alone() -> None:
    stage, first = dead_twice()
    second = Actor(stage, Role.WORKER, process("worker-1"))
    stage.actors.append(second)
    for worker in (first, second):
        worker.set_load(context_tokens=4)
    stage.pass_s(1.0)
    assert {lost.error.code for lost in stage.lost()} == {"prompt_too_long"}


def test_request_that_ends_a_third_worker_is_quarantined_and_its_companions_are_not() -> None:
    stage, first = dead_twice("healthy")
    second = stage.enter(Role.WORKER, "worker-1")
    stage.pass_s(0.5)
    (admit,) = stage.admits()
    assert admit.request_id == "poison", "one at a time"
    alone = first if stage.admits(first) else second
    alone.runs(running(admit))
    stage.actors.remove(alone)
    stage.peers.on_exit(alone.process)
    stage.enter(Role.WORKER, alone.process.instance, 9)
    stage.pass_s(2.0)
    assert {(lost.request_id, lost.error.code) for lost in stage.lost()} == {
        ("poison", "request_quarantined")
    }
    assert {each.request_id for each in stage.admits()[1:]} == {"healthy"}


def test_running_requests_that_a_worker_hands_back_continue_on_another() -> None:
    stage, gateway, worker, detokenizer = usual()
    request = stage.submit("r")
    (first,) = stage.admits()
    gateway.follows(request.request_id, first.attempt)
    detokenizer.accepted(first, [1, 2])
    worker.state = ProcessState.DRAINING
    worker.set_load(hands_back=True)
    worker.reports(running(first))
    stage.pass_s(1.0)
    assert not stage.aborts(), "no other worker is ready"
    second = stage.enter(Role.WORKER, "worker-1")
    worker.reports(running(first))
    stage.pass_s(0.5)
    assert [abort.attempt for abort in stage.aborts(worker)][:1] == [first.attempt]
    (admit,) = stage.admits(second)
    assert (admit.continues, admit.choices[0].output_ids) == (first.attempt, pack_ids([1, 2]))
    assert not stage.lost()


def test_request_that_waited_at_a_worker_by_the_last_report_counts_its_death() -> None:
    """It may have begun since: one that kills its worker at once would never be counted."""
    stage, _, worker, _ = usual()
    stage.submit("r")
    for life in (2, 3):
        worker.runs(waiting(stage.admits()[-1]))
        stage.pass_s(0.5)
        stage.actors.remove(worker)
        stage.peers.on_exit(worker.process)
        worker = stage.enter(Role.WORKER, "worker-0", life)
        stage.pass_s(0.5)
    assert len(stage.admits()) == 2
    stage.enter(Role.WORKER, "worker-1")
    stage.pass_s(0.5)
    assert len(stage.admits()) == 3


def test_request_that_has_run_alone_is_not_quarantined_for_a_later_death() -> None:
    stage, first = dead_twice()
    second = stage.enter(Role.WORKER, "worker-1")
    stage.pass_s(0.5)
    (admit,) = stage.admits()
    alone = first if stage.admits(first) else second
    alone.runs(held(RequestId("poison"), admit.attempt, tokens=8))
    stage.pass_s(1.0)
    stage.actors.remove(alone)
    stage.peers.on_exit(alone.process)
    stage.pass_s(1.0)
    assert not stage.lost()
    assert len(stage.admits()) == 2


def test_of_two_attempts_the_one_that_the_owner_follows_goes_on() -> None:
    stage, gateway, _, _ = usual()
    request = stage.submit("r")
    (admit,) = stage.admits()
    old = other_attempt(0)
    second = stage.enter(Role.WORKER, "worker-1")
    gateway.follows(request.request_id, old)
    second.runs(held(request.request_id, old))
    stage.pass_s(0.6)
    assert [abort.attempt for abort in stage.aborts()][:1] == [admit.attempt]
    stage.pass_s(12.0)
    assert stage.leader.open_requests == 1
    assert not stage.aborts(second)


def test_earlier_attempt_without_a_follower_is_aborted() -> None:
    stage, *_ = usual()
    request = stage.submit("r")
    second = stage.enter(Role.WORKER, "worker-1")
    second.runs(held(request.request_id, other_attempt(0)))
    stage.pass_s(0.6)
    assert [abort.attempt for abort in stage.aborts(second)][:1] == [other_attempt(0)]


def test_request_that_an_earlier_leader_has_sealed_continues_once_all_workers_have_reported() -> (
    None
):
    stage, _, _, detokenizer = usual()
    second = stage.enter(Role.WORKER, "worker-1")
    stage.pass_s(0.5)
    old = other_attempt(0)
    for name in ("r", "s"):
        output = ChoiceOutput(choice=0, output_ids=pack_ids([5, 6]))
        detokenizer.outputs[RequestId(name)] = SealedRequest(
            request_id=RequestId(name), attempt=old, choices=(output,)
        )
    stage.submit("r", attempt_floor=old)
    stage.pass_s(1.6)
    (admit,) = stage.admits()
    assert (admit.continues, admit.choices[0].output_ids) == (old, pack_ids([5, 6]))
    stage.actions.clear()
    second.silent = True
    stage.submit("s", attempt_floor=old)
    stage.pass_s(2.0)
    admitted = [admit for admit in stage.admits() if admit.request_id == "s"]
    assert not admitted, "the silent one may run it"
    stage.pass_s(1.5)
    assert [admit.continues for admit in stage.admits() if admit.request_id == "s"] == [old]


def test_shown_attempt_that_no_worker_runs_ends_as_lost() -> None:
    stage, *_ = usual()
    request = stage.submit("r", attempt_floor=other_attempt(0))
    stage.pass_s(2.5)
    assert stage.leader.open_requests == 1, "a worker that is silent and not dead may run it"
    stage.pass_s(12.0)
    assert {lost.request_id for lost in stage.lost()} == {request.request_id}
    assert not stage.admits()


def test_request_whose_detokenizer_has_died_is_sent_to_another() -> None:
    stage, gateway, worker, detokenizer = usual()
    request = stage.submit("r")
    (admit,) = stage.admits()
    worker.runs(running(admit))
    gateway.follows(request.request_id, admit.attempt)
    detokenizer.silent = True
    stage.pass_s(4.0)
    assert not stage.rebinds(), "there is no other"
    another = stage.enter(Role.DETOKENIZER, "detokenizer-1")
    stage.pass_s(0.5)
    assert not stage.rebinds(), "its worker may be of a version that reads no such command"
    worker.runs(sent_to(detokenizer.process, admit.request_id, admit.attempt))
    stage.pass_s(0.7)
    (rebind,) = stage.rebinds()
    assert (rebind.detokenizer, rebind.continues) == ("detokenizer-1", admit.attempt)
    assert rebind.attempt > admit.attempt
    stage.pass_s(2.0)
    assert stage.rebinds()[1:] == [rebind], "its worker has not applied it"
    worker.runs(sent_to(another.process, rebind.request_id, rebind.attempt))
    stage.actions.clear()
    stage.pass_s(4.0)
    assert (stage.rebinds(), stage.admits(), stage.lost()) == ([], [], [])


def test_requests_of_a_dead_detokenizer_are_bound_to_the_next_process_of_its_name() -> None:
    """Tokens of an attempt are fixed by one process, and its successor accepts none of it."""
    stage, gateway, worker, detokenizer = usual()
    request = stage.submit("r")
    (admit,) = stage.admits()
    assert admit.detokenizer_incarnation == detokenizer.process.incarnation
    worker.runs(sent_to(detokenizer.process, admit.request_id, admit.attempt))
    gateway.follows(request.request_id, admit.attempt)
    detokenizer.silent = True
    stage.pass_s(2.0)
    successor = stage.enter(Role.DETOKENIZER, "detokenizer-0", 2)
    stage.pass_s(0.7)
    (rebind,) = stage.rebinds()
    assert rebind.detokenizer_incarnation == successor.process.incarnation


def test_leader_rebinds_a_request_whose_detokenizer_had_died_before_it_led() -> None:
    stage, _, worker, detokenizer = usual()
    old = other_attempt(0)
    worker.runs(sent_to(process("detokenizer-0", 0), RequestId("r"), old))
    stage.submit("r", attempt_floor=old)
    stage.pass_s(3.0)
    rebind = stage.rebinds()[0]
    assert (rebind.continues, rebind.detokenizer_incarnation) == (
        old,
        detokenizer.process.incarnation,
    )


def test_seal_by_an_earlier_process_of_a_detokenizers_name_does_not_count() -> None:
    stage, gateway, worker, detokenizer = usual()
    request = stage.submit("r")
    (admit,) = stage.admits()
    gateway.follows(request.request_id, admit.attempt)
    detokenizer.deaf = worker.silent = True
    stage.enter(Role.WORKER, "worker-1")
    stage.pass_s(3.0)
    call = stage.of(SealCall)[-1]
    zombie = process("detokenizer-0", 0)
    nothing = SealedRequest(request_id=request.request_id)
    stage.leader.on_sealed(call, AttemptsSealed(detokenizer=zombie, requests=(nothing,)))
    detokenizer.accepted(admit, [1, 2])
    detokenizer.deaf = False
    stage.pass_s(1.0)
    assert [choice.output_ids for choice in stage.admits()[-1].choices] == [pack_ids([1, 2])]


def test_read_request_of_a_dead_worker_continues_on_another() -> None:
    """The next attempt has all that was accepted, whichever attempt its gateway follows."""
    stage, gateway, worker, detokenizer = usual()
    request = stage.submit("r", choices=2)
    (first,) = stage.admits()
    gateway.follows(request.request_id, first.attempt)
    detokenizer.accepted(first, [1, 2], [3])
    for life in (2, 3):
        stage.actors.remove(worker)
        stage.pass_s(3.0)
        worker = stage.enter(Role.WORKER, "worker-0", life)
        stage.pass_s(0.5)
        if life == 2:
            detokenizer.accepted(stage.admits()[-1], [1, 2, 4], [3])
    _, second, third = stage.admits()
    assert (second.continues, second.lineage) == (first.attempt, ())
    assert [choice.output_ids for choice in second.choices] == [pack_ids([1, 2]), pack_ids([3])]
    assert (third.continues, third.lineage) == (second.attempt, (first.attempt,))
    assert [choice.output_ids for choice in third.choices] == [pack_ids([1, 2, 4]), pack_ids([3])]
    assert not stage.lost()


def test_request_that_has_ended_at_its_detokenizer_runs_nowhere_again() -> None:
    stage, gateway, worker, detokenizer = usual()
    request = stage.submit("r")
    (admit,) = stage.admits()
    gateway.follows(request.request_id, admit.attempt)
    ended = ChoiceOutput(choice=0, output_ids=pack_ids([1]), finish_reason=FinishReason.STOP)
    detokenizer.accepted(admit, choices=(ended,))
    stage.actors.remove(worker)
    stage.enter(Role.WORKER, "worker-0", 2)
    stage.pass_s(20.0)
    assert (stage.admits(), stage.lost()) == ([admit], [])
    gateway.closes(request.request_id)
    assert stage.leader.open_requests == 0


def test_late_attempt_of_another_leader_is_sealed_instead() -> None:
    """The detokenizer follows an attempt that this leader did not know."""
    stage, gateway, worker, detokenizer = usual()
    request = stage.submit("r")
    earlier, later = other_attempt(0), other_attempt(0, n=2)
    gateway.follows(request.request_id, earlier)
    worker.reports(held(request.request_id, earlier))
    detokenizer.outputs[request.request_id] = SealedRequest(
        request_id=request.request_id, attempt=later, sealed=False
    )
    stage.actors.remove(worker)
    stage.enter(Role.WORKER, "worker-0", 2)
    stage.pass_s(4.0)
    asked = [call.message.requests[0].attempt for call in stage.of(SealCall)]
    assert asked[:2] == [earlier, later]
    assert set(asked[2:]) == {later}


def test_output_of_a_dead_host_continues_from_what_its_owner_has_delivered() -> None:
    stage, gateway, worker, detokenizer = usual()
    request = stage.submit("r", choices=2)
    (first,) = stage.admits()
    gateway.follows(request.request_id, first.attempt)
    worker.silent = detokenizer.silent = True
    stage.enter(Role.WORKER, "worker-1")
    stage.enter(Role.DETOKENIZER, "detokenizer-1")
    stage.pass_s(3.0)
    asked = SealRequest(request_id=request.request_id, attempt=first.attempt)
    assert set(stage.owner_seals()) == {asked}
    outputs = tuple(ChoiceOutput(choice=n, output_ids=pack_ids(range(n + 1))) for n in range(2))
    sealed = OwnerSeal(sealed_to=first.attempt, attempts=(first.attempt,), choices=outputs)
    again = msgspec.structs.replace(request, attempt_floor=first.attempt, sealed=sealed)
    stage.leader.submit(again)
    stage.pass_s(0.5)
    (second,) = stage.admits()[1:]
    assert (second.continues, second.lineage, second.owner_sealed) == (first.attempt, (), True)
    assert (second.detokenizer, second.choices) == ("detokenizer-1", outputs)
    stage.leader.submit(again)
    stage.pass_s(0.5)
    assert {admit.attempt for admit in stage.admits()[1:]} == {second.attempt}
    assert not stage.lost()


@pytest.mark.parametrize("adopted", [False, True])
def test_owner_whose_list_names_no_attempt_yet_is_asked_after_the_death_of_a_host(
    adopted: bool,
) -> None:
    """It, or the gateway that was before it, may have shown text of one."""
    stage, _, worker, detokenizer = usual()
    owner = stage.enter(Role.GATEWAY, "gateway-1").process
    request = stage.submit("r", resume=ResumeWindow(window_ms=20_000, fingerprint=b"f"))
    (admit,) = stage.admits()
    worker.runs(running(admit))
    stage.pass_s(0.5)
    if adopted:
        assert stage.leader.adopt(adopting(request)).attempt is None
        stage.pass_s(0.5)
    worker.silent = detokenizer.silent = True
    stage.enter(Role.WORKER, "worker-1")
    stage.enter(Role.DETOKENIZER, "detokenizer-1")
    stage.pass_s(3.0)
    assert not [one for one in stage.admits() if one.continues is None and one != admit]
    (asked,) = {batch.gateway for batch in stage.of(NoticeBatch) if batch.seals}
    assert asked == (owner if adopted else request.owner)


def test_attempt_that_its_owner_has_sealed_is_not_adopted_by_a_new_leader() -> None:
    """Another leader has asked the owner, which refuses the text of what still runs."""
    stage, *_ = usual()
    old = other_attempt(0)
    second = stage.enter(Role.WORKER, "worker-1")
    second.reports(held(RequestId("r"), old))
    output = ChoiceOutput(choice=0, output_ids=pack_ids([5]))
    sealed = OwnerSeal(sealed_to=old, attempts=(old,), choices=(output,))
    stage.submit("r", attempt_floor=old, sealed=sealed)
    stage.pass_s(0.6)
    assert [abort.attempt for abort in stage.aborts(second)][:1] == [old]
    assert {(admit.continues, admit.choices) for admit in stage.admits()} == {(old, (output,))}


def test_output_that_ended_at_a_detokenizer_which_died_is_sealed_by_its_owner() -> None:
    stage, gateway, worker, detokenizer = usual()
    request = stage.submit("r")
    (admit,) = stage.admits()
    gateway.follows(request.request_id, admit.attempt)
    ended = ChoiceOutput(choice=0, output_ids=pack_ids([1]), finish_reason=FinishReason.STOP)
    detokenizer.accepted(admit, choices=(ended,))
    worker.silent = True
    stage.pass_s(3.0)
    assert not stage.owner_seals()
    detokenizer.silent = True
    stage.pass_s(3.0)
    assert {seal.attempt for seal in stage.owner_seals()} == {admit.attempt}


def test_later_attempt_that_the_owner_follows_is_sealed_in_place_of_the_known_one() -> None:
    stage, gateway, worker, detokenizer = usual()
    request = stage.submit("r")
    (admit,) = stage.admits()
    gateway.follows(request.request_id, admit.attempt)
    worker.silent = detokenizer.silent = True
    stage.pass_s(3.0)
    later = msgspec.structs.replace(admit.attempt, n=9)
    gateway.follows(request.request_id, later)
    stage.pass_s(1.0)
    assert stage.owner_seals()[0].attempt == admit.attempt
    assert stage.owner_seals()[-1].attempt == later


def test_output_of_a_term_that_no_election_gives_is_given_up() -> None:
    """No attempt of this leader comes after it, so none would be followed."""
    stage, gateway, worker, detokenizer = usual()
    request = stage.submit("r")
    later = other_attempt(2**40)
    gateway.follows(request.request_id, later)
    worker.reports(held(request.request_id, later))
    detokenizer.outputs[request.request_id] = SealedRequest(
        request_id=request.request_id, attempt=later, choices=(ChoiceOutput(choice=0),)
    )
    stage.actors.remove(worker)
    stage.enter(Role.WORKER, "worker-0", 2)
    stage.pass_s(4.0)
    assert {lost.request_id for lost in stage.lost()} == {request.request_id}


def test_request_whose_output_might_not_fit_into_detokenizers_is_refused() -> None:
    """Until others end. What has been accepted before is accepted again."""
    rules = LeaderConfig(output_bytes_max=100, tenant_output_bytes_max=70)
    stage = Stage(rules)
    gateway, *_ = stage.usual()
    first = stage.submit("r", output_bytes=60)
    other = TenantId("other")
    with pytest.raises(Overloaded, match=r"20 bytes beside 60 bytes of .* of this tenant"):
        stage.submit("s", output_bytes=20)
    with pytest.raises(Overloaded, match=r"50 bytes beside 60 bytes .* of all tenants"):
        stage.submit("t", tenant=other, output_bytes=50)
    stage.submit("u", tenant=other, output_bytes=40)
    stage.leader.submit(first)
    stage.submit("v", tenant=other, output_bytes=90, attempt_floor=other_attempt(0))
    stage.enter(Role.DETOKENIZER, "detokenizer-1")
    third = TenantId("third")
    with pytest.raises(Overloaded, match="all tenants"):
        stage.submit("w", tenant=third, output_bytes=11)
    stage.submit("w", tenant=third, output_bytes=10)
    gateway.closes("r")
    gateway.closes("v")
    stage.submit("x", output_bytes=70)
    with pytest.raises(Overloaded, match="this tenant"):
        stage.submit("y", output_bytes=1)
    with pytest.raises(InvalidRequest, match=r"may take 71 bytes; the limit is 70 bytes"):
        stage.submit("z", output_bytes=71)


def test_requests_that_do_not_fit_into_an_answer_are_sealed_by_the_next_ones() -> None:
    stage, gateway, worker, detokenizer = usual()
    detokenizer.answers_max = 1
    for name in ("q", "r", "s"):
        stage.submit(name)
    for admit in stage.admits():
        gateway.follows(admit.request_id, admit.attempt)
        detokenizer.accepted(admit, [1])
    stage.actors.remove(worker)
    stage.enter(Role.WORKER, "worker-1")
    stage.pass_s(3.0)
    calls = [[one.request_id for one in call.message.requests] for call in stage.of(SealCall)]
    assert calls == [["q", "r", "s"], ["r", "s"], ["s"]]
    assert [admit.request_id for admit in stage.admits()[3:]] == ["q", "r", "s"]


@pytest.mark.parametrize(
    ("size_bytes", "bytes_max"),
    [(1_200_000, LeaderConfig().payload_bytes_max), (20_000_000, DETAILS_BYTES_MAX)],
)
def test_output_that_is_too_large_is_lost_with_its_size_and_the_limit(
    size_bytes: int, bytes_max: int
) -> None:
    stage, gateway, worker, detokenizer = usual()
    stage.submit("r")
    (admit,) = stage.admits()
    gateway.follows(admit.request_id, admit.attempt)
    detokenizer.accepted(admit, size_bytes=size_bytes)
    stage.actors.remove(worker)
    stage.enter(Role.WORKER, "worker-1")
    stage.pass_s(3.0)
    error = stage.lost()[0].error
    assert error.code == "worker_lost"
    assert error.details == {"size_bytes": str(size_bytes), "bytes_max": str(bytes_max)}
    assert f"{size_bytes} bytes" in error.message
    assert f"{bytes_max} bytes" in error.message


def large(*, prompt_tokens: int) -> tuple[Stage, Actor, Admit]:
    """The stage after a worker's death; 900,000 bytes of token outputs were sealed."""
    stage, gateway, worker, detokenizer = usual()
    worker.set_load(context_tokens=100_000)
    worker.beat()
    sampling = SamplingParams(max_new_tokens=10, details=TokenOutputParams(hidden=True))
    prompt_ids = pack_ids(range(prompt_tokens))
    stage.submit("r", sampling=sampling, prompt_ids=prompt_ids)
    (admit,) = stage.admits()
    gateway.follows(admit.request_id, admit.attempt)
    outputs = TokenOutputs(count=2, token_ids=pack_ids([1, 2]), hidden=bytes(900_000))
    output = ChoiceOutput(choice=0, output_ids=pack_ids([1, 2]), details=outputs)
    detokenizer.accepted(admit, choices=(output,))
    stage.actors.remove(worker)
    return stage, detokenizer, admit


@pytest.mark.parametrize(("prompt_tokens", "kept"), [(8, False), (60_000, True)])
def test_token_outputs_stay_at_the_detokenizer_where_the_prompt_leaves_no_room(
    prompt_tokens: int, *, kept: bool
) -> None:
    stage, _, _ = large(prompt_tokens=prompt_tokens)
    stage.enter(Role.WORKER, "worker-1").set_load(context_tokens=100_000)
    stage.pass_s(3.0)
    (output,) = stage.admits()[-1].choices
    assert output.output_ids == pack_ids([1, 2])
    assert (output.details is None) == kept


def test_token_outputs_of_a_detokenizer_that_dies_before_they_are_continued_are_its_owners() -> (
    None
):
    stage, detokenizer, first = large(prompt_tokens=60_000)
    stage.pass_s(3.0)
    stage.actors.remove(detokenizer)
    stage.enter(Role.DETOKENIZER, "detokenizer-1")
    stage.pass_s(3.0)
    seals = [one for notice in stage.of(NoticeBatch) for one in notice.seals]
    assert {(one.request_id, one.attempt) for one in seals} == {("r", first.attempt)}
    stage.enter(Role.WORKER, "worker-1").set_load(context_tokens=100_000)
    stage.pass_s(1.0)
    assert stage.admits() == [first]


def test_output_that_is_not_sealed_is_given_up() -> None:
    stage, gateway, worker, detokenizer = usual()
    request = stage.submit("r")
    (admit,) = stage.admits()
    gateway.follows(request.request_id, admit.attempt)
    detokenizer.deaf = True
    stage.actors.remove(worker)
    stage.enter(Role.WORKER, "worker-0", 2)
    stage.pass_s(8.0)
    assert (len(stage.of(SealCall)), len(stage.owner_seals()) > 5) == (3, True)
    assert not stage.lost()
    stage.pass_s(6.0)
    assert {lost.request_id for lost in stage.lost()} == {request.request_id}


def test_nothing_dies_while_the_link_is_down() -> None:
    stage, _, worker, _ = usual()
    stage.submit("r")
    worker.runs(running(stage.admits()[0]))
    stage.pass_s(0.6)
    stage.link_up = False
    stage.pass_s(20.0)
    stage.link_up = True
    stage.pass_s(3.0)
    assert stage.leader.open_requests == 1
    assert not stage.aborts()
    assert len(stage.admits()) == 1
