"""Streams of earlier requests, whose clients ask for the rest of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.gateway.requests.client_ids import ClientIds, client_id
from antiphon.gateway.stream.stream import RequestStream
from antiphon.telemetry.tracing import span
from antiphon.wire.submit import AdoptRequest, ResumeWindow, SubmitRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.gateway.access.limits import QuotaReservation
    from antiphon.gateway.owner.driver import OwnerDriver
    from antiphon.gateway.request_metrics import GatewayMetrics
    from antiphon.gateway.requests.generation_request import GenerationRequest
    from antiphon.gateway.requests.renewed_media import RenewedMedia
    from antiphon.service.service import Runtime
    from antiphon.wire.ids import RequestId


@dataclass(frozen=True, eq=False)
class ResumedStreams:
    """Opens streams once more, which may be of another gateway until then."""

    runtime: Runtime
    driver: OwnerDriver
    metrics: GatewayMetrics
    ids: ClientIds
    media: RenewedMedia

    async def open(
        self,
        gen_request: GenerationRequest,
        window: ResumeWindow,
        request_id: RequestId,
        client_has: Sequence[tuple[int, int | None]],
        reservation: QuotaReservation,
    ) -> RequestStream:
        message = AdoptRequest(
            request_id=request_id,
            tenant=gen_request.tenant,
            owner=self.runtime.process,
            fingerprint=window.fingerprint,
        )
        # The leader is asked in any case: another gateway may have adopted it meanwhile.
        adopted = await self.driver.adopt(message)
        submit = adopted.submit
        # The leader may have changed the owner before, on a call whose answer did not arrive here.
        if adopted.changed or self.driver.find(request_id) is None:
            stream = self._stream(submit, gen_request, reservation)
            self.driver.open_adopted(stream, adopted, client_has)
            self.media.begin(gen_request, submit)
            return stream

        def ended_before() -> RequestStream:
            stream = self._stream(submit, gen_request, reservation)
            stream.counted = True
            return stream

        return self.driver.resume(request_id, ended_before)

    def _stream(
        self, submit: SubmitRequest, gen_request: GenerationRequest, reservation: QuotaReservation
    ) -> RequestStream:
        now = self.runtime.clock.now()
        trace = span(
            f"gateway.{gen_request.api}",
            submit.traceparent,
            request_id=submit.request_id,
            tenant=submit.tenant,
        ).start()
        stream = RequestStream(
            submit,
            trace,
            reservation,
            api=gen_request.api,
            received_at=now,
            submitted_at=now,
            accepted_at=now,
            resumed=True,
        )
        thinking = submit.stop.thinking
        stream.starts_in_reasoning = thinking is not None and thinking.inside
        stream.labels = self.metrics.custom.current()
        self._take_name(stream, gen_request)
        return stream

    def _take_name(self, stream: RequestStream, gen_request: GenerationRequest) -> None:
        """Give a resumed stream its id, unless another request has taken that meanwhile."""
        name = client_id(gen_request)
        for stale in self.driver.streams():
            if stale.submit.request_id == stream.submit.request_id and stale.name == name:
                stale.name = None
                self.ids.free(name)
                break
        if self.ids.take(name):
            stream.name = name
