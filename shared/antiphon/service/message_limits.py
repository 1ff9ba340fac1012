"""Check at startup that lists a process will send fit into a message."""

from __future__ import annotations

from antiphon.service.sockets import CannotStart

OPEN_ENTRY_BYTES = 192
"""Estimated size of an open list entry, rounded up."""
HELD_ENTRY_BYTES = 224
"""Estimated size of a running request in a worker's heartbeat, rounded up."""

_REST_BYTES = 16 * 1024


def check_message_fits(field: str, count: int, *, each_bytes: int, message_bytes_max: int) -> None:
    """Reject a bound whose lists would exceed the broker's message size, with `CannotStart`."""
    # Peers would consider a process dead whose heartbeats cannot be sent, and its requests ended.
    fits = max(0, (message_bytes_max - _REST_BYTES) // each_bytes)
    if count > fits:
        raise CannotStart(
            f"{field} = {count}: must be at most {fits}, so that a list of all requests fits into "
            f"one NATS message of {message_bytes_max} bytes"
        )
