"""Gateway to gateways: requests that somebody wants ended, whichever gateway owns them."""

from __future__ import annotations

from antiphon.wire.base import Message


class AbortRequests(Message):
    """Each gateway ends those of its requests whose names begin so, as aborted.

    A request without a name of its client's is called by its id. Lost, it may be said again.
    """

    prefix: str
    not_after_unix_ms: int
