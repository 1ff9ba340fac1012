"""JetStream key-value buckets: all state that outlives its request.

A bucket is an ordinary NATS key-value bucket, so `nats kv ls` lists it. The permissions of the NATS
users and the table in the docs are generated from `BUCKETS`.
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
"""Subject prefix of JetStream's stream API; a bucket is a stream."""


@dataclass(frozen=True)
class KeyValueBucket:
    """A bucket and the only role that reads and writes it.

    Attributes:
        keys: The parts of a key, for the docs.
        holds: The value of a key, for the docs.
    """

    name: str
    owner: Role
    keys: str
    holds: str

    def stream(self, cluster: ClusterName) -> str:
        """Name of the stream that holds this bucket in one cluster."""
        return f"KV_{escape(cluster)}_{self.name}"

    def subject(self, cluster: ClusterName, *key: str) -> str:
        """The subject of a key, with each part escaped; without a key, the prefix of all keys."""
        return ".".join((f"$KV.{escape(cluster)}_{self.name}", *map(escape, key)))

    def publish_subjects(self, cluster: ClusterName) -> Iterator[str]:
        """Subjects that the owner publishes to."""
        stream = self.stream(cluster)
        yield f"{self.subject(cluster)}.>"
        for verb in ("CREATE", "UPDATE", "PURGE", "MSG.GET"):
            yield f"{API}.{verb}.{stream}"


RESPONSES = KeyValueBucket(
    name="responses",
    owner=Role.GATEWAY,
    keys="tenant, id of the response",
    holds="a response of `/v1/responses`, and the conversation it was generated from",
)

SESSIONS = KeyValueBucket(
    name="sessions",
    owner=Role.GATEWAY,
    keys="tenant, session; below it, request name",
    holds="the requests of a `/generate` session, and the tokens of each",
)

BUCKETS: Sequence[KeyValueBucket] = (RESPONSES, SESSIONS)
