"""The owner under loss, repetition, disorder and death: each byte once, one end each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.simulation.owner_world import (
    ME,
    MODEL,
    TIMEOUT_S,
    Detokenizer,
    Received,
    World,
    medium,
    open_by,
    renew_media,
    submission,
)

from antiphon.gateway.owner.actions import Action, Deliver, Ended, TextDelta
from antiphon.gateway.owner.request import OwnedRequest
from antiphon.wire.base import Attempt, FinishReason, Term
from antiphon.wire.codec import pack_ids
from antiphon.wire.command import ChoiceOutput
from antiphon.wire.errors import (
    Cancelled,
    DeadlineExceeded,
    Internal,
    Overloaded,
    RequestTooLarge,
    Unavailable,
    WorkerLost,
    encode_error,
)
from antiphon.wire.heartbeat import StreamSeq
from antiphon.wire.ids import RequestId
from antiphon.wire.sampling import SamplingParams, TokenOutputParams
from antiphon.wire.seal import SealRequest
from antiphon.wire.submit import (
    CancelRequest,
    LostRequest,
    NoticeBatch,
    OpenList,
    OwnerSeal,
    RequestAdopted,
    ResumeWindow,
    SubmitAccepted,
    SubmitRequest,
)
from antiphon.wire.text import ResumeText, TextBatch, TextRow
from antiphon.wire.token_outputs import TokenOutputs, TokenOutputsChunk

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SECOND_S = 1.0


@pytest.mark.parametrize("seed", range(60))
def test_every_client_gets_a_prefix_of_the_truth_and_one_end(seed: int) -> None:
    """Loss of anything, late and double batches, clients that leave, leaders and a death."""
    world = busy(World(seed, loss=0.15), requests=12)
    world.later(0.35, world.lead_anew)
    if seed % 3 == 0:
        world.later(0.3, world.kill_detokenizer)
    world.run(until=2 * TIMEOUT_S)
    for request_id, received in world.received.items():
        assert received.ended is not None, f"seed {seed}: {request_id} has no end"
        assert received.ended_at <= received.opened_at + TIMEOUT_S
        assert world.truth[request_id].startswith(received.text), f"seed {seed}: {request_id}"
        if received.ended.error is None:
            assert received.text == world.truth[request_id], f"seed {seed}: {request_id}"
            assert received.ended.usage.completion_tokens == 20
    check_lists(world)


@pytest.mark.parametrize("seed", range(60))
def test_all_text_of_an_adopted_request_arrives_though_nothing_follows_it(seed: int) -> None:
    world = busy(World(seed, loss=0.15), requests=2)
    adopted = RequestId("of another gateway")
    world.later(0.1, lambda: world.adopt(adopted))
    world.run(until=TIMEOUT_S)
    received = world.received[adopted]
    assert received.text == world.truth[adopted]
    assert received.ended is not None
    assert received.ended.error is None


@pytest.mark.parametrize("seed", range(20))
def test_loss_alone_costs_no_answer(seed: int) -> None:
    world = busy(World(seed, loss=0.15), requests=8, leaving=0.0)
    world.run(until=2 * TIMEOUT_S)
    errors = [h.ended.error for h in world.received.values() if h.ended is not None]
    assert errors == [None] * 8, f"seed {seed}"
    assert world.asks > 0


def test_nothing_is_asked_for_that_was_not_lost() -> None:
    world = busy(World(1, loss=0.0), requests=8, leaving=0.0)
    world.send = lambda event: world.later(0.001, event)  # in order, too
    world.run(until=10.0)
    assert world.asks == 0
    assert all(received.text == world.truth[r] for r, received in world.received.items())


def test_text_that_comes_again_is_cut_off_inside_a_row() -> None:
    world, say = talking("añb")
    say(2, text="ñb日", n=1, begin=1)
    assert received(world).text == "añb日"


def test_higher_attempt_is_shown_only_if_it_continues_the_shown_one() -> None:
    world, say = talking("one")
    say(2, text="another story", n=2)
    assert received(world).text == "one"
    say(3, text=" more", n=3, begin=3, continues=1)
    assert received(world).text == "one more"
    say(4, text=" stale, and longer", n=1, begin=8)
    assert received(world).text == "one more"


def test_higher_attempt_is_followed_while_nothing_was_shown() -> None:
    world, say = talking("")
    say(2, text="fresh", n=2)
    assert received(world).text == "fresh"
    followed = world.lists[-1].opened[0].attempt
    assert followed is not None
    assert followed.n == 2


def test_resubmitting_names_the_attempt_that_was_shown() -> None:
    world, _ = talking("shown")
    world.clock.advance(SECOND_S)
    world.owner.leader_changed(numbered(world, 2))
    submits = [a for a in world.owner.tick() if isinstance(a, SubmitRequest)]
    assert [s.attempt_floor for s in submits] == [attempt(world, 1)]


def test_a_leader_that_answers_before_its_first_heartbeat_gets_all_requests() -> None:
    """One that the leader before had queued would wait for a minute otherwise."""
    world = waiting(loss=0.0)
    world.do(world.owner.leader_changed(world.term))
    world.do(world.owner.leader_changed(None))
    later, fresh = RequestId("later"), numbered(world, 2)
    world.do(world.owner.open(submission(later, world.clock)))
    accepted = SubmitAccepted(request_id=later, term=fresh, position=0)
    world.owner.submit_answered(later, accepted)
    world.owner.leader_changed(fresh)
    world.clock.advance(SECOND_S)
    submits = [a.request_id for a in world.owner.tick() if isinstance(a, SubmitRequest)]
    assert submits == [RequestId("r")]


def test_deadline_ends_a_request_while_the_bus_is_down() -> None:
    world = waiting()
    world.run(until=TIMEOUT_S - 0.01)
    assert received(world).ended is None
    world.run(until=TIMEOUT_S)
    assert isinstance(end(world).error, DeadlineExceeded)


def test_request_that_no_leader_takes_is_refused_before_long() -> None:
    world = World(0, loss=1.0)
    world.open(RequestId("r"))
    world.run(until=8.0)
    error = end(world).error
    assert isinstance(error, Unavailable)
    assert error.retry_after_s is not None


def test_full_queue_ends_a_new_request_and_never_a_running_one() -> None:
    full = Overloaded("full", retry_after_s=2.0)
    world = World(0)
    world.open(RequestId("r"))
    world.do(world.owner.submit_answered(RequestId("r"), full))
    assert end(world).error is full
    running, _ = talking("text")
    running.do(running.owner.submit_answered(RequestId("r"), full))
    assert received(running).ended is None


def test_cancel_is_repeated_until_the_leader_takes_it() -> None:
    world, request_id, actions = cancelled()
    assert isinstance(ended_in(actions).error, Cancelled)
    assert cancels(actions) == [request_id]
    world.owner.cancel_answered(request_id, accepted=False)
    world.clock.advance(SECOND_S)
    assert cancels(world.owner.tick()) == [request_id]
    world.owner.cancel_answered(request_id, accepted=True)
    world.clock.advance(SECOND_S)
    assert cancels(world.owner.tick()) == []


def test_cancel_is_given_up_when_the_tombstone_has_gone() -> None:
    world, request_id, _ = cancelled()
    world.clock.advance(TIMEOUT_S + 10.0)
    world.owner.cancel_answered(request_id, accepted=False)
    world.clock.advance(SECOND_S)
    assert cancels(world.owner.tick()) == []


def test_client_that_does_not_read_loses_its_request() -> None:
    world, say = talking("")
    world.owner.mark_consumed = lambda request_id, size: None  # type: ignore[method-assign]
    say(2, text="x" * 4096, n=1)
    assert received(world).ended is None
    say(3, text="y", n=1, begin=4096)
    error = end(world).error
    assert isinstance(error, Cancelled)
    assert error.details == {"unread_bytes": "4097", "bytes_max": "4096"}


def test_notice_of_the_leader_ends_a_request_unless_a_later_attempt_is_shown() -> None:
    world, say = talking("text")
    notify(world, notice(world, n=0))
    assert received(world).ended is None
    stale = msgspec.structs.replace(notice(world, n=1), not_after_unix_ms=0)
    notify(world, stale)
    assert received(world).ended is None
    notify(world, notice(world, n=1))
    assert isinstance(end(world).error, WorkerLost)
    say(2, text=" late", n=1, begin=4)
    assert received(world).text == "text"


def test_what_waits_is_not_submitted_again_every_few_seconds() -> None:
    world = waiting()
    assert resubmitted(world, for_s=15.0) == []


def test_what_the_leader_has_forgotten_is_submitted_to_it_again() -> None:
    world = waiting()
    notify(world, lacking(world), lacking(world))
    assert resubmitted(world, for_s=1.0) == ["r"]
    notify(world, lacking(world))
    assert resubmitted(world, for_s=1.0) == [], "it is under way"
    world.do(world.owner.submit_answered(RequestId("r"), accepted(world)))
    notify(world, lacking(world))
    assert resubmitted(world, for_s=1.0) == ["r"]


def test_what_another_leader_lacks_is_not_its_to_ask_for() -> None:
    world = waiting()
    notify(world, msgspec.structs.replace(lacking(world), leader=numbered(world, 2)))
    assert resubmitted(world, for_s=1.0) == []


def test_the_next_life_of_a_dead_leader_is_heeded_whatever_its_name() -> None:
    """Alone, and before any worker has obeyed it, it begins at the same number."""
    world = waiting()
    dead = world.term.scheduler
    life = msgspec.structs.replace(dead, incarnation="again")
    again = msgspec.structs.replace(world.term, scheduler=life)
    assert again < world.term
    lead(world, world.term, None, again)
    assert resubmitted(world, for_s=1.0) == ["r"]


@pytest.mark.parametrize("number", [9, 2**32, 2**62, 2**63 - 1])
def test_a_forged_term_is_heeded_no_longer_than_it_is_claimed(number: int) -> None:
    """The true leader's notices count again with its next heartbeat, lower as its term is."""
    world, _ = talking("text")
    lead(world, world.term, numbered(world, number), world.term)
    notify(world, notice(world, n=1))
    assert isinstance(end(world).error, WorkerLost)


