"""The users of the NATS server, made from the route table: who may publish and listen where.

    python -m antiphon.bus.permissions > compose/nats.conf

A role publishes what it sends and the answers to what it is asked, and listens to what it is sent
and to its own inbox. A client does the same within its tenant. What is not allowed is denied.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from antiphon.bus.discovery import DISCOVERY_CLIENTS, OPERATOR, VERBS, subjects
from antiphon.bus.server import ServerSettings, config_text
from antiphon.wire.base import WIRE_VERSION, Message, Role
from antiphon.wire.buckets import BUCKETS
from antiphon.wire.ids import DEFAULT_TENANT, ClusterName, TenantId
from antiphon.wire.routes import (
    CLIENT,
    DISCOVER,
    HEARTBEAT,
    ROUTES,
    Party,
    RequestRoute,
    Route,
    inbox,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

STORE_PATH = "/var/tmp/jetstream"  # noqa: S108  # where compose mounts a volume
"""Where the server in compose keeps what outlives a request."""

HEADER = """\
# Made by `python -m antiphon.bus.permissions` from the route table. Do not edit.
#
# Passwords come from the environment of nats-server, one a user: NATS_GATEWAY_PASSWORD and so on.
# Begin each with a letter and use letters and digits only: nats-server reads the value as a part
# of this file, and a number is no string there. A bcrypt hash goes in quotes.
"""


@dataclass(frozen=True, kw_only=True)
class NatsUser:
    """One user and all that it may do.

    Attributes:
        password: An environment variable as `$NAME`, or a quoted string.
    """

    name: str
    password: str
    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def users(cluster: ClusterName, tenant: TenantId = DEFAULT_TENANT) -> Sequence[NatsUser]:
    """Name every user: the seven roles, the clients of one tenant, and the operator's tools."""
    return (
        *(user(cluster, role) for role in Role),
        user(cluster, CLIENT, tenant),
        user(cluster, OPERATOR),
    )


def anonymous_user(cluster: ClusterName) -> NatsUser:
    """Make the user of whoever shows no password: a client, who may hear any tenant's inboxes."""
    prefix = f"{cluster}.v{WIRE_VERSION}."
    client = user(cluster, CLIENT)
    nothing = '""'
    return replace(client, name=CLIENT, password=nothing, subscribe=(f"{prefix}client.*.>",))


def user(cluster: ClusterName, party: Party, tenant: TenantId = DEFAULT_TENANT) -> NatsUser:
    """Make the user of one party. For another tenant's clients, name the tenant."""
    if party == OPERATOR:
        return _operator(cluster)
    prefix = f"{cluster}.v{WIRE_VERSION}."
    publish = {prefix + subject for subject in _published(party)}
    subscribe = {prefix + subject for subject in _subscribed(party, tenant)}
    if party in DISCOVERY_CLIENTS:
        publish.add("$SRV.>")
    for bucket in BUCKETS:
        if bucket.owner == party:
            publish |= set(bucket.publish_subjects(cluster))
    if isinstance(party, Role):
        publish |= {f"{prefix}{inbox(asker)}.>" for asker in DISCOVERY_CLIENTS}
        subscribe |= {subject for verb in VERBS for subject in subjects(verb, party)}
    return NatsUser(
        name=_user_name(party, tenant),
        password=_password(_user_name(party, tenant)),
        publish=tuple(sorted(publish)),
        subscribe=tuple(sorted(subscribe)),
    )


def users_text(users: Sequence[NatsUser]) -> str:
    """Write users in nats-server's own language."""
    return "authorization {\n  users: [\n" + "".join(map(_user_text, users)) + "  ]\n}\n"


def compose_config(cluster: ClusterName) -> str:
    """Write the whole config of the server in compose."""
    settings = ServerSettings(
        name=f"{cluster}-nats",
        host="0.0.0.0",  # noqa: S104  # inside the network of compose
        port=4222,
        monitoring_port=8222,
        store_path=STORE_PATH,
        users=users_text(users(cluster)),
    )
    return HEADER + config_text(settings)


def _published(party: Party) -> Iterator[str]:
    for route in ROUTES:
        if party in route.senders:
            yield route.subject_filter(**_own_part(route, party))
        if party in route.listeners and isinstance(route, RequestRoute):
            for sender in route.senders:
                yield _answers_to(sender)


def _subscribed(party: Party, tenant: TenantId) -> Iterator[str]:
    yield f"{inbox(party, tenant)}.>"
    for route in ROUTES:
        if party in route.listeners and party != CLIENT:
            yield route.subject_filter()


def _answers_to(sender: Party) -> str:
    return "client.*.>" if sender == CLIENT else f"{inbox(sender)}.>"


def _own_part(route: Route[Message], party: Party) -> dict[str, str]:
    """Let nobody speak under another role's name."""
    return {"role": party} if "{role}" in route.subject else {}


def _operator(cluster: ClusterName) -> NatsUser:
    prefix = f"{cluster}.v{WIRE_VERSION}."
    return NatsUser(
        name=OPERATOR,
        password=_password(OPERATOR),
        publish=("$SRV.>", prefix + DISCOVER.subject_filter()),
        subscribe=(prefix + HEARTBEAT.subject_filter(), f"{prefix}{inbox(OPERATOR)}.>"),
    )


def _user_name(party: Party, tenant: TenantId) -> str:
    return f"{CLIENT}-{tenant}" if party == CLIENT else str(party)


def _password(name: str) -> str:
    return f"$NATS_{name.upper().replace('-', '_')}_PASSWORD"


def _user_text(user: NatsUser) -> str:
    return (
        "    {\n"
        f"      user: {user.name}\n"
        f"      password: {user.password}\n"
        "      permissions: {\n"
        f"        publish: {{allow: [{_subject_lines(user.publish)}]}}\n"
        f"        subscribe: {{allow: [{_subject_lines(user.subscribe)}]}}\n"
        "      }\n"
        "    }\n"
    )


def _subject_lines(subjects: Sequence[str]) -> str:
    return "".join(f'\n          "{subject}"' for subject in subjects) + "\n        "


if __name__ == "__main__":
    sys.stdout.write(compose_config(ClusterName("antiphon")))
