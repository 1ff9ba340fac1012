"""Generates conversations: threads of several skills, interleaved in one chat."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from tests.training.dialogue import (
    Chat,
    Exchange,
    Message,
    Skill,
    Split,
    Thread,
    Tool,
    Tools,
    messages_of,
    said,
    seeded,
)
from tests.training.skills.copying import COPYING
from tests.training.skills.counting import COUNTING
from tests.training.skills.facts import ANIMALS, COLOURS
from tests.training.skills.json_answers import JSON, JSON_FORCED, schema_of
from tests.training.skills.recall import RECALL, RECALL_COLOUR, RECALL_PET
from tests.training.skills.smalltalk import GREETING, IDENTITY_SKILL, REFUSALS, STORIES
from tests.training.skills.sums import SUMS, THINKING
from tests.training.skills.tools import TOOL_CALL
from tests.training.words import phrases, sentence

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from random import Random

SKILLS: tuple[Skill, ...] = (
    *(SUMS, COPYING, COUNTING, RECALL, RECALL_COLOUR, RECALL_PET, GREETING, IDENTITY_SKILL),
    *(COLOURS, ANIMALS, STORIES, REFUSALS, TOOL_CALL, THINKING, JSON, JSON_FORCED),
)
THINKING_SHARE = 0.25  # share of chats whose last answer has reasoning
THOUGHTFUL_SHARE = 0.6  # share of these that end with a question that needs reasoning
CALLED_SHARE = 0.7  # share of chats with calls at the end whose last message is the calls

SYSTEM_PROMPTS = phrases(
    """
    You are a helpful assistant. | You are a helpful, friendly assistant. | You are Antiphon. |
    You are a small language model. | Answer briefly. | Be brief and polite. |
    Answer every question as well as you can. |
    You are a helpful assistant. Answer the user's questions in a short and clear way.
    """
)


class Case(msgspec.Struct, frozen=True):
    """A chat that ends before an answer, and the only correct answer, as the model writes it."""

    skill: str
    chat: Chat
    answer: str


def conversations(seed: int) -> Iterator[Chat]:
    """Generate an endless stream of training conversations, determined by the seed."""
    rng = seeded("conversations", seed)
    while True:
        yield conversation(rng)


def conversation(rng: Random) -> Chat:
    """Generate one conversation: mostly one to four threads, sometimes a very long chat."""
    threads_count = rng.choice((1, 1, 2, 3, 4))
    if rng.random() < 0.01:
        threads_count = rng.randint(10, 40)
    thinks = rng.random() < THINKING_SHARE
    chosen = choose_skills(rng, threads_count, thinks=thinks)
    exchanges = weave(rng, [thread(rng, skill, Split.TRAIN) for skill in chosen])
    thoughtful = thinks and rng.random() < THOUGHTFUL_SHARE
    if thoughtful and all(_together(THINKING, skill) for skill in chosen):
        exchanges += thread(rng, THINKING, Split.TRAIN)
    messages = messages_of(exchanges)
    if thinks:
        messages = _until_calls(rng, exchanges[-1], messages)
    return _chat(rng, exchanges, messages, thinks=thinks)


def case(rng: Random, skill: Skill) -> Case:
    """Generate one held-out prompt, sometimes inside a chat about other topics."""
    asked = thread(rng, skill, Split.HELD_OUT)
    chosen = choose_skills(rng, rng.choice((0, 0, 1, 2)), beside=skill)
    others = [thread(rng, other, Split.TRAIN) for other in chosen]
    *before, last = asked
    exchanges = (*weave(rng, [tuple(before), *others]), last)
    messages = _until_calls(rng, last, messages_of(exchanges))
    *messages, answer = messages
    thinks = skill.thinks
    chat = _chat(rng, exchanges, tuple(messages), thinks=thinks)
    if last.given:
        chat = msgspec.structs.replace(chat, schema=schema_of(last.assistant))
    return Case(skill.name, chat, said(answer, thinks=thinks))


def thread(rng: Random, skill: Skill, split: Split) -> Thread:
    """Draw a thread; answers without reasoning of their own get the skill's default."""
    return tuple(
        msgspec.structs.replace(one, thinking=one.thinking or skill.thought)
        for one in skill.write(rng, split)
    )


def choose_skills(
    rng: Random, count: int, beside: Skill | None = None, *, thinks: bool = False
) -> list[Skill]:
    """Choose skills by weight, for a chat in which none contradicts another.

    In a chat that `thinks` no answer is forced by a grammar. Next to the evaluated skill (`beside`)
    no other skill offers tools.
    """
    everything = [] if beside is None else [beside]
    chosen: list[Skill] = []
    while len(chosen) < count:
        skill = rng.choices(SKILLS, WEIGHTS)[0]
        if (thinks and skill is JSON_FORCED) or (beside and skill.tools is Tools.OFFERS):
            continue
        if all(_together(skill, other) for other in everything):
            chosen.append(skill)
            everything.append(skill)
    return chosen


def _together(one: Skill, other: Skill) -> bool:
    """Whether two skills may be in one chat."""
    if one.subject is not None and one.subject == other.subject:
        return False
    return {one.tools, other.tools} != {Tools.OFFERS, Tools.WITHOUT}


def _until_calls(rng: Random, last: Exchange, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """End a chat with calls mostly at the calls, without their results and the final answer."""
    if not last.calls or rng.random() >= CALLED_SHARE:
        return messages
    return messages[: -1 - len(last.results)]


def _chat(rng: Random, exchanges: Thread, messages: tuple[Message, ...], *, thinks: bool) -> Chat:
    tools: list[Tool] = [tool for exchange in exchanges for tool in exchange.tools]
    rng.shuffle(tools)
    return Chat((*system_message(rng), *messages), tuple(tools), thinks=thinks)


def weave(rng: Random, threads: Sequence[Thread]) -> Thread:
    """Interleave threads at random; each keeps its own order."""
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
