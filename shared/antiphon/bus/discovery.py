"""Discovery verbs of NATS microservices (ADR-32) for one process.

`nats micro ls` and the console list processes with them. Our routes are plain subscriptions, not
endpoints of `nats.micro`, which runs its handlers one at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypedDict

import msgspec

from antiphon.wire.base import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from antiphon.bus.transport import Packet, PacketCallback, Subscription, Transport
    from antiphon.wire.base import Process

PREFIX = "$SRV"
VERBS = ("PING", "INFO", "STATS")
OPERATOR = "operator"
"""The party of tools outside the request path, such as the command line."""
DISCOVERY_CLIENTS = (Role.GATEWAY, OPERATOR)
"""Parties that may send the verbs: the gateway, for the console, and the operator."""


@dataclass(slots=True)
class EndpointCounters:
    """One route of a process and its counters, updated by the handler of its messages."""

    name: str
    subject: str
    queue: str = ""
    requests: int = 0
    errors: int = 0
    last_error: str = ""
    processing_s: float = 0.0

    def count(self, seconds: float, error: str = "") -> None:
        self.requests += 1
        self.processing_s += seconds
        if error:
            self.errors += 1
            self.last_error = error


class EndpointInfo(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    subject: str
    queue_group: str


class EndpointStats(EndpointInfo, frozen=True, kw_only=True):
    """An endpoint in the `STATS` response; times in nanoseconds."""

    num_requests: int
    num_errors: int
    last_error: str
    processing_time: int
    average_processing_time: int


class Pong(msgspec.Struct, frozen=True, kw_only=True):
    """The `PING` response, and the common fields of the others."""

    type: str = "io.nats.micro.v1.ping_response"
    name: str
    id: str
    version: str
    metadata: dict[str, str]


class ServiceInfo(Pong, frozen=True, kw_only=True):
    type: str = "io.nats.micro.v1.info_response"
    description: str
    endpoints: tuple[EndpointInfo, ...]


class ServiceStats(Pong, frozen=True, kw_only=True):
    type: str = "io.nats.micro.v1.stats_response"
    started: str
    endpoints: tuple[EndpointStats, ...]


class _Identity(TypedDict):
    name: str
    id: str
    version: str
    metadata: dict[str, str]


class Discovery:
    """Responds to the verbs for one process. `endpoints` are read for each response."""

    def __init__(
        self,
        transport: Transport,
        *,
        role: Role,
        process: Process,
        version: str,
        description: str,
        endpoints: Sequence[EndpointCounters],
        metadata: dict[str, str] | None = None,
    ) -> None:
        self._transport = transport
        self._role = role
        self._description = description
        self._endpoints = endpoints
        self._identity: _Identity = {
            "name": service_name(role),
            "id": str(process.incarnation),
            "version": version,
            "metadata": {"instance": str(process.instance), **(metadata or {})},
        }
        self._started = datetime.now(UTC).isoformat(timespec="milliseconds")

    async def listen(self) -> Sequence[Subscription]:
        """Start responding. The caller drains the returned subscriptions."""
        responses = {"PING": self._pong, "INFO": self._info, "STATS": self._stats}
        return [
            await self._transport.subscribe(subject, self._responder(responses[verb]))
            for verb in VERBS
            for subject in subjects(verb, self._role, self._identity["id"])
        ]

    def _responder(self, response: Callable[[], Pong]) -> PacketCallback:
        def receive(packet: Packet) -> None:
            if packet.reply is not None:
                self._transport.publish(packet.reply, msgspec.json.encode(response()))

        return receive

    def _pong(self) -> Pong:
        return Pong(**self._identity)

    def _info(self) -> ServiceInfo:
        return ServiceInfo(
            **self._identity,
            description=self._description,
            endpoints=tuple(
                EndpointInfo(name=e.name, subject=e.subject, queue_group=e.queue)
                for e in self._endpoints
            ),
        )

    def _stats(self) -> ServiceStats:
        return ServiceStats(
            **self._identity,
            started=self._started,
            endpoints=tuple(map(_stats_of, self._endpoints)),
        )


def service_name(role: Role) -> str:
    return f"antiphon-{role}"


def subjects(verb: str, role: Role, instance: str = "*") -> Sequence[str]:
    return (
        f"{PREFIX}.{verb}",
        f"{PREFIX}.{verb}.{service_name(role)}",
        f"{PREFIX}.{verb}.{service_name(role)}.{instance}",
    )


def _stats_of(endpoint: EndpointCounters) -> EndpointStats:
    nanoseconds = round(endpoint.processing_s * 1e9)
    return EndpointStats(
        name=endpoint.name,
        subject=endpoint.subject,
        queue_group=endpoint.queue,
        num_requests=endpoint.requests,
        num_errors=endpoint.errors,
        last_error=endpoint.last_error,
        processing_time=nanoseconds,
        average_processing_time=nanoseconds // max(endpoint.requests, 1),
    )
