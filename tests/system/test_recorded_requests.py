"""What clients depend on stays: recorded requests get the recorded status, error and shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.system import recorded

if TYPE_CHECKING:
    from tests.system.stack import Stack

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


def test_recorded_requests_get_their_recorded_answers(json_stack: Stack) -> None:
    exchanges = recorded.load()
    assert len(exchanges) >= 300
    played = recorded.play(json_stack.url, [exchange["send"] for exchange in exchanges])
    pairs = zip(played, exchanges, strict=True)
    assert [pair for pair in pairs if not recorded.same(*pair)] == []


def test_shapes_leave_out_values_but_not_names_types_and_order() -> None:
    finished = {"finish_reason": "stop", "text": "a", "logprob": -0.5}
    assert recorded.shape(finished) == "{finish_reason: 'stop', logprob: number, text: str}"
    assert recorded.shape([1, "a", 2, None]) == "[null|number|str]"
    assert recorded.shape({"finish_reason": "length"}) != recorded.shape({"finish_reason": "stop"})
    assert recorded.shape({"top_logprobs": {"b": 1.0}}) == "{top_logprobs: {text: number}}"


def test_only_events_that_may_merge_may_be_missing() -> None:
    chunks = ["{finish_reason: null, text: str}", "{finish_reason: 'stop', text: str}", "[DONE]"]
    whole = {"send": [], "status": 200, "events": chunks}
    assert recorded.same(whole, whole)
    assert recorded.same({**whole, "events": chunks[1:]}, whole)
    assert not recorded.same({**whole, "events": chunks[:2]}, whole)
    assert not recorded.same({**whole, "events": chunks[::-1]}, whole)
    assert not recorded.same({**whole, "events": ["{finish_reason: null}", *chunks]}, whole)
    assert not recorded.same({**whole, "status": 201}, whole)