def test_a_new_owner_heeds_a_leader_whatever_its_number() -> None:
    world = waiting()
    lead(world, numbered(world, 2**32 + 1))
    assert resubmitted(world, for_s=1.0) == ["r"]


def test_the_term_of_an_answer_does_not_outlast_the_next_heartbeat() -> None:
    """Any process can answer a submit, under any term."""
    world = waiting()
    answer = msgspec.structs.replace(accepted(world), term=numbered(world, 2**40))
    world.do(world.owner.submit_answered(RequestId("r"), answer))
    lead(world, world.term)
    notify(world, lacking(world))
    assert resubmitted(world, for_s=1.0) == ["r"]


def test_batch_for_an_earlier_life_of_the_gateway_is_ignored() -> None:
    world, _ = talking("text")
    batch = batch_of(world, 2, text="!", n=1, begin=4)
    earlier = msgspec.structs.replace(ME, incarnation="earlier")
    assert world.owner.text_arrived(msgspec.structs.replace(batch, gateway=earlier)) == []


def test_text_that_does_not_join_ends_the_request_as_a_bug() -> None:
    world, say = talking("ab")
    say(2, text="ñ", n=1, begin=1)
    assert isinstance(end(world).error, Internal)


def test_row_beyond_the_text_is_dropped_and_asked_for() -> None:
    world, _ = talking("ab")
    actions = world.owner.text_arrived(batch_of(world, 2, text="z", n=1, begin=5))
    asked = [action for action in actions if isinstance(action, ResumeText)]
    assert [place.text_offset for place in asked[0].places] == [2]
    assert not any(isinstance(a, Deliver) and isinstance(a.event, TextDelta) for a in actions)


