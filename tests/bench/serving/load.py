"""Load: prompts of exact length in tokens, sent in a closed or an open loop.

The prompts are made from a seed and a tokenizer, of random words: random-weight models do not mind,
and most cases need prompts that no cache has seen. Where a prefix is shared, it is shared on
purpose. They are sent in a closed loop, or at the times of a Poisson process.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.bench.serving.client import Target, Timeline

WORDS_MIN = 100


@dataclass(frozen=True)
class Script:
    """One client's part: turns that are asked one after the other, each with the answers before.

    A single turn is a plain request; `prompt_tokens` counts the first one without a chat template.
    """

    turns: tuple[str, ...]
    prompt_tokens: int
    output_tokens: int


class Vocabulary:
    """Words that are one token each, alone and in any company: a space and letters."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        known = sorted(self._tokenizer.get_vocab().items(), key=lambda item: item[1])
        words = [" " + token[1:] for token, _ in known if token[:1] == "Ġ" and token[1:].isalpha()]
        self._words = [word for word in words if word.isascii() and self.tokens(word) == 1]
        assert len(self._words) >= WORDS_MIN, "no byte-level BPE with words: prompts are inexact"

    def tokens(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def text(self, source: random.Random, tokens: int) -> str:
        """Return random words of exactly so many tokens."""
        return "".join(source.choices(self._words, k=tokens))


@dataclass(frozen=True)
class RandomLengths:
    """Prompts without anything in common.

    Attributes:
        spread: Lengths are uniform between this share of the longest and the longest; 1 is fixed.

    Source: `random` of SGLang's `bench_serving`, whose `random_range_ratio` is `spread`.
    """

    prompt_tokens: int
    output_tokens: int
    spread: float = 1.0

    def scripts(self, words: Vocabulary, count: int, seed: int) -> list[Script]:
        source = random.Random(seed)

        def length(longest: int) -> int:
            return source.randint(max(1, round(longest * self.spread)), longest)

        found: list[Script] = []
        for _ in range(count):
            prompt, output = length(self.prompt_tokens), length(self.output_tokens)
            found.append(Script((words.text(source, prompt),), prompt, output))
        return found


@dataclass(frozen=True)
class SharedPrefix:
    """Questions under system prompts, groups of them: the radix cache's daily bread.

    Requests of different groups alternate, so that one group is not done before the next begins.

    Source: `generated-shared-prefix` of SGLang's `bench_serving`.
    """

    prefix_tokens: int
    question_tokens: int
    output_tokens: int
    groups: int = 1

    @property
    def prompt_tokens(self) -> int:
        return self.prefix_tokens + self.question_tokens

    def scripts(self, words: Vocabulary, count: int, seed: int) -> list[Script]:
        source = random.Random(seed)
        prefixes = [words.text(source, self.prefix_tokens) for _ in range(self.groups)]
        return [
            Script(
                (prefixes[n % self.groups] + words.text(source, self.question_tokens),),
                self.prompt_tokens,
                self.output_tokens,
            )
            for n in range(count)
        ]


@dataclass(frozen=True)
class MultiTurn:
    """Conversations: every turn carries all messages before it, the server's responses too."""

    turns: int
    question_tokens: int
    output_tokens: int

    def scripts(self, words: Vocabulary, count: int, seed: int) -> list[Script]:
        source = random.Random(seed)
        return [
            Script(
                tuple(words.text(source, self.question_tokens) for _ in range(self.turns)),
                self.question_tokens,
                self.output_tokens,
            )
            for _ in range(count)
        ]


Dataset = RandomLengths | SharedPrefix | MultiTurn

FORMS = "random:IN:OUT[:SPREAD], shared:PREFIX:QUESTION:OUT[:GROUPS], turns:TURNS:IN:OUT, long:IN"


def parse_dataset(text: str) -> Dataset:
    """Read one of `FORMS`; `long` is a random prompt with 16 tokens of answer.

    Raises:
        ValueError: It is none of them.
    """
    kind, *given = text.split(":")
    match kind, [float(each) for each in given]:
        case "random", [prompt, output, *spread] if len(spread) <= 1:
            return RandomLengths(int(prompt), int(output), *spread)
        case "shared", [_, _, _] | [_, _, _, _] as sizes:
            return SharedPrefix(*map(int, sizes))
        case "turns", [_, _, _] as sizes:
            return MultiTurn(*map(int, sizes))
        case "long", [prompt]:
            return RandomLengths(int(prompt), 16)
        case _:
            raise ValueError(f"{text!r} is none of {FORMS}")


@dataclass(frozen=True)
class ClosedLoop:
    """So many clients, each of which asks again as soon as it is answered.

    It measures what a server can do. It cannot show overload: a slow server is asked less.
    """

    clients: int

    def __str__(self) -> str:
        return f"closed:{self.clients}"


@dataclass(frozen=True)
class Poisson:
    """Requests that know nothing of each other: exponential gaps of mean 1 / rate.

    Source: `bench_serving` of SGLang, `--request-rate`.
    """

    rate_per_s: float
    seed: int = 0

    def times_s(self) -> Iterator[float]:
        """Yield the times since the start at which requests come; the first comes at once."""
        gaps = random.Random(self.seed)
        return itertools.accumulate(
            (gaps.expovariate(self.rate_per_s) for _ in itertools.count()), initial=0.0
        )

    def __str__(self) -> str:
        return f"poisson:{self.rate_per_s:g}"


Arrival = ClosedLoop | Poisson


def parse_arrival(text: str, seed: int) -> Arrival:
    """Read `closed:16` or `poisson:2.5`.

    Raises:
        ValueError: It is neither.
    """
    kind, _, number = text.partition(":")
    if kind == "closed" and number.isdecimal() and int(number) > 0:
        return ClosedLoop(int(number))
    if kind == "poisson" and float(number) > 0:
        return Poisson(float(number), seed)
    raise ValueError(f"{text!r} is neither closed:CLIENTS nor poisson:REQUESTS_PER_S")


async def play(scripts: Sequence[Script], arrival: Arrival, target: Target) -> list[Timeline]:
    """Send every request; return the timelines in the order in which they ended.

    In the open loop a conversation arrives as a whole: its first turn when it is due, each later
    turn when the one before is answered.
    """
    seen: list[Timeline] = []
    left = iter(scripts)

    async def client() -> None:
        for script in left:  # the clients take turns at one iterator
            await _converse(script, target, time.perf_counter(), seen)

    async with asyncio.TaskGroup() as group:
        if isinstance(arrival, ClosedLoop):
            for _ in range(min(arrival.clients, len(scripts))):
                group.create_task(client())
        else:
            began_s = time.perf_counter()
            for script, after_s in zip(scripts, arrival.times_s(), strict=False):
                due_s = began_s + after_s
                await asyncio.sleep(due_s - time.perf_counter())
                group.create_task(_converse(script, target, due_s, seen))
    return seen


async def _converse(script: Script, target: Target, due_s: float, seen: list[Timeline]) -> None:
    said: list[str] = []
    for turn in script.turns:
        timeline = await target.ask([*said, turn], script.output_tokens, due_s)
        seen.append(timeline)
        if timeline.error is not None:
            return  # a conversation without an answer has no next turn
        said += [turn, timeline.text]
        due_s = timeline.ended_s
