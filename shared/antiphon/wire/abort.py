"""Gateway to gateways: requests that somebody wants ended, whichever gateway owns them."""

from __future__ import annotations

from antiphon.wire.base import Message, Process
from antiphon.wire.bounds import LongText, UnixMs
from antiphon.wire.ids import TenantId


class AbortRequests(Message):
    """Each gateway ends those of its requests whose names begin so, as aborted.

    A request without a name of its client's is called by its id. Lost, it may be said again.

    Attributes:
        tenant: Whose requests; None: everybody's.
        exact: Only the one of exactly this name.
        sender: By whose clock `not_after_unix_ms` is; None of an earlier version: by any.
    """

    prefix: LongText
    tenant: TenantId | None = None
    exact: bool = False
    sender: Process | None = None
    not_after_unix_ms: UnixMs