def test_sealed_output_is_submitted_and_only_a_later_attempt_that_continues_it_is_shown() -> None:
    world, say = talking("on", ids=(7, 8))
    say(2, text="e", n=1, begin=2, ids=(9,), tokens=3)
    (submit,) = seal(world, 1)
    output = ChoiceOutput(choice=0, output_ids=pack_ids((7, 8, 9)))
    assert submit.attempt_floor == attempt(world, 1)
    assert submit.sealed == OwnerSeal(
        sealed_to=attempt(world, 1), attempts=(attempt(world, 1),), choices=(output,)
    )
    say(3, text=" late", n=1, begin=3, ids=(1,), tokens=4)
    assert received(world).text == "one"
    say(4, text=" more", n=2, begin=3, continues=1, ids=(7, 8, 9, 5))
    assert received(world).text == "one more"
    (submit,) = seal(world, 2)
    assert submit.sealed is not None
    assert submit.sealed.attempts == (attempt(world, 1), attempt(world, 2))
    assert submit.sealed.choices[0].output_ids == pack_ids((7, 8, 9, 5))


def test_seal_of_an_attempt_before_the_shown_one_changes_nothing() -> None:
    world, say = talking("one", ids=(7,))
    say(2, text=" two", n=2, begin=3, continues=1, ids=(7, 8))
    (submit,) = seal(world, 1)
    assert (submit.attempt_floor, submit.sealed) == (attempt(world, 2), None)
    say(3, text=" three", n=2, begin=7, ids=(9,), tokens=3)
    assert received(world).text == "one two three"


