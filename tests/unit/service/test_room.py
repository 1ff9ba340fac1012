"""Bounds whose lists would not fit a message are refused at the start."""

from __future__ import annotations

import msgspec
import pytest
from tests.support.memory_bus import MemoryBroker, MemoryTransport
from tests.support.services import running
from tests.unit.gateway.cluster import settings

from antiphon.gateway.service import GatewayService
from antiphon.service.startup import (
    HELD_ENTRY_BYTES,
    OPEN_ENTRY_BYTES,
    CannotStart,
    check_message_fits,
)
from antiphon.wire.base import Attempt, Process, Term
from antiphon.wire.heartbeat import RunningRequest
from antiphon.wire.ids import Incarnation, InstanceId, new_request_id
from antiphon.wire.submit import OpenRequest

SCHEDULER = Process(
    instance=InstanceId("scheduler-of-a-long-name-0"), incarnation=Incarnation("f" * 16)
)
ATTEMPT = Attempt(term=Term(number=2**31, scheduler=SCHEDULER), n=2**31)


def test_what_a_line_is_taken_to_need_is_enough() -> None:
    line = OpenRequest(request_id=new_request_id(), deadline_unix_ms=2**50, attempt=ATTEMPT)
    held = RunningRequest(
        request_id=new_request_id(), attempt=ATTEMPT, tokens=2**31, ended=True, waiting=True
    )
    assert len(msgspec.msgpack.encode(line)) <= OPEN_ENTRY_BYTES
    assert len(msgspec.msgpack.encode(held)) <= HELD_ENTRY_BYTES


def test_the_largest_bound_that_fits_is_named_and_fits() -> None:
    with pytest.raises(CannotStart, match=r"queue = 9999: must be at most 836, .* 100000 bytes"):
        check_message_fits("queue", 9999, each_bytes=100, message_bytes_max=100_000)
    check_message_fits("queue", 836, each_bytes=100, message_bytes_max=100_000)


async def test_a_gateway_with_more_requests_than_its_list_can_name_does_not_start() -> None:
    chosen = settings(requests_max=100_000)
    with pytest.raises(ExceptionGroup) as raised:
        async with running(GatewayService, MemoryTransport(MemoryBroker()), settings=chosen):
            pass
    assert raised.group_contains(CannotStart, match=r"gateway\.requests_max = 100000")
