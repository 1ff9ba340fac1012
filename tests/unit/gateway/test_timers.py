"""The owner's timers, and its driver: times in order, each once, and errors logged once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from antiphon.gateway.owner.driver import OwnerDriver
from antiphon.gateway.owner.timers import Timers
from antiphon.wire.base import Process
from antiphon.wire.errors import Overloaded
from antiphon.wire.ids import Incarnation, InstanceId, ModelName, RequestId
from antiphon.wire.submit import CancelRequest


def test_a_key_wakes_at_the_time_it_was_set_to_last() -> None:
    timers: Timers[str] = Timers()
    timers.set("a", 1.0)
    timers.set("b", 2.0)
    timers.set("a", 3.0)
    timers.set("c", 2.5)
    timers.drop("c")
    assert timers.pop_due(1.5) is None
    assert [timers.pop_due(9.0) for _ in range(3)] == ["b", "a", None]


def test_distant_times_that_were_dropped_take_no_room() -> None:
    timers: Timers[int] = Timers()
    for key in range(10_000):
        timers.set(key, 600.0)
        if key % 100:
            timers.drop(key)
    assert len(timers._heap) < 300
    woken = [timers.pop_due(600.0) for _ in range(101)]
    assert woken == [*range(0, 10_000, 100), None]


@pytest.mark.parametrize(
    ("error", "message"),
    [(ZeroDivisionError(), "call failed"), (Overloaded("later"), "cancel failed at the leader")],
    ids=["a bug", "refused"],
)
async def test_driver_logs_a_failed_call_once(
    error: Exception, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise error

    answered: list[bool] = []
    owner: Any = SimpleNamespace(
        cancel_answered=lambda _, accepted: answered.append(accepted) or ()
    )
    runtime: Any = SimpleNamespace(bus=SimpleNamespace(call=fail))
    nothing: Any = SimpleNamespace()
    driver = OwnerDriver(owner, runtime, ModelName("m"), nothing)
    process = Process(instance=InstanceId("g"), incarnation=Incarnation("1"))
    cancel = CancelRequest(request_id=RequestId("r"), owner=process, deadline_unix_ms=0)
    with caplog.at_level("INFO"):
        await driver._cancel(cancel)
    assert [record.message for record in caplog.records] == [message]
    assert answered == [False]
