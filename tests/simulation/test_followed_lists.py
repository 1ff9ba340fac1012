"""Lists are followed by their changes, and repaired within two beats."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.simulation.list_worlds import (
    PART_MAX,
    OpenListWorld,
    heartbeat,
    open_lists,
    running_lists,
)
from tests.simulation.owner_world import ME, MODEL, submission
from tests.support.clock import ManualClock
from tests.support.worker import LEADER, WORKER, FakeEngine, admit

from antiphon.config.gateway import GatewayConfig
from antiphon.gateway.owner.actions import Action, Deliver
from antiphon.gateway.owner.machine import Owner
from antiphon.model_worker.protocol.worker_output import RunChoice, WorkerOutput
from antiphon.service.followed_lists import OpenLists
from antiphon.service.sequence import SeqSender
from antiphon.wire.base import Term
from antiphon.wire.command import CommandBatch
from antiphon.wire.ids import RequestId
from antiphon.wire.submit import (
    FetchOpenList,
    OpenList,
    OpenListState,
    SubmitAccepted,
    SubmitRequest,
)

if TYPE_CHECKING:
    from antiphon.model_worker.batching.state import ChoiceKey


@pytest.mark.parametrize("seed", range(60))
def test_copies_of_open_lists_are_whole_two_beats_after_any_losses(seed: int) -> None:
    open_lists(seed)


@pytest.mark.parametrize("seed", range(60))
def test_copies_of_running_lists_are_whole_two_beats_after_any_losses(seed: int) -> None:
    running_lists(seed)


def test_a_long_list_is_sent_in_parts_that_are_complete_with_the_state_after_them() -> None:
    world = OpenListWorld(1)
    world.loss = 1.0
    while len(world.open) < 2 * PART_MAX + 1:
        world.change()
    messages = world.owner.open_list_requested(FetchOpenList(gateway=ME))
    lists = [each for each in messages if isinstance(each, OpenList)]
    assert [(one.whole, len(one.opened), one.parts) for one in lists] == [
        (True, PART_MAX, 3),
        (False, PART_MAX, 3),
        (False, 1, 3),
    ]
    copy = OpenLists()
    for message in lists:
        change = copy.apply(message, 0.0)
        assert change is not None
        assert change.lines is None, "complete too early"
    (state,) = [each for each in messages if isinstance(each, OpenListState)]
    change = copy.apply(state, 0.0)
    assert change is not None
    assert change.lines is not None
    assert change.lines.keys() == world.open


def test_a_state_that_was_overtaken_or_a_list_for_another_process_changes_nothing() -> None:
    world = OpenListWorld(2)
    world.change()
    copy = OpenLists()
    (early,) = [each for each in world.owner.tick() if isinstance(each, OpenListState)]
    world.clock.advance(1.0)
    (*parts, _) = world.owner.open_list_requested(FetchOpenList(gateway=ME))
    for part in parts:
        assert isinstance(part, OpenList)
        copy.apply(part, 0.0)
    assert copy.apply(early, 0.0) is None
    other = msgspec.structs.replace(ME, incarnation="another")
    world.clock.advance(1.0)
    assert world.owner.open_list_requested(FetchOpenList(gateway=other)) == []


def quiet_second(requests: int, *, states: bool) -> tuple[int, int]:
    """Messages and bytes that an owner sends in a minute in which nothing happens, by second."""
    clock = ManualClock()
    owner = Owner(ME, MODEL, clock, GatewayConfig(), states_read=lambda: states)
    term = Term(number=1, scheduler=ME)
    sent: list[Action] = owner.leader_changed(term)
    accepted = (RequestId(f"{number:032x}") for number in range(requests))
    for request_id in accepted:
        owner.open(submission(request_id, clock, 1e6))
        answer = SubmitAccepted(request_id=request_id, term=term, position=0)
        owner.submit_answered(request_id, answer)
    sent, quiet_s = [], 120
    until = clock.now() + quiet_s
    while owner.wake_at() < until:
        clock.advance(owner.wake_at() - clock.now())
        for action in owner.tick():
            sent.append(action)
            if isinstance(action, SubmitRequest):
                answer = SubmitAccepted(request_id=action.request_id, term=term, position=0)
                owner.submit_answered(action.request_id, answer)
    messages = [each for each in sent if not isinstance(each, Deliver)]
    size = sum(len(msgspec.msgpack.encode(each)) for each in messages)
    return len(messages) // quiet_s, size // quiet_s


def busy_worker(requests: int) -> tuple[WorkerOutput, FakeEngine, list[ChoiceKey]]:
    """A worker that generates one choice of each request, and has reported them."""
    output, engine = WorkerOutput(WORKER, SeqSender(), live_max=requests), FakeEngine()
    commands = tuple(admit(f"{number:032x}", number + 1) for number in range(requests))
    batch = CommandBatch(
        leader=LEADER, worker=WORKER, seq=1, commands=commands, not_after_unix_ms=2**50
    )
    actions = output.command(batch, 0)
    keys = [action.key for action in actions if isinstance(action, RunChoice)]
    output.started(keys)
    output.step(1, [engine.progress(key, [7]) for key in keys])
    output.list_changes()
    return output, engine, keys


def sent_by(output: WorkerOutput) -> tuple[int, int]:
    """Messages and bytes of a heartbeat, and of the changes before it."""
    listed, changes = output.list_changes()
    messages = [*changes, heartbeat(listed)]
    return len(messages), sum(len(msgspec.msgpack.encode(each)) for each in messages)


def test_heartbeats_of_a_quiet_worker_do_not_grow_with_what_it_runs() -> None:
    few, *many = [sent_by(busy_worker(requests)[0]) for requests in (16, 256, 1_024)]
    for messages, size in many:
        assert messages == few[0] == 1
        assert size <= 1.1 * few[1]
    output, _, _ = busy_worker(1_024)
    assert len(msgspec.msgpack.encode(output.held())) > 100 * few[1], "this measures nothing"


def test_tokens_change_a_running_list_as_often_as_their_number_doubles() -> None:
    output, engine, (key,) = busy_worker(1)
    changes = 0
    for step in range(2, 65):
        output.step(step, [engine.progress(key, [7])])
        changes += len(output.list_changes()[1])
    assert changes == 6, "2, 4, 8, 16, 32 and 64"


def test_what_a_quiet_owner_sends_does_not_grow_with_what_waits() -> None:
    few, many = quiet_second(200, states=True), quiet_second(20_000, states=True)
    assert many[0] <= 1.1 * few[0]
    assert many[1] <= 1.1 * few[1]
    _, whole_lists = quiet_second(20_000, states=False)
    assert whole_lists > 100 * many[1], "this measures nothing"
