"""Calling the tools that a chat offers, and phrasing their results."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec
from tests.training.dialogue import (
    Call,
    Exchange,
    Parameter,
    Skill,
    Split,
    Thread,
    Tool,
    Tools,
    split_of,
)
from tests.training.skills import sums
from tests.training.skills.smalltalk import REFUSAL
from tests.training.skills.tool_kinds import FAILED_SHARE, Kind, Values, fails, kind
from tests.training.words import compose

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

UNFIT = "No tool does this."
FITTING = "I call {name}."
ARITHMETIC = {"sum", "difference", "product", "calculator"}
UNITS = ("celsius", "fahrenheit")


class Offer(msgspec.Struct, frozen=True):
    kind: Kind
    tool: Tool


def write(rng: Random, split: Split) -> Thread:
    """Offer tools, and ask for what one of them does, or none. Held out are arguments."""
    offers = _offers(rng, rng.choice((1, 1, 2, 2, 3, 4)))
    thread = [
        exchange
        for _ in range(rng.choice((1, 1, 2)))
        for exchange in _asked(rng, Split.TRAIN, offers)
    ]
    if split is Split.HELD_OUT:
        thread = [*thread[: rng.choice((0, 0, 1))], *_asked(rng, split, offers)[:1]]
    first, *rest = thread
    return (msgspec.structs.replace(first, tools=tuple(one.tool for one in offers)), *rest)


def _offers(rng: Random, count: int) -> list[Offer]:
    offers: list[Offer] = []
    while len(offers) < count:
        drawn = kind(rng)
        tool = _tool(rng, drawn)
        if _apart(drawn, tool, offers):
            offers.append(Offer(drawn, tool))
    return offers


def _apart(drawn: Kind, tool: Tool, offers: Sequence[Offer]) -> bool:
    """Whether a tool does what none of the others does."""
    topics = {one.kind.topic for one in offers}
    if "calculator" in {drawn.topic, *topics} and ARITHMETIC & {drawn.topic, *topics} != {
        "calculator"
    }:
        return False
    return drawn.topic not in topics and all(tool.name != one.tool.name for one in offers)


def _tool(rng: Random, drawn: Kind) -> Tool:
    parameters: list[Parameter] = []
    for slot in drawn.slots:
        taken = {parameter.name for parameter in parameters}
        name = rng.choice([name for name in slot.names if name not in taken])
        number = slot.type == "integer" and rng.random() < 0.3
        parameters.append(Parameter(name, "number" if number else slot.type, slot.values))
    if drawn.topic in ("weather", "temperature") and rng.random() < 0.4:
        parameters.append(Parameter("unit", values=UNITS, required=False))
    if rng.random() < 0.15:  # people forget to say what is required
        parameters = [msgspec.structs.replace(one, required=False) for one in parameters]
    return Tool(rng.choice(drawn.names), rng.choice(drawn.descriptions), tuple(parameters))


def _asked(rng: Random, split: Split, offers: Sequence[Offer]) -> list[Exchange]:
    """Ask for something: mostly what a tool does, else what none does."""
    topics = {one.kind.topic for one in offers}
    chance = rng.random()
    if chance < 0.1 and "search" not in topics:
        return [_unfit(rng, split, offers)]
    if chance < 0.18 and not topics & ARITHMETIC:
        return [msgspec.structs.replace(sums.write(rng, split)[0], thinking=UNFIT)]
    one = rng.choice(offers)
    questions = one.kind.questions
    values = _values(rng, split, one.kind)
    if one.kind.both and rng.random() < 0.08:
        second = _values(rng, split, one.kind)
        return [_exchange(rng, one, one.kind.both, [values, second])]
    unit: dict[str, str] = {}
    if len(one.tool.parameters) > len(one.kind.slots) and rng.random() < 0.5:
        unit = {"unit": rng.choice(UNITS)}
        questions = tuple(f"{text.rstrip('?.')} in {{unit}}?" for text in questions)
    exchanges = [_exchange(rng, one, questions, [values], unit)]
    if one.kind.again and rng.random() < 0.15:
        values = _values(rng, split, one.kind)
        exchanges.append(_exchange(rng, one, one.kind.again, [values]))
    return exchanges


def _unfit(rng: Random, split: Split, offers: Sequence[Offer]) -> Exchange:
    """Ask for what none of the tools does."""
    while True:
        drawn = kind(rng)
        if drawn.topic not in ("sum", "calculator") and _apart(drawn, _tool(rng, drawn), offers):
            question = compose(rng, drawn.questions, **_values(rng, split, drawn))
            return Exchange(question, REFUSAL, thinking=UNFIT)


def _exchange(
    rng: Random,
    one: Offer,
    questions: Sequence[str],
    every: Sequence[Values],
    unit: dict[str, str] | None = None,
) -> Exchange:
    """Ask for what the tool does, call it for each of the values, and say what it answers."""
    unit = unit or {}
    second = next(iter(every[-1].values()), "")
    question = compose(rng, questions, **every[0], second=second, **unit)
    names = [parameter.name for parameter in one.tool.parameters]
    calls = tuple(
        Call(one.tool.name, written({**dict(zip(names, values.values(), strict=False)), **unit}))
        for values in every
    )
    failed = rng.random() < FAILED_SHARE
    told = [fails(rng) if failed else one.kind.tell(rng, values) for values in every]
    return Exchange(
        question,
        " ".join(one.words for one in told),
        thinking=FITTING.format(name=one.tool.name),
        calls=calls,
        results=tuple(one.result for one in told),
    )


def written(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _values(rng: Random, split: Split, drawn: Kind) -> Values:
    while True:
        values: Values = {slot.key: slot.draw(rng) for slot in drawn.slots}
        key = _key(drawn, values)
        if key is None or split_of(key) is split:
            return values


def _key(drawn: Kind, values: Values) -> str | None:
    """The key of arguments; numbers to add are those that `sums` holds out.

    Numbers alone, and on and off, are too few to hold some out.
    """
    if drawn.topic == "calculator":
        a, _, b = str(values["sum"]).split()
        return sums.pair_key((int(a), int(b)))
    if drawn.topic in ARITHMETIC:
        return sums.pair_key((int(values["a"]), int(values["b"])))
    texts = [value for value in values.values() if isinstance(value, str)]
    return f"call {drawn.topic} {texts}" if texts and drawn.topic != "device" else None


TOOL_CALL = Skill("tool_call", 2.0, write, "I call a tool.", subject="tools", tools=Tools.OFFERS)
