"""How long the owner waits for others, and which of their refusals are no answer."""

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
"""How long a new request waits for any leader: a standby leads within 3 s."""
SILENCE_S = 2.0
"""How long an answer may fall silent before the leader is asked for it again."""
QUEUED_SILENCE_S = 60.0
"""The same for one that has not begun. It may just wait for its turn: a leader that lacks what it
had accepted says so at the next whole list, and the next leader is asked at once. With 8 s, 2,000
that waited were 250 submits a second."""
SILENCE_MAX_S = 64.0
"""The pause doubles up to this: 2,000 that wait would be asked for again every few milliseconds."""
TOMBSTONE_S = 10.0
"""How long past the deadline a cancel is repeated."""
PACE_S = 0.001
"""Pause between submits when all are sent again: a new leader's inbox is bounded."""
STALE_LEADER_S = 0.2
"""Pause after an answer of a leader that another one has followed."""
RESUME_WAIT_S = 0.1
"""How long text that was asked for may be under way."""
RESUME_RETRY_S = 0.25
"""Pause after asking for text in vain."""
PROMPT_READ_S = 5.0
"""How long more than the bound may wait of what is told of a prompt, and in which time a client
must take as much as the bound."""
_RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0)


def is_retryable(error: EngineError, *, accepted: bool) -> bool:
    """Whether a submit that failed so may succeed later. What is running outlives any refusal."""
    if isinstance(error, Overloaded):
        return accepted
    return isinstance(error, DeadlineExceeded | Unavailable | WrongTerm)


def retry_delay_s(tries: int) -> float:
    """The pause after so many tries in vain."""
    return _RETRY_S[min(tries, len(_RETRY_S) - 1)]


def no_scheduler_error(error: EngineError) -> Unavailable:
    """What a client hears when no leader could be found."""
    return Unavailable("no scheduler took the request", retry_after_s=error.retry_after_s or 1.0)


def slow_client_error(unread_bytes: int, bytes_max: int) -> Cancelled:
    """What a client hears that does not read."""
    return Cancelled(
        f"the client left {unread_bytes} bytes unread; the limit is {bytes_max} bytes",
        details={"unread_bytes": str(unread_bytes), "bytes_max": str(bytes_max)},
    )
