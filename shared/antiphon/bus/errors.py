"""Errors of the connection to the broker."""

from __future__ import annotations

from antiphon.wire.errors import Unavailable


class BusDown(Unavailable):
    """The link to the broker is down; nothing was sent and nothing is buffered."""


class ReplyLost(Unavailable):
    """The link dropped while waiting for a reply; the call may have taken effect."""


class NoResponders(Unavailable):
    """No process listens on the subject; nothing was started."""