def test_sealed_request_without_output_begins_again() -> None:
    world, say = talking("", ids=(7,))
    (submit,) = seal(world, 1)
    assert submit.sealed == OwnerSeal(sealed_to=attempt(world, 1))
    say(2, text="fresh", n=2, ids=(8,))
    (submit,) = seal(world, 2)
    assert submit.sealed is not None
    assert submit.sealed.choices[0].output_ids == pack_ids((8,))


def test_request_that_was_sealed_without_output_follows_no_attempt() -> None:
    """Nothing continues the one that its open list has named."""
    world, _ = talking("", ids=(7,))
    one = SealRequest(request_id=RequestId("r"), attempt=attempt(world, 1))
    batch = msgspec.structs.replace(notice(world, 1), requests=(), seals=(one,))
    changes = [each for each in world.owner.notice_arrived(batch) if isinstance(each, OpenList)]
    assert [line.attempt for change in changes for line in change.opened] == [None]


def test_ids_without_token_outputs_give_way_to_those_of_the_next_attempt() -> None:
    world = World(0, 0.0)
    sampling = SamplingParams(max_new_tokens=8, details=TokenOutputParams(logprobs=True))
    submit = msgspec.structs.replace(submission("r", world.clock), sampling=sampling)
    request = OwnedRequest(submit, 0.0)

    def say(n: int, begin: int, text: str, ids: Sequence[int], outputs: int) -> None:
        (row,) = batch_of(
            world, n, text=text, n=n, begin=begin, continues=n - 1 or None, ids=ids
        ).rows
        logprobs = TokenOutputs(count=outputs, token_ids=pack_ids(ids[:outputs]))
        row = msgspec.structs.replace(row, details=TokenOutputsChunk(offset=0, details=logprobs))
        assert request.follow(row, world.detokenizer.process)
        assert list(request.apply(row))

    def sealed(n: int) -> bytes:
        assert request.seal(attempt(world, n))
        found = request.submission(0.0).sealed
        assert found is not None
        return found.choices[0].output_ids

    say(1, 0, "a", (7, 8), outputs=1)  # half a character follows
    assert sealed(1) == pack_ids((7,))
    say(2, 1, "b", (7, 9), outputs=2)
    assert sealed(2) == pack_ids((7, 9))


@pytest.mark.parametrize(("has", "lost"), [("", True), ("on", True), ("one", False)])
def test_adopted_output_is_sealed_only_if_it_has_all_that_the_client_has(
    has: str, lost: bool
) -> None:
    """The client has read 3 bytes at another gateway: another text must not follow them."""
    world, request_id = World(0, 0.0), RequestId("r")
    world.lost.add(request_id)
    world.received[request_id] = Received(0.0)
    adopted = RequestAdopted(
        submit=submission("r", world.clock),
        term=world.term,
        attempt=attempt(world, 1),
        changed=True,
    )
    world.do(world.owner.adopt(adopted, client_has=((3, None),)))
    if has:
        ids = range(len(has))
        row = batch_of(world, 1, text=has, n=2, continues=1, ids=ids)
        world.do(world.owner.text_arrived(row))
    submits = seal(world, 2)
    assert (not submits, received(world).ended is not None) == (lost, lost)


