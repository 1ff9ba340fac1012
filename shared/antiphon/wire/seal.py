"""Scheduler to detokenizer: seal attempts of requests, to continue them on other workers."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from antiphon.wire.base import Attempt, Message, Process, Term, Value
from antiphon.wire.bounds import CHOICES_MAX, Number
from antiphon.wire.command import ChoiceOutput
from antiphon.wire.ids import RequestId

SEALS_MAX = 64
"""Maximum number of requests in one `SealAttempts`."""
DETAILS_BYTES_MAX = 16 * 1024 * 1024
"""Maximum token outputs of a request that is continued after a failure; one with more ends."""


class SealRequest(Value):
    """Accept no more tokens of this attempt of a request, or of an earlier one."""

    request_id: RequestId
    attempt: Attempt


class SealAttempts(Message):
    """Seal these attempts, and return the outputs that were accepted. Repeating it is harmless."""

    leader: Term
    requests: Annotated[tuple[SealRequest, ...], Meta(max_length=SEALS_MAX)]


class SealedRequest(Value):
    """What a detokenizer holds of a request.

    Attributes:
        attempt: The attempt that it follows; unset if it has accepted no tokens of the request.
        lineage: The sealed attempts that this one continues, the first one first.
        sealed: Whether `attempt` accepts no more tokens. Not if it is later than the one to seal.
        failed: The request has ended with an error there.
        size_bytes: The outputs are too large to be continued, and this is their size.
        choices: One that ended by a stop string has all of it. Token outputs that do not fit into a
            message are left out: the next attempt has the same detokenizer, which keeps them.
    """

    request_id: RequestId
    attempt: Attempt | None = None
    lineage: tuple[Attempt, ...] = ()
    sealed: bool = True
    failed: bool = False
    size_bytes: Number | None = None
    choices: Annotated[tuple[ChoiceOutput, ...], Meta(max_length=CHOICES_MAX)] = ()


class AttemptsSealed(Message):
    """The sealed requests, as many as fit into a message: the others are to be asked for again."""

    detokenizer: Process
    requests: tuple[SealedRequest, ...]
