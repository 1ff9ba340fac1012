"""Writes conversations: threads of several skills, woven into one chat."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.model_worker.training.dialogue import (
    Exchange,
    Message,
    Skill,
    Split,
    Thread,
    messages_of,
    seeded,
)
from antiphon.model_worker.training.skills.copying import COPYING
from antiphon.model_worker.training.skills.counting import COUNTING
from antiphon.model_worker.training.skills.facts import ANIMALS, COLOURS
from antiphon.model_worker.training.skills.recall import RECALL, RECALL_COLOUR, RECALL_PET
from antiphon.model_worker.training.skills.smalltalk import (
    GREETING,
    IDENTITY_SKILL,
    REFUSALS,
    STORIES,
)
from antiphon.model_worker.training.skills.sums import SUMS
from antiphon.model_worker.training.words import sentence

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from random import Random

SKILLS: tuple[Skill, ...] = (
    SUMS,
    COPYING,
    COUNTING,
    RECALL,
    RECALL_COLOUR,
    RECALL_PET,
    GREETING,
    IDENTITY_SKILL,
    COLOURS,
    ANIMALS,
    STORIES,
    REFUSALS,
)

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful, friendly assistant.",
    "You are Antiphon.",
    "You are a small language model.",
    "Answer briefly.",
    "Be brief and polite.",
    "Answer every question as well as you can.",
    "You are a helpful assistant. Answer the user's questions in a short and clear way.",
)


class Case(msgspec.Struct, frozen=True):
    """A prompt that ends in a question, and the one right answer to it."""

    skill: str
    messages: tuple[Message, ...]
    answer: str


def conversations(seed: int) -> Iterator[tuple[Message, ...]]:
    """Write training conversations without end. The same seed writes the same ones."""
    rng = seeded("conversations", seed)
    while True:
        yield conversation(rng)


def conversation(rng: Random) -> tuple[Message, ...]:
    """Write one conversation: mostly one to four threads, now and then a very long chat."""
    threads_count = rng.choice((1, 1, 2, 3, 4))
    if rng.random() < 0.01:
        threads_count = rng.randint(10, 40)
    threads = [skill.write(rng, Split.TRAIN) for skill in choose_skills(rng, threads_count)]
    return (*system_message(rng), *messages_of(weave(rng, threads)))


def case(rng: Random, skill: Skill) -> Case:
    """Write one held-out prompt, sometimes inside a chat about other things."""
    thread = skill.write(rng, Split.HELD_OUT)
    others = [
        other.write(rng, Split.TRAIN)
        for other in choose_skills(rng, rng.choice((0, 0, 1, 2)), taken=skill.subject)
    ]
    *before, last = thread
    exchanges = (*weave(rng, [tuple(before), *others]), last)
    *messages, answer = messages_of(exchanges)
    return Case(skill.name, (*system_message(rng), *messages), answer.content)


def choose_skills(rng: Random, count: int, taken: str | None = None) -> list[Skill]:
    """Choose skills by weight; no subject comes twice, and `taken` not at all."""
    subjects = {taken} - {None}
    chosen: list[Skill] = []
    while len(chosen) < count:
        skill = rng.choices(SKILLS, WEIGHTS)[0]
        if skill.subject is None or skill.subject not in subjects:
            chosen.append(skill)
            subjects.add(skill.subject)
    return chosen


def weave(rng: Random, threads: Sequence[Thread]) -> Thread:
    """Merge threads at random; each keeps its own order."""
    rest: list[list[Exchange]] = [list(thread) for thread in threads if thread]
    woven: list[Exchange] = []
    while rest:
        thread = rng.choice(rest)
        woven.append(thread.pop(0))
        rest = [thread for thread in rest if thread]
    return tuple(woven)


def system_message(rng: Random) -> tuple[Message, ...]:
    """A system message in a third of the chats. It never changes the answers."""
    kind = rng.random()
    if kind < 0.7:
        return ()
    text = rng.choice(SYSTEM_PROMPTS) if kind < 0.95 else sentence(rng)
    return (Message("system", text),)


WEIGHTS = [skill.weight for skill in SKILLS]