def test_text_of_a_request_that_was_adopted_without_an_answer_is_fetched() -> None:
    """Its client left before the leader's answer came, and its text was dropped; it comes again."""
    world, request_id = World(0, 0.0), RequestId("r")
    world.lost.add(request_id)
    first = ended(batch_of(world, 1, text="all", n=1))
    assert world.owner.text_arrived(first) == []
    world.received[request_id] = Received(0.0)
    adopted = RequestAdopted(
        submit=submission("r", world.clock), term=world.term, attempt=None, changed=False
    )
    actions = world.owner.adopt(adopted)
    sender = world.detokenizer.process
    assert [a.detokenizer for a in actions if isinstance(a, ResumeText)] == [sender]
    world.do(world.owner.text_arrived(msgspec.structs.replace(first, seq=2)))
    assert received(world).text == "all"


@pytest.mark.parametrize("seed", range(40))
def test_claims_of_renewed_media_reach_the_leader_whatever_is_lost(seed: int) -> None:
    renew_media(seed)


def test_media_of_a_request_that_has_ended_are_not_submitted() -> None:
    world = World(0, 0.0)
    assert world.owner.renew_media(RequestId("r"), (medium("here:1"),)) == []
    submit = msgspec.structs.replace(
        submission("r", world.clock), resume=ResumeWindow(window_ms=20_000)
    )
    world.received[RequestId("r")] = Received(0.0)
    world.do(world.owner.open(submit))
    world.do(world.owner.submit_answered(RequestId("r"), accepted(world)))
    world.do(world.owner.text_arrived(ended(batch_of(world, 1, text="all", n=1))))
    assert world.owner.renew_media(RequestId("r"), (medium("here:1"),)) == []


def test_rewound_output_is_sealed_before_any_of_it_is_delivered_again() -> None:
    """Its client has it: neither is it begun anew, nor is an attempt followed that begins anew."""
    world, say = talking("one", ids=(7, 8))
    world.received[RequestId("r")] = Received(0.0)
    world.do(world.owner.rewind(RequestId("r")))
    (submit,) = seal(world, 1)
    assert submit.attempt_floor == attempt(world, 1)
    assert submit.sealed is not None
    assert submit.sealed.choices[0].output_ids == pack_ids((7, 8))
    say(2, text="another", n=2, ids=(9,))
    assert received(world).text == ""
    say(3, text="one more", n=3, continues=1, ids=(7, 8, 9))
    assert received(world).text == "one more"


def test_end_that_is_kept_is_submitted_to_a_leader_that_has_just_changed() -> None:
    world = World(0, 0.0)
    resume = ResumeWindow(window_ms=20_000)
    world.received[RequestId("r")] = Received(0.0)
    submit = msgspec.structs.replace(submission("r", world.clock), resume=resume)
    world.do(world.owner.open(submit))
    world.do(world.owner.submit_answered(RequestId("r"), accepted(world)))
    lead(world, numbered(world, 2))
    world.do(world.owner.text_arrived(ended(batch_of(world, 1, text="all", n=1))))
    assert resubmitted(world, for_s=0.1) == ["r"]


def test_output_without_ids_is_not_sealed_and_ends_as_lost() -> None:
    """A detokenizer of an earlier version sends none."""
    world, _ = talking("one")
    assert seal(world, 1) == []
    assert isinstance(end(world).error, WorkerLost)


def test_sealed_output_that_is_larger_than_a_message_ends_its_request_as_lost() -> None:
    """The request that its client has sent is not too large."""
    world, _ = talking("one", ids=(7,))
    seal(world, 1)
    too_large = RequestTooLarge.of(size_bytes=2_000_000, bytes_max=1_048_576)
    world.do(world.owner.submit_answered(RequestId("r"), too_large))
    error = end(world).error
    assert isinstance(error, WorkerLost)
    assert "2000000 bytes" in error.message
    assert "1048576 bytes" in error.message


def test_missing_ids_are_fetched_although_no_text_is_missing() -> None:
    world, _ = talking("ab", ids=(7,))
    actions = world.owner.text_arrived(
        batch_of(world, 2, text="c", n=1, begin=2, ids=(9,), tokens=3)
    )
    asked = [action for action in actions if isinstance(action, ResumeText)]
    assert [(place.text_offset, place.tokens) for place in asked[0].places] == [(2, 1)]


