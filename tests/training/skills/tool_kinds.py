"""The kinds of tools in chats: their names, the questions for them, and their results."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from random import Random
from typing import TypeAlias

import msgspec
from tests.training.skills.smalltalk import PLACES
from tests.training.words import ADJECTIVES, NOUNS, invented_name, person, phrases, sentence, words

Value: TypeAlias = str | int | bool
Values: TypeAlias = dict[str, Value]


class Told(msgspec.Struct, frozen=True):
    """A tool's result, and the model's words for it; `several`: multiple named values."""

    result: str
    words: str
    several: bool = False


class Slot(msgspec.Struct, frozen=True):
    """An argument: its place in the questions, what tools call it, and what people put there."""

    key: str
    names: tuple[str, ...]
    draw: Callable[[Random], Value]
    type: str = "string"
    values: tuple[str, ...] = ()


class Kind(msgspec.Struct, frozen=True):
    """Tools that do the same thing under many names.

    Attributes:
        topic: Their function; a chat offers one tool per topic.
        questions: Questions for it, with a placeholder for each slot.
        again: Short follow-up questions for another value.
        both: Questions for two values at once, `second` in addition to the first slot.
    """

    topic: str
    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    slots: tuple[Slot, ...]
    questions: tuple[str, ...]
    tell: Callable[[Random, Mapping[str, Value]], Told]
    again: tuple[str, ...] = ()
    both: tuple[str, ...] = ()


CITIES = (
    *PLACES,
    *words("Boston Chicago Vienna Oslo Lisbon Dublin Prague Athens Seoul Delhi Zurich Hamburg"),
    "New York", "San Francisco", "Los Angeles", "Hong Kong", "Buenos Aires", "Cape Town",
)  # fmt: skip
LANGUAGES = words("French German Spanish Italian Polish Swedish Greek Turkish Chinese Japanese")
SYMBOLS = words("AAPL MSFT GOOG NVDA AMZN TSLA META INTC AMD IBM SAP ASML")
SKIES = words("sunny cloudy rainy windy snowy foggy clear stormy dry warm cold mild")
DEVICES = words("light lamp heating radio fan oven television printer door camera music alarm")

FINE = (
    "ok", "OK", "done", "Done.", "success", "true", '{"ok": true}', '{"status": "ok"}',
    '{"success": true}', '{"status": "done"}', '{"result": "ok"}',
)  # fmt: skip
WRONG = ("not found", "no connection", "timeout", "not allowed", "out of order", "unknown name")
FAILED_SHARE = 0.06


def fails(rng: Random) -> Told:
    """A tool that could not do it says why."""
    reason = rng.choice(WRONG) if rng.random() < 0.7 else sentence(rng)
    result = json.dumps({"error": reason}) if rng.random() < 0.7 else f"Error: {reason}"
    return Told(result, f"It failed: {reason}.")


def kind(rng: Random) -> Kind:
    """Draw a kind: a lookup of anything, something to be done, or one of those that all have."""
    chance = rng.random()
    if chance < 0.16:
        return _lookup("weather", ("city", "location", "place", "town"), city, _weather)
    if chance < 0.46:
        return _any_lookup(rng)
    if chance < 0.56:
        return _any_action(rng)
    return rng.choice(_COMMON)


def _lookup(
    topic: str,
    names: tuple[str, ...],
    draw: Callable[[Random], Value],
    result: Callable[[Random], Told],
) -> Kind:
    word = topic.replace(" ", "_")
    what = names[0].replace("_", " ")

    def tell(rng: Random, values: Mapping[str, Value]) -> Told:
        told = result(rng)
        beside = "in" if topic in _THERE else "of"
        sign = ":" if told.several else " is"
        words = f"The {topic} {beside} {values['what']}{sign} {told.words}."
        return msgspec.structs.replace(told, words=words)

    return Kind(
        topic=topic,
        names=(
            f"get_{word}", f"get_{word}", f"{word}", f"find_{word}", f"fetch_{word}",
            f"get_current_{word}", f"lookup_{word}", f"{word}_of",
            f"get{topic.title().replace(' ', '')}",
        ),
        descriptions=(
            f"Get the {topic}.", f"Get the {topic} of a {what}.", f"Get the current {topic}",
            f"Returns the {topic} for a {what}.", f"The {topic} of the given {what}.",
            f"Find out the {topic}.", f"Get the {topic} in a given {what}", "",
        ),
        slots=(Slot("what", names, draw),),
        questions=(
            f"What is the {topic} in {{what}}?", f"What is the {topic} of {{what}}?",
            f"What's the {topic} of {{what}}?", f"What's the {topic} in {{what}}?",
            f"Tell me the {topic} of {{what}}.", f"Tell me the {topic} for {{what}}.",
            f"How is the {topic} in {{what}}?", f"Get the {topic} for {{what}}.",
            f"What is the {topic} like in {{what}}?", f"What's the {topic} like in {{what}}?",
            f"What is the {topic} like in {{what}} today?",
            f"What is {{what}}'s {topic}?", f"{topic.capitalize()} of {{what}}?",
            f"{topic.capitalize()} in {{what}}", f"I need the {topic} of {{what}}.",
            f"Do you know the {topic} of {{what}}?", f"What is the {topic} in {{what}} today?",
            f"Check the {topic} in {{what}}.", f"Which {topic} does {{what}} have?",
        ),
        tell=tell,
        again=("And {what}?", "And in {what}?", "And of {what}?", "What about {what}?",
               "How about {what}?"),
        both=(
            f"What is the {topic} in {{what}} and {{second}}?",
            f"What is the {topic} of {{what}} and of {{second}}?",
            f"Tell me the {topic} in {{what}} and in {{second}}.",
            f"What's the {topic} in {{what}} and in {{second}}?",
            f"Compare the {topic} of {{what}} and {{second}}.",
        ),
    )  # fmt: skip


def _any_lookup(rng: Random) -> Kind:
    topic = rng.choice(tuple(_TOPICS)) if rng.random() < 0.45 else rng.choice(NOUNS)
    names, draw = _TOPICS.get(topic, (("name", "item", "thing", "key", "subject"), _anything))
    return _lookup(topic, names, draw, lambda dice: _fact(dice, topic))


def _any_action(rng: Random) -> Kind:
    """Do something to something, of which there may be several."""
    verb, noun = rng.choice(_DEEDS), rng.choice(NOUNS)
    if rng.random() < 0.35:
        slot = Slot("n", ("count", "number", "amount", "quantity"), _small, "integer")
        asked = (f"{verb.capitalize()} {{n}} {noun}s.", f"Can you {verb} {{n}} {noun}s?",
                 f"Please {verb} {{n}} {noun}s.")  # fmt: skip
        name, about = f"{verb}_{noun}s", f"{verb.capitalize()} some {noun}s."
    else:
        slot = Slot("n", ("name", "title", "what", noun), _anything)
        asked = (f"{verb.capitalize()} the {noun} {{n}}.", f"Can you {verb} the {noun} {{n}}?",
                 f"Please {verb} my {noun} {{n}}.",
                 f"{verb.capitalize()} {noun} {{n}}")  # fmt: skip
        name, about = f"{verb}_{noun}", f"{verb.capitalize()} a {noun}."
    return Kind(f"{verb} {noun}", (name,), (about, ""), (slot,), asked, _did)


def city(rng: Random) -> str:
    return rng.choice(CITIES) if rng.random() < 0.8 else invented_name(rng)


def _person(rng: Random) -> str:
    return person(rng, known=0.7)


def _symbol(rng: Random) -> str:
    if rng.random() < 0.6:
        return rng.choice(SYMBOLS)
    return "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.randint(2, 5)))


def _anything(rng: Random) -> str:
    chance = rng.random()
    if chance < 0.3:
        return rng.choice(NOUNS)
    if chance < 0.5:
        return f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
    if chance < 0.7:
        return _person(rng)
    return city(rng) if chance < 0.9 else _symbol(rng)


def _phrase(rng: Random) -> str:
    return sentence(rng) if rng.random() < 0.4 else _anything(rng)


def _operand(rng: Random) -> int:
    return rng.randint(1, 99) if rng.random() < 0.8 else rng.randint(1, 999)


def _order(rng: Random) -> str:
    return str(rng.randint(100, 99999)) if rng.random() < 0.6 else _symbol(rng)


def _small(rng: Random) -> int:
    return rng.choice((rng.randint(2, 12), rng.randint(2, 60), rng.randint(2, 999)))


def _clock(rng: Random) -> str:
    return f"{rng.randint(0, 23)}:{rng.randint(0, 59):02}"


def _weather(rng: Random) -> Told:
    degrees, sky = rng.randint(0, 35), rng.choice(SKIES)
    plain = (f"{sky}", f"{degrees} degrees", f"{sky}, {degrees} degrees",
             f"{degrees} degrees and {sky}", f"{sky} and {degrees} degrees")  # fmt: skip
    if rng.random() < 0.55:
        text = rng.choice(plain)
        return Told(text, text)
    first = rng.choice(("temperature", "degrees", "temp", "celsius"))
    second = rng.choice(("condition", "conditions", "sky", "weather", "forecast"))
    fields: list[tuple[str, str | int]] = [(first, degrees), (second, sky)]
    rng.shuffle(fields)
    return _object(dict(fields[: rng.choice((1, 2, 2))]))


def _fact(rng: Random, topic: str) -> Told:
    value: str | int = rng.choice((rng.randint(0, 99), rng.randint(100, 99999)))
    if rng.random() < 0.55:
        value = rng.choice((f"{value} {rng.choice(NOUNS)}s", rng.choice(ADJECTIVES), _phrase(rng)))
    if rng.random() < 0.5:
        return Told(str(value), str(value))
    key = rng.choice((topic.replace(" ", "_"), "result", "value", "answer", "data"))
    return _object({key: value})


def _object(fields: Mapping[str, str | int]) -> Told:
    """An object of one field is said as its value, another one with the names of the fields."""
    text = json.dumps(fields)
    if len(fields) == 1:
        (value,) = fields.values()
        return Told(text, str(value))
    return Told(text, ", ".join(f"{key} {value}" for key, value in fields.items()), several=True)


def _did(rng: Random, values: Mapping[str, Value]) -> Told:
    del values
    return Told(rng.choice(FINE), "Done.")


def _number(rng: Random, number: int) -> str:
    key = rng.choice(("result", "answer", "value", "sum"))
    return str(number) if rng.random() < 0.6 else json.dumps({key: number})


def _sum(sign: str) -> Callable[[Random, Mapping[str, Value]], Told]:
    def tell(rng: Random, values: Mapping[str, Value]) -> Told:
        a, b = int(values["a"]), int(values["b"])
        made = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[sign]
        return Told(_number(rng, made), f"{a} {sign} {b} = {made}.")

    return tell


def _arithmetic(topic: str, sign: str, said: str, verb: str, names: tuple[str, ...]) -> Kind:
    return Kind(
        topic=topic,
        names=names,
        descriptions=(
            f"{verb.capitalize()} two numbers.", f"{verb.capitalize()}s two numbers",
            f"{topic.capitalize()} of two numbers", "",
        ),
        slots=(
            Slot("a", ("a", "x", "first", "left", "n1"), _operand, "integer"),
            Slot("b", ("b", "y", "second", "right", "n2"), _operand, "integer"),
        ),
        questions=(
            f"What is {{a}} {sign} {{b}}?", f"What's {{a}} {sign} {{b}}?", f"{{a}} {sign} {{b}}",
            f"What is {{a}} {said} {{b}}?", f"How much is {{a}} {said} {{b}}?",
            f"Calculate {{a}} {sign} {{b}}.", f"{verb.capitalize()} {{a}} and {{b}}.",
            f"{{a}}{sign}{{b}}", f"{{a}} {sign} {{b}} = ?", f"Compute {{a}} {said} {{b}}.",
        ),
        tell=_sum(sign),
    )  # fmt: skip


def _calculate(rng: Random, values: Mapping[str, Value]) -> Told:
    a, sign, b = str(values["sum"]).split()
    return _sum(sign)(rng, {"a": int(a), "b": int(b)})


def _expression(rng: Random) -> str:
    return f"{_operand(rng)} {rng.choice('+-*/')} {_operand(rng)}"


def _found(rng: Random, values: Mapping[str, Value]) -> Told:
    del values
    text = sentence(rng)
    result = text if rng.random() < 0.6 else json.dumps({"result": text})
    return Told(result, f"I found: {text}.")


def _translated(rng: Random, values: Mapping[str, Value]) -> Told:
    text = " ".join(invented_name(rng).lower() for _ in range(rng.randint(1, 4)))
    result = text if rng.random() < 0.6 else json.dumps({"translation": text})
    return Told(result, f"In {values['language']}: {text}.")


def _is(draw: Callable[[Random], Value]) -> Callable[[Random, Mapping[str, Value]], Told]:
    def tell(rng: Random, values: Mapping[str, Value]) -> Told:
        del values
        value = str(draw(rng))
        result = value if rng.random() < 0.6 else json.dumps({"result": value})
        return Told(result, f"It is {value}.")

    return tell


def _day(rng: Random) -> str:
    return rng.choice(words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday"))


_THERE = ("weather", "temperature", "forecast", "time", "news")
_PLACE = ("city", "location", "place", "town")
_COUNTRY = ("country", "place", "name")
_WHO = ("name", "person", "user", "who", "contact")
_THING = ("item", "product", "name", "thing")
_TOPICS: dict[str, tuple[tuple[str, ...], Callable[[Random], Value]]] = {
    topic: (names, draw)
    for topics, names, draw in (
        ("temperature | forecast | time | population | news | mayor", _PLACE, city),
        ("capital | currency", _COUNTRY, city),
        ("price", _THING, _anything),
        ("stock price", ("symbol", "ticker", "company"), _symbol),
        ("phone number | address | email | birthday | age", _WHO, _person),
        ("status", ("order", "order_id", "id"), _order),
        ("definition", ("word", "term"), _anything),
        ("recipe", ("dish", "food", "name"), _anything),
    )
    for topic in phrases(topics)
}

_COMMON = (
    _arithmetic("sum", "+", "plus", "add", ("add", "sum", "plus", "add_numbers", "addition")),
    _arithmetic("difference", "-", "minus", "subtract",
                ("subtract", "minus", "difference", "sub")),
    _arithmetic("product", "*", "times", "multiply", ("multiply", "times", "product", "mul")),
    Kind(
        topic="calculator",
        names=("calculate", "calculator", "compute", "evaluate", "eval"),
        descriptions=("Calculates.", "Evaluate an expression.", "A calculator", "Does sums."),
        slots=(Slot("sum", ("expression", "formula", "input", "query"), _expression),),
        questions=("What is {sum}?", "What's {sum}?", "{sum}", "{sum} = ?", "Calculate {sum}.",
                   "How much is {sum}?", "Compute {sum}."),
        tell=_calculate,
    ),
    Kind(
        topic="message",
        names=("send_message", "send_email", "send_sms", "send", "message", "notify", "mail"),
        descriptions=("Send a message.", "Sends a text to somebody.", "Write to a person", ""),
        slots=(
            Slot("to", ("to", "recipient", "name", "person", "contact"), _person),
            Slot("text", ("text", "message", "body", "content"), sentence),
        ),
        questions=(
            "Send {to} the message: {text}", "Tell {to} that {text}.", "Write to {to}: {text}",
            'Send a message to {to} saying "{text}".', "Let {to} know that {text}.",
            'Send "{text}" to {to}.', "Message {to}: {text}",
        ),
        tell=_did,
    ),
    Kind(
        topic="timer",
        names=("set_timer", "start_timer", "timer", "create_timer"),
        descriptions=("Set a timer.", "Starts a timer", "A kitchen timer"),
        slots=(Slot("n", ("minutes", "duration", "time", "length"), _small, "integer"),),
        questions=("Set a timer for {n} minutes.", "Start a timer of {n} minutes.",
                   "Timer for {n} minutes", "Remind me in {n} minutes.",
                   "Can you set a timer for {n} minutes?"),
        tell=_did,
    ),
    Kind(
        topic="alarm",
        names=("set_alarm", "alarm", "wake_up", "create_alarm"),
        descriptions=("Set an alarm.", "Wakes the user", "An alarm clock"),
        slots=(Slot("at", ("time", "at", "when"), _clock),),
        questions=("Set an alarm for {at}.", "Wake me at {at}.", "Wake me up at {at}.",
                   "I have to get up at {at}.", "Alarm at {at}"),
        tell=_did,
    ),
    Kind(
        topic="device",
        names=("switch", "set_device", "turn", "control_device", "power"),
        descriptions=("Turn a device on or off.", "Switches things", "Controls a device."),
        slots=(
            Slot("what", ("device", "name", "thing"), lambda rng: rng.choice(DEVICES)),
            Slot("state", ("state", "to", "power"), lambda rng: rng.choice(("on", "off")),
                 values=("on", "off")),
        ),
        questions=("Turn {state} the {what}.", "Turn the {what} {state}.",
                   "Switch the {what} {state}.", "Can you turn the {what} {state}?",
                   "{what} {state}"),
        tell=_did,
    ),
    Kind(
        topic="search",
        names=("search", "web_search", "search_web", "google", "find", "lookup"),
        descriptions=("Search the web.", "Search for something", "Finds pages.", "A search engine"),
        slots=(Slot("what", ("query", "q", "text", "term"), _phrase),),
        questions=("Search for {what}.", "Search the web for {what}.", "Look up {what}.",
                   "Google {what}", "Find {what}.", "Search: {what}", "Can you look up {what}?"),
        tell=_found,
    ),
    Kind(
        topic="translation",
        names=("translate", "translate_text", "translation", "translator"),
        descriptions=("Translate a text.", "Translates into another language", "A dictionary"),
        slots=(
            Slot("text", ("text", "phrase", "sentence"), _phrase),
            Slot("language", ("language", "to", "target", "target_language"),
                 lambda rng: rng.choice(LANGUAGES)),
        ),
        questions=("Translate {text} into {language}.", 'Translate "{text}" to {language}.',
                   "How do you say {text} in {language}?", "What is {text} in {language}?",
                   'Say "{text}" in {language}.'),
        tell=_translated,
    ),
    Kind(
        topic="clock",
        names=("get_time", "get_current_time", "time", "clock", "now"),
        descriptions=("Get the time.", "Tells the current time", "The time of day"),
        slots=(),
        questions=("What time is it?", "What's the time?", "Tell me the time.",
                   "Do you know what time it is?", "What time is it now?"),
        tell=_is(_clock),
    ),
    Kind(
        topic="calendar",
        names=("get_date", "get_day", "today", "date", "current_date"),
        descriptions=("Get the day.", "Tells which day it is", "The date of today"),
        slots=(),
        questions=("What day is it?", "What day is it today?", "Which day is today?",
                   "What is the date?", "What is today's date?"),
        tell=_is(_day),
    ),
)  # fmt: skip

_DEEDS = words(
    """
    open close start stop lock clean paint book order buy read play delete print repair move hide
    sell cook draw build wash count sort rename copy save load pause watch
    """
)
