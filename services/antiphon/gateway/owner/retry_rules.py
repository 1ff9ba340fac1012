"""Timeouts and retry rules of the owner."""

from __future__ import annotations

from antiphon.wire.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineError,
    Overloaded,
    Unavailable,
    WrongTerm,
)

SUBMIT_TIMEOUT_S = 5.0
"""How long a new request waits for a leader: a standby takes over within 3 s."""
SILENCE_S = 2.0
"""How long a running request may make no progress before it is submitted again."""
QUEUED_SILENCE_S = 60.0
"""The same for a request without output, which may just be queued. A leader that lacks a request
it had accepted reports so at the next full list, and a new leader is asked at once. With 8 s, 2,000
queued requests caused 250 submits a second."""
SILENCE_MAX_S = 64.0
"""Limit of the doubling pause: 2,000 queued requests would cause a submit every few ms."""
TOMBSTONE_S = 10.0
"""How long past the deadline a cancel is repeated."""
PACE_S = 0.001
"""Pause between submits when all are sent again: a new leader's inbox is bounded."""
STALE_LEADER_S = 0.2
"""Pause after a reply of a leader that has been superseded."""
RESUME_WAIT_S = 0.1
"""How long requested text may be in flight."""
RESUME_RETRY_S = 0.25
"""Pause after a failed fetch of text."""
PROMPT_READ_S = 5.0
"""How long more unread token outputs of a prompt than the limit may wait, and the time in which a
client must read as much as the limit."""
_RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0)


def is_retryable(error: EngineError, *, accepted: bool) -> bool:
    """Whether a submit that failed with this error may succeed later.

    A running request survives it.
    """
    if isinstance(error, Overloaded):
        return accepted
    return isinstance(error, DeadlineExceeded | Unavailable | WrongTerm)


def retry_delay_s(tries: int) -> float:
    """The pause after this many failed tries."""
    return _RETRY_S[min(tries, len(_RETRY_S) - 1)]


def no_scheduler_error(error: EngineError) -> Unavailable:
    """The client's error if no leader was found."""
    return Unavailable(
        "no scheduler accepted the request", retry_after_s=error.retry_after_s or 1.0
    )


def slow_client_error(unread_bytes: int, bytes_max: int) -> Cancelled:
    """The client's error if it does not read."""
    return Cancelled(
        f"the client left {unread_bytes} bytes unread; the limit is {bytes_max} bytes",
        details={"unread_bytes": str(unread_bytes), "bytes_max": str(bytes_max)},
    )