def test_resumed_end_is_fetched_from_the_detokenizer_that_has_it_by_then() -> None:
    """The one that had sent it has died since, and its rows have moved with another attempt."""
    world = World(0, 0.0)
    submit = submission("r", world.clock)
    resume = ResumeWindow(window_ms=20_000)
    world.received[RequestId("r")] = Received(0.0)
    world.do(world.owner.open(msgspec.structs.replace(submit, resume=resume)))
    world.do(world.owner.submit_answered(RequestId("r"), accepted(world)))
    first = world.detokenizer.process
    world.do(world.owner.text_arrived(ended(batch_of(world, 1, text="all", n=1))))
    assert received(world).ended is not None
    world.do(world.owner.detokenizer_died(first))
    world.detokenizer = Detokenizer("second", world.term)
    again = ended(batch_of(world, 1, text="all", n=2, continues=1))
    world.do(world.owner.text_arrived(again))
    world.received[RequestId("r")] = Received(0.0)
    actions = world.owner.rewind(RequestId("r"))
    assert [a.detokenizer for a in actions if isinstance(a, ResumeText)] == [
        world.detokenizer.process
    ]
    world.do(world.owner.text_arrived(msgspec.structs.replace(again, seq=2)))
    assert (received(world).text, end(world).error) == ("all", None)


def test_nothing_is_fetched_from_a_dead_detokenizer_until_it_is_back() -> None:
    world, _ = talking("ab")
    sender = world.detokenizer.process
    world.do(world.owner.detokenizer_died(sender))
    world.received[RequestId("r")] = Received(0.0)
    actions = world.owner.rewind(RequestId("r"))
    assert not [action for action in actions if isinstance(action, ResumeText)]
    actions = world.owner.detokenizer_heartbeat(sender, ())
    assert [type(action) for action in actions] == [ResumeText]
    assert not world.owner.detokenizer_heartbeat(sender, ())


def test_lost_tail_shows_in_the_heartbeats() -> None:
    world, _ = talking("ab")
    sender = world.detokenizer.process
    streams = (StreamSeq(receiver=ME.instance, seq=2),)
    # The first one may have overtaken the batch that it counts.
    assert world.owner.detokenizer_heartbeat(sender, streams) == []
    actions = world.owner.detokenizer_heartbeat(sender, streams)
    assert [type(action) for action in actions] == [ResumeText]


def test_end_is_announced_at_once() -> None:
    world, _ = talking("ab")
    world.leave(RequestId("r"))
    assert world.lists[-1].closed == ("r",)
    assert not world.lists[-1].whole


def test_dead_detokenizer_ends_no_request() -> None:
    """Another one sends its text again, under an attempt that continues this one."""
    world, _ = talking("ab")
    world.do(world.owner.detokenizer_died(world.detokenizer.process))
    assert not [received for received in world.received.values() if received.ended]


def test_open_list_goes_before_the_submit() -> None:
    world = World(0)
    kinds = [type(action) for action in world.owner.open(submission("r", world.clock))]
    assert kinds == [OpenList, SubmitRequest]


def busy(world: World, requests: int, leaving: float = 0.2) -> World:
    """Open requests over half a second; some of their clients leave."""
    for n in range(requests):
        request_id = RequestId(f"r{n}")
        world.later(world.random.uniform(0, 0.5), lambda r=request_id: world.open(r))
        if world.random.random() < leaving:
            world.later(world.random.uniform(0.5, 1.5), lambda r=request_id: world.leave(r))
    world.beat()
    world.step()
    return world


def check_lists(world: World) -> None:
    """Versions grow by one, and together the lists say that nothing is open."""
    versions = [message.version for message in world.lists]
    assert versions == list(range(1, len(versions) + 1))
    assert all(message.model == MODEL and message.owner == ME for message in world.lists)
    assert open_by(world.lists) == set()
    assert world.owner.open_count == 0


def batch_of(
    world: World,
    seq: int,
    *,
    text: str,
    n: int,
    begin: int = 0,
    continues: int | None = None,
    ids: Sequence[int] = (),
    tokens: int | None = None,
) -> TextBatch:
    """Text of the detokenizer in an attempt; `begin` in bytes. `ids` are the last of `tokens`."""
    row = TextRow(
        request_id=RequestId("r"),
        choice=0,
        attempt=attempt(world, n),
        continues=None if continues is None else attempt(world, continues),
        text_offset=begin,
        text=text,
        tokens=len(ids) if tokens is None else tokens,
        ids=pack_ids(ids),
    )
    return TextBatch(detokenizer=world.detokenizer.process, gateway=ME, seq=seq, rows=(row,))


