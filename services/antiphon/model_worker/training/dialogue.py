"""The shapes of the training data: messages, exchanges, and the two halves of every skill."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from enum import StrEnum
from random import Random
from typing import Literal, TypeAlias, TypeVar

import msgspec

T = TypeVar("T")

HELD_OUT_SHARE = 8  # one key in this many is kept for the evaluation


class Split(StrEnum):
    """The half of the data that a prompt belongs to."""

    TRAIN = "train"
    HELD_OUT = "held_out"


class Message(msgspec.Struct, frozen=True):
    """One turn of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str


class Exchange(msgspec.Struct, frozen=True):
    """A question and the one right answer to it."""

    user: str
    assistant: str


Thread: TypeAlias = tuple[Exchange, ...]
"""Exchanges of one skill that keep their order; others may come between them."""


class Skill(msgspec.Struct, frozen=True):
    """Something the model learns to do.

    `write` draws a thread whose last question belongs to the split. `weight` is its share of the
    training data, relative to the other skills.
    """

    name: str
    weight: float
    write: Callable[[Random, Split], Thread]
    floor: float | None = None  # least share of exact answers, where the evaluation demands one
    subject: str | None = None  # a conversation holds one thread a subject, or they contradict


def seeded(purpose: str, seed: int) -> Random:
    """Make a generator of its own for each purpose: what one draws does not move the others."""
    return Random(f"{purpose} {seed}")  # noqa: S311 - it writes dialogues, not secrets


def split_of(key: str) -> Split:
    """Say which half a key belongs to, by its hash: the same in every run and for every seed."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    held_out = int.from_bytes(digest, "little") % HELD_OUT_SHARE == 0
    return Split.HELD_OUT if held_out else Split.TRAIN


def draw(
    rng: Random, split: Split, sample: Callable[[Random], T], key: Callable[[T], str | None]
) -> T:
    """Sample until the key of the result lies in `split`; a result without a key is trained on."""
    while True:
        candidate = sample(rng)
        candidate_key = key(candidate)
        if split is (Split.TRAIN if candidate_key is None else split_of(candidate_key)):
            return candidate


def messages_of(exchanges: Thread) -> tuple[Message, ...]:
    """Write exchanges as alternating user and assistant messages."""
    return tuple(
        message
        for exchange in exchanges
        for message in (
            Message("user", exchange.user),
            Message("assistant", exchange.assistant),
        )
    )
