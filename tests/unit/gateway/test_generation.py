"""What is sent to a NATS client again, while its events are still queued."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from antiphon.config.tenants import TenantConfig
from antiphon.gateway.access.limits import QuotaReservation, Tenant
from antiphon.gateway.nats.generation import NatsGeneration
from antiphon.gateway.owner.actions import Ended, Finished, TextDelta
from antiphon.gateway.stream.stream import RequestStream
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


def generation() -> NatsGeneration:
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
    made = NatsGeneration(request, DEFAULT_TENANT, b"", cast("Delivery", None))
    hold = QuotaReservation(Tenant(TenantConfig(), 0.0))
    trace = span("test").start()
    made.open(RequestStream(submit, trace, hold, api="generate", received_at=0.0, submitted_at=0.0))
    return made


def test_end_is_replayed_only_with_all_the_text_before_it() -> None:
    sent = generation()
    for event in (
        TextDelta(0, 0, "hello"),
        Finished(0, FinishReason.STOP, None, 5),
        Ended(Usage(prompt_tokens=1, completion_tokens=1)),
    ):
        sent.stream.put(event, 0.0)
    assert list(sent.replay(())) == []  # it waits in the stream, its text with it
    sent.record_all(sent.stream.get_nowait())
    text, end = sent.replay(())
    assert isinstance(end, GenerateEnd)
    assert (end.choices[0].text_bytes, end.choices[0].finish_reason) == (5, FinishReason.STOP)
    assert getattr(text, "text", None) == "hello"
