"""Gateway to gateways: abort requests by name, whichever gateway owns them."""

from __future__ import annotations

from antiphon.wire.base import Message, Process
from antiphon.wire.bounds import LongText, UnixMs
from antiphon.wire.ids import TenantId


class AbortRequests(Message):
    """Each gateway aborts its requests whose names begin with `prefix`.

    A request without a client-supplied name goes by its id. Sending the message again is harmless.

    Attributes:
        tenant: Only requests of this tenant; None: of all tenants.
        exact: Only the request whose name equals `prefix`.
        sender: The process by whose clock `not_after_unix_ms` is given; None in messages of an
            earlier version.
    """

    prefix: LongText
    tenant: TenantId | None = None
    exact: bool = False
    sender: Process | None = None
    not_after_unix_ms: UnixMs
