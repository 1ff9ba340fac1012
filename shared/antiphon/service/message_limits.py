"""Whether lists that a process will send fit a message: what does not is never sent."""

from __future__ import annotations

from antiphon.service.sockets import CannotStart

OPEN_ENTRY_BYTES = 192
"""Of a line of an open list, about and rather more."""
HELD_ENTRY_BYTES = 224
"""Of what a heartbeat says of a request that a worker holds."""

_REST_BYTES = 16 * 1024


def check_message_fits(field: str, count: int, *, each_bytes: int, message_bytes_max: int) -> None:
    """Refuse a bound that would make a message larger than the broker takes.

    Peers would take a process for dead whose heartbeats are not sent, and its requests for ended.

    Raises:
        CannotStart: Names the bound, and the largest that fits.
    """
    fits = max(0, (message_bytes_max - _REST_BYTES) // each_bytes)
    if count > fits:
        raise CannotStart(
            f"{field} = {count}: must be at most {fits}, so that a list of all requests fits into "
            f"one NATS message of {message_bytes_max} bytes"
        )
