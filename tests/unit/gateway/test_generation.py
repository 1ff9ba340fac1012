"""What a NATS client is told again, while its events are still under way."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from antiphon.config.tenants import TenantConfig
from antiphon.gateway.access.tenant import Hold, Tenant
from antiphon.gateway.nats.generation import Generation
from antiphon.gateway.owner.actions import Ended, Finished, Said
from antiphon.gateway.stream import Stream
from antiphon.telemetry.tracing import span
from antiphon.wire.base import FinishReason, Process, Usage
from antiphon.wire.generate import GenerateEnd, GenerateRequest
from antiphon.wire.ids import (
    DEFAULT_TENANT,
    ClientKey,
    Incarnation,
    InstanceId,
    ModelName,
    RequestId,
)
from antiphon.wire.sampling import SamplingParams
from antiphon.wire.submit import SubmitRequest

if TYPE_CHECKING:
    from antiphon.bus.bus import Delivery

GATEWAY = Process(instance=InstanceId("gateway-0"), incarnation=Incarnation("1"))


def generation() -> Generation:
    request = GenerateRequest(key=ClientKey("k"), model=ModelName("m"), prompt="hi")
    submit = SubmitRequest(
        request_id=RequestId("r"),
        owner=GATEWAY,
        tenant=DEFAULT_TENANT,
        model=request.model,
        digest=b"",
        prompt_ids=b"",
        sampling=SamplingParams(max_new_tokens=8),
        deadline_unix_ms=0,
    )
    made = Generation(request, DEFAULT_TENANT, b"", cast("Delivery", None))
    hold = Hold(Tenant(DEFAULT_TENANT, TenantConfig(), 0.0))
    trace = span("test").start()
    made.enter(Stream(submit, trace, hold, door="generate", came_at=0.0, opened_at=0.0))
    return made


def test_terminal_is_said_again_only_with_all_the_text_before_it() -> None:
    told = generation()
    for event in (
        Said(0, 0, "hello"),
        Finished(0, FinishReason.STOP, None, 5),
        Ended(Usage(prompt_tokens=1, completion_tokens=1)),
    ):
        told.stream.put(event, 0.0)
    assert list(told.again(())) == []  # it waits in the stream, its text with it
    told.hear_all(told.stream.rest())
    text, end = told.again(())
    assert isinstance(end, GenerateEnd)
    assert (end.choices[0].text_bytes, end.choices[0].finish_reason) == (5, FinishReason.STOP)
    assert getattr(text, "text", None) == "hello"
