"""Discovery verbs of NATS microservices (ADR-32) for one process.

`nats micro ls` and the console list processes with them. Our routes are plain subscriptions, not
endpoints of `nats.micro`, which runs its handlers one at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from antiphon.wire.base import Process, Role
from antiphon.wire.routes import OPERATOR

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.bus.transport import Packet, Transport

Response = dict[str, object]

PREFIX = "$SRV"
VERBS = ("PING", "INFO", "STATS")
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

    def info(self) -> Response:
        return {"name": self.name, "subject": self.subject, "queue_group": self.queue}

    def stats(self) -> Response:
        nanoseconds = round(self.processing_s * 1e9)
        return {
            **self.info(),
            "num_requests": self.requests,
            "num_errors": self.errors,
            "last_error": self.last_error,
            "processing_time": nanoseconds,
            "average_processing_time": nanoseconds // max(self.requests, 1),
        }


async def answer_discovery(
    transport: Transport,
    *,
    role: Role,
    process: Process,
    version: str,
    cluster: str,
    endpoints: Sequence[EndpointCounters],
) -> None:
    """Respond to the verbs for one process. `endpoints` are read for each response."""
    identity = {
        "name": service_name(role),
        "id": process.incarnation,
        "version": version,
        "metadata": {"instance": process.instance, "cluster": cluster},
    }
    started = datetime.now(UTC).isoformat(timespec="milliseconds")

    def response(verb: str) -> Response:
        answer: Response = {"type": f"io.nats.micro.v1.{verb.lower()}_response", **identity}
        if verb == "INFO":
            answer["description"] = f"Antiphon {role}"
            answer["endpoints"] = [endpoint.info() for endpoint in endpoints]
        elif verb == "STATS":
            answer["started"] = started
            answer["endpoints"] = [endpoint.stats() for endpoint in endpoints]
        return answer

    def respond(verb: str, packet: Packet) -> None:
        if packet.reply is not None:
            transport.publish(packet.reply, msgspec.json.encode(response(verb)))

    for verb in VERBS:
        for subject in subjects(verb, role, process.incarnation):
            await transport.subscribe(subject, partial(respond, verb))


def service_name(role: Role) -> str:
    return f"antiphon-{role}"


def subjects(verb: str, role: Role, instance: str = "*") -> Sequence[str]:
    of_all = f"{PREFIX}.{verb}"
    of_role = f"{of_all}.{service_name(role)}"
    return (of_all, of_role, f"{of_role}.{instance}")
