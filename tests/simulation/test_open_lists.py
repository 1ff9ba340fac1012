"""Open lists are followed by their changes, and repaired within two beats."""

from __future__ import annotations

import msgspec
import pytest
from tests.simulation.open_list_world import PART_MAX, World, live
from tests.simulation.owner_world import ME, MODEL, submission
from tests.support.clock import ManualClock

from antiphon.config.gateway import GatewayConfig
from antiphon.gateway.owner.actions import Action, Deliver
from antiphon.gateway.owner.machine import Owner
from antiphon.service.open_lists import OpenLists
from antiphon.wire.base import Term
from antiphon.wire.ids import RequestId
from antiphon.wire.submit import (
    FetchOpenList,
    OpenList,
    OpenListState,
    SubmitAccepted,
    SubmitRequest,
)


@pytest.mark.parametrize("seed", range(60))
def test_copies_are_whole_two_beats_after_any_losses(seed: int) -> None:
    live(seed)


def test_a_long_list_is_sent_in_parts_that_are_complete_with_the_state_after_them() -> None:
    world = World(1)
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
        assert change.requests is None, "complete too early"
    (state,) = [each for each in messages if isinstance(each, OpenListState)]
    change = copy.apply(state, 0.0)
    assert change is not None
    assert change.requests is not None
    assert change.requests.keys() == world.open


def test_a_state_that_was_overtaken_or_a_list_for_another_process_changes_nothing() -> None:
    world = World(2)
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


def test_what_a_quiet_owner_sends_does_not_grow_with_what_waits() -> None:
    few, many = quiet_second(200, states=True), quiet_second(20_000, states=True)
    assert many[0] <= 1.1 * few[0]
    assert many[1] <= 1.1 * few[1]
    _, whole_lists = quiet_second(20_000, states=False)
    assert whole_lists > 100 * many[1], "this measures nothing"