def ended(batch: TextBatch) -> TextBatch:
    """The same with the end of the choice in its last row."""
    *rows, last = batch.rows
    last = msgspec.structs.replace(last, finish_reason=FinishReason.STOP)
    return msgspec.structs.replace(batch, rows=(*rows, last))


def talking(text: str, ids: Sequence[int] = ()) -> tuple[World, Callable[..., None]]:
    """A world whose one request has been accepted and has shown `text`."""
    world = waiting(loss=0.0)

    def say(seq: int, **said: Any) -> None:
        world.do(world.owner.text_arrived(batch_of(world, seq, **said)))

    say(1, text=text, n=1, ids=ids)
    return world, say


def seal(world: World, n: int) -> list[SubmitRequest]:
    """What the owner submits when the leader asks it to seal an attempt."""
    one = SealRequest(request_id=RequestId("r"), attempt=attempt(world, n))
    batch = msgspec.structs.replace(notice(world, n), requests=(), seals=(one,))
    actions = world.owner.notice_arrived(batch)
    world.do(actions)
    world.do(world.owner.submit_answered(RequestId("r"), accepted(world)))
    return [action for action in actions if isinstance(action, SubmitRequest)]


def attempt(world: World, n: int) -> Attempt:
    return Attempt(term=world.term, n=n)


def accepted(world: World) -> SubmitAccepted:
    return SubmitAccepted(request_id=RequestId("r"), term=world.term, position=0)


def received(world: World) -> Received:
    return world.received[RequestId("r")]


def end(world: World) -> Ended:
    ended = received(world).ended
    assert ended is not None
    return ended


def notice(world: World, n: int) -> NoticeBatch:
    lost = LostRequest(
        request_id=RequestId("r"),
        attempt=attempt(world, n),
        error=encode_error(WorkerLost("the worker died")),
    )
    return NoticeBatch(
        leader=world.term,
        gateway=ME,
        requests=(lost,),
        not_after_unix_ms=world.clock.unix_ms() + 1000,
    )


def notify(world: World, *batches: NoticeBatch) -> None:
    for batch in batches:
        world.do(world.owner.notice_arrived(batch))


def lead(world: World, *terms: Term | None) -> None:
    for term in terms:
        world.do(world.owner.leader_changed(term))


def numbered(world: World, number: int) -> Term:
    """The world's term under another number."""
    return msgspec.structs.replace(world.term, number=number)


def lacking(world: World) -> NoticeBatch:
    """The leader knows nothing of the request."""
    return msgspec.structs.replace(notice(world, n=1), requests=(), lacking=(RequestId("r"),))


def cancelled() -> tuple[World, RequestId, Sequence[Action]]:
    """A world whose one request was cancelled at once, and what that led to."""
    world, request_id = World(0), RequestId("r")
    world.owner.open(submission(request_id, world.clock))
    return world, request_id, world.owner.cancel(request_id)


def waiting(loss: float = 1.0) -> World:
    """A world whose one request has been accepted and waits for its turn."""
    world = World(0, loss)
    world.open(RequestId("r"))
    world.do(world.owner.submit_answered(RequestId("r"), accepted(world)))
    return world


def resubmitted(world: World, for_s: float) -> list[RequestId]:
    """What the owner submits meanwhile, without an answer."""
    until = world.clock.now() + for_s
    found: list[RequestId] = []
    while (at := world.owner.wake_at()) <= until:
        world.clock.advance(max(0.0, at - world.clock.now()))
        found += [a.request_id for a in world.owner.tick() if isinstance(a, SubmitRequest)]
    world.clock.advance(until - world.clock.now())
    return found


def ended_in(actions: Sequence[Action]) -> Ended:
    found = [a.event for a in actions if isinstance(a, Deliver) and isinstance(a.event, Ended)]
    assert len(found) == 1
    return found[0]


def cancels(actions: Sequence[Action]) -> list[RequestId]:
    return [a.request_id for a in actions if isinstance(a, CancelRequest)]
