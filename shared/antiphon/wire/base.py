"""The two kinds of struct on the wire, and the few types that every conversation shares.

The garbage collector does not follow them (`gc=False`): what was decoded is a tree and dies with
its last reference. A list of 2,000 open requests twice a second would set it off again and again,
and to look at all of a worker's objects takes it 0.2 s, in which no step begins.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from antiphon.config.frozen import FrozenMeta
from antiphon.wire.bounds import Count, Number
from antiphon.wire.ids import Incarnation, InstanceId

if TYPE_CHECKING:
    from collections.abc import Iterable

WIRE_VERSION = 1
"""Major version of the messages; part of every subject. Additive change keeps it."""


class Value(msgspec.Struct, metaclass=FrozenMeta, omit_defaults=True, gc=False):
    """A part of a message: it has no tag of its own."""


class Message(msgspec.Struct, metaclass=FrozenMeta, omit_defaults=True, tag=True, gc=False):
    """What is published. Its class name is its tag, so a renamed class is a new message."""


TERM_MAX = 2**62
"""The highest number of a term. After it the numbers begin anew."""
TERM_JUMP_MAX = 2**32
"""How far a term may be ahead of one that is known: more than are ever elected between the two."""


class Role(StrEnum):
    """The seven kinds of service."""

    GATEWAY = "gateway"
    TOKENIZER = "tokenizer"
    SCHEDULER = "scheduler"
    WORKER = "worker"
    DETOKENIZER = "detokenizer"
    ENCODER = "encoder"
    KV_STORAGE = "kv_storage"


class ProcessState(StrEnum):
    """Where a process is in its life, as health and heartbeats say it."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class Process(Value, order=True):
    """One life of one process: who a message is from."""

    instance: InstanceId
    incarnation: Incarnation


class Term(Value, order=True):
    """Right to lead one model's queue. The higher number leads; the scheduler breaks a tie."""

    number: Number
    scheduler: Process

    def may_follow(self, number: int | None) -> bool:
        """Whether a term may be as high as this where the highest known one has this number.

        Else one message with the highest number there is would leave no term to lead with. Where
        none is known yet, there is nothing to compare it with.
        """
        return self.number <= (TERM_MAX if number is None else number + TERM_JUMP_MAX)


def leading_term(claims: Iterable[Term]) -> Term | None:
    """Which of the terms leads that live schedulers claim.

    The highest, unless it is too far ahead of the next lower one, as no elected one is. It does
    not depend on the terms before: so all processes that have the same heartbeats agree, whenever
    they were started and whatever was forged meanwhile.
    """
    leading: Term | None = None
    for term in sorted(claims):
        if not term.may_follow(None if leading is None else leading.number):
            break
        leading = term
    return leading


class Attempt(Value, order=True):
    """One binding of a request to a worker and a detokenizer; made by the leader only."""

    term: Term
    n: Number


class FinishReason(StrEnum):
    """Why a choice, or a whole request, ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Usage(Value):
    """Tokens of a request. The prompt counts once, however many choices share it.

    Attributes:
        reasoning_tokens: Of the completion, those that are thinking, where that is counted.
    """

    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    cached_tokens: Count = 0
    reasoning_tokens: Count = 0
