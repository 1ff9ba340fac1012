"""Shared by the NATS APIs: their clients' inboxes and keys, and timeouts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from antiphon.wire.errors import InvalidRequest
from antiphon.wire.ids import TenantId

if TYPE_CHECKING:
    from antiphon.bus.bus import Delivery
    from antiphon.gateway.requests.submission import Submission

TIMEOUT_MAX_S = 24 * 3600.0

_CLIENT = re.compile(r"client\.([A-Za-z0-9_=-]+)\.[^\s*>]+")


def authenticate(submission: Submission, api_key: str | None, delivery: Delivery) -> TenantId:
    with submission.metrics.count_rejections():
        return submission.access.authenticate_tenant(api_key, tenant_of(delivery))


def tenant_of(delivery: Delivery) -> TenantId:
    """Return the tenant of the reply inbox. Replying to any other subject is not allowed."""
    cluster = delivery.subject.split(".", 2)[:2]  # <cluster>.v<major>
    prefix = ".".join(cluster) + "."
    reply = delivery.reply or ""
    match = _CLIENT.fullmatch(reply.removeprefix(prefix)) if reply.startswith(prefix) else None
    if match is None:
        raise InvalidRequest("the reply subject must be an inbox `client.<tenant>.<id>`")
    return TenantId(match[1])
