"""Every bucket of what outlives its request, and nowhere else: kept by JetStream, key by key.

A bucket is one of NATS' key-value buckets, so that an operator sees it with `nats kv ls`. The
permissions of the NATS users and the table in the docs are made from `BUCKETS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.wire.base import Role
from antiphon.wire.routes import escape

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from antiphon.wire.ids import ClusterName

API = "$JS.API.STREAM"
"""Where JetStream is asked for streams, which is what buckets are made of."""


@dataclass(frozen=True)
class KeyValueBucket:
    """What is kept, and by whom: nobody else reads or writes it.

    Attributes:
        keys: What a key is made of, for the docs.
        holds: What there is under a key, likewise.
    """

    name: str
    owner: Role
    keys: str
    holds: str

    def stream(self, cluster: ClusterName) -> str:
        """The stream that is the bucket of one cluster."""
        return f"KV_{escape(cluster)}_{self.name}"

    def subject(self, cluster: ClusterName, *key: str) -> str:
        """The subject of a key, each part of it escaped; of no key, the beginning of all."""
        return ".".join((f"$KV.{escape(cluster)}_{self.name}", *map(escape, key)))

    def publish_subjects(self, cluster: ClusterName) -> Iterator[str]:
        """What its owner publishes to."""
        stream = self.stream(cluster)
        yield f"{self.subject(cluster)}.>"
        for verb in ("CREATE", "UPDATE", "PURGE", "MSG.GET"):
            yield f"{API}.{verb}.{stream}"


RESPONSES = KeyValueBucket(
    name="responses",
    owner=Role.GATEWAY,
    keys="tenant, id of the response",
    holds="a response of `/v1/responses`, and the conversation that it was made from",
)

SESSIONS = KeyValueBucket(
    name="sessions",
    owner=Role.GATEWAY,
    keys="tenant, session; and below it, name of the request",
    holds="which requests a session of `/generate` has; and what was said in each",
)

BUCKETS: Sequence[KeyValueBucket] = (RESPONSES, SESSIONS)
