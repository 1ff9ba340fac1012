"""Base classes of wire structs, and the types that all messages share.

The garbage collector does not track them (`gc=False`): a decoded message is a tree, freed with its
last reference. An open list of 2,000 requests twice a second would trigger collections constantly,
and a full collection of a worker takes 0.2 s, during which no step starts.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from antiphon.config.schema import FrozenMeta
from antiphon.wire.bounds import Count, Number
from antiphon.wire.ids import Incarnation, InstanceId

if TYPE_CHECKING:
    from collections.abc import Iterable

WIRE_VERSION = 1
"""Major version of the messages; part of every subject. Additive changes keep it."""


class Value(msgspec.Struct, metaclass=FrozenMeta, omit_defaults=True, gc=False):
    """A part of a message; it has no tag of its own."""


class Message(msgspec.Struct, metaclass=FrozenMeta, omit_defaults=True, tag=True, gc=False):
    """A message. The class name is its tag: a renamed class needs an explicit `tag`."""


TERM_MAX = 2**62
"""Highest term number; after it the numbers start over."""
TERM_JUMP_MAX = 2**32
"""How far a term may be ahead of a known one: more than are ever elected in between."""


class Role(StrEnum):
    """The kinds of service."""

    GATEWAY = "gateway"
    TOKENIZER = "tokenizer"
    SCHEDULER = "scheduler"
    WORKER = "worker"
    DETOKENIZER = "detokenizer"
    ENCODER = "encoder"
    KV_STORAGE = "kv_storage"


class ProcessState(StrEnum):
    """Lifecycle state of a process, in health responses and heartbeats."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class Process(Value, order=True):
    """One incarnation of one process; the sender of a message."""

    instance: InstanceId
    incarnation: Incarnation


class Term(Value, order=True):
    """A leader's term for one model's queue. The higher number leads; `scheduler` breaks a tie."""

    number: Number
    scheduler: Process

    def may_follow(self, number: int | None) -> bool:
        """Whether this term is plausible, given the highest known term number.

        Without this bound, one message with the maximum number would leave no term to lead with.
        With no known term (`number` is None) only `TERM_MAX` limits it.
        """
        return self.number <= (TERM_MAX if number is None else number + TERM_JUMP_MAX)


def leading_term(claims: Iterable[Term]) -> Term | None:
    """Return the leading term among those that live schedulers claim.

    It is the highest one, unless it is too far ahead of the next lower one, as no elected term is.
    The result does not depend on earlier terms: all processes with the same heartbeats agree,
    whenever they were started and whatever was forged meanwhile.
    """
    leading: Term | None = None
    for term in sorted(claims):
        if not term.may_follow(None if leading is None else leading.number):
            break
        leading = term
    return leading


class Attempt(Value, order=True):
    """One binding of a request to a worker and a detokenizer; created by the leader only."""

    term: Term
    n: Number


class FinishReason(StrEnum):
    """Why a choice, or a whole request, ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Usage(Value):
    """Token counts of a request. The prompt counts once, however many choices share it.

    Attributes:
        reasoning_tokens: Reasoning tokens within the completion, if they are counted.
    """

    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    cached_tokens: Count = 0
    reasoning_tokens: Count = 0
