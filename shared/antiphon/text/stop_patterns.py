"""Regular expressions that end an answer: read by a gateway to refuse, followed by a detokenizer.

They are followed letter by letter by a Thompson automaton (Thompson 1968, CACM 11(6)): the time a
letter takes is bounded by the states of the pattern, whatever the text, so that no pattern can keep
the process that everybody's text passes through. What needs more than the letters so far, such as
look-around, references and the end of a line, is refused.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PATTERN_BYTES_MAX = 256
STATES_MAX = 512
"""Most states of a request's automata, a choice each: `[a-z]{400}` fits. Each state costs time with
every letter of a choice."""

_WORK_MAX = 16 * STATES_MAX
_DEPTH_MAX = 64
_BOUNDS = re.compile(r"\{(\d{0,4})(,?)(\d{0,4})\}")
_ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|[dDsSwWnrtfva]|[^\w\s])")
_SET = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Atom:
    """One letter of the text: any that `letters`, itself a pattern, matches."""

    letters: re.Pattern[str]


@dataclass(frozen=True, slots=True)
class Concatenation:
    """One after the other."""

    parts: tuple[PatternNode, ...]


@dataclass(frozen=True, slots=True)
class Alternation:
    """One of several."""

    parts: tuple[PatternNode, ...]


@dataclass(frozen=True, slots=True)
class Repetition:
    """From `least` times to `most`; None: without end."""

    part: PatternNode
    least: int
    most: int | None


PatternNode = Atom | Concatenation | Alternation | Repetition


@dataclass(slots=True)
class Automaton:
    """States by number. A state with letters moves on by one of them, one without for nothing.

    Attributes:
        start: Where a match begins.
        accept: Where it is complete.
    """

    start: int = 0
    accept: int = 0
    letters: list[re.Pattern[str] | None] = field(default_factory=list[re.Pattern[str] | None])
    following: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    _reach: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])

    @property
    def size(self) -> int:
        """How many states it has."""
        return len(self.letters)

    def reach(self, state: int) -> tuple[int, ...]:
        """The states with letters, and the accepting one, that are reached for nothing."""
        if state not in self._reach:
            seen, todo = {state}, [state]
            while todo:
                here = todo.pop()
                if self.letters[here] is None:
                    fresh = [after for after in self.following[here] if after not in seen]
                    seen.update(fresh)
                    todo.extend(fresh)
            self._reach[state] = tuple(
                each for each in sorted(seen) if self.letters[each] or each == self.accept
            )
        return self._reach[state]


class StopPatternMatcher:
    """Follows one text. The earliest match to be complete counts, and of these the longest.

    Attributes:
        held_from: Where the earliest match that may yet come true begins; the text's end if none.
    """

    def __init__(self, automaton: Automaton) -> None:
        self._automaton = automaton
        self._threads: dict[int, int] = {}
        self._at = 0

    @property
    def held_from(self) -> int:
        """Where the earliest match that may yet come true begins, counted from the beginning."""
        return min(self._threads.values(), default=self._at)

    def feed(self, text: str) -> tuple[int, int] | None:
        """Take more text; return where a match begins and ends, once there is one."""
        for letter in text:
            begun = self._step(letter)
            if begun is not None:
                return begun, self._at
        return None

    def _step(self, letter: str) -> int | None:
        automaton, moved = self._automaton, dict[int, int]()
        threads = self._threads
        for state in automaton.reach(automaton.start):
            threads.setdefault(state, self._at)
        for state, begun in threads.items():
            letters = automaton.letters[state]
            if letters is None or letters.match(letter) is None:
                continue
            for after in automaton.reach(automaton.following[state][0]):
                if moved.get(after, begun) >= begun:
                    moved[after] = begun
        self._threads = moved
        self._at += 1
        return moved.get(automaton.accept)


@lru_cache(maxsize=256)
def compile_pattern(pattern: str) -> Automaton:
    """Read a pattern.

    Raises:
        InvalidRequest: It is malformed, too long, matches the empty text, or is none of those that
            can be followed.
    """
    if len(pattern.encode(errors="replace")) > PATTERN_BYTES_MAX:
        raise InvalidRequest(f"a stop_regex has at most {PATTERN_BYTES_MAX} bytes", param=_FIELD)
    node = _PatternParser(pattern).read()
    made = Automaton(letters=[None], following=[()])
    made.start = _AutomatonBuilder(made).build(node, made.accept)
    if made.accept in made.reach(made.start):
        raise _refusal(pattern, "it matches the empty text")
    return made


def check_patterns(patterns: Sequence[str], choices: int) -> None:
    """Refuse patterns that cannot be followed, or only at the cost of everybody else's text.

    Raises:
        InvalidRequest: One is malformed, or all of them have too many states in all choices.
    """
    states = sum(compile_pattern(pattern).size for pattern in patterns)
    if states * choices > STATES_MAX:
        text = (
            f"stop_regex: {states} states in {choices} answers are {states * choices}; "
            f"a request has at most {STATES_MAX}"
        )
        raise InvalidRequest(text, param=_FIELD)


_FIELD = "stop_regex"


def _refusal(pattern: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"stop_regex {pattern!r}: {reason}", param=_FIELD)


class _AutomatonBuilder:
    """Writes a tree as states, from its end to its beginning."""

    def __init__(self, automaton: Automaton) -> None:
        self._automaton = automaton
        self._work = 0

    def build(self, node: PatternNode, after: int) -> int:
        """Return the state where `node` begins, if what follows it begins at `after`."""
        self._work += 1
        if self._work > _WORK_MAX:
            raise InvalidRequest("stop_regex: it repeats too much", param=_FIELD)
        match node:
            case Atom(letters=letters):
                return self._state(letters, (after,))
            case Concatenation(parts=parts):
                for part in reversed(parts):
                    after = self.build(part, after)
                return after
            case Alternation(parts=parts):
                return self._state(None, tuple(self.build(part, after) for part in parts))
            case Repetition():
                return self._repeat(node, after)

    def _repeat(self, node: Repetition, after: int) -> int:
        here = after
        if node.most is None:
            here = self._state(None, ())
            self._automaton.following[here] = (self.build(node.part, here), after)
        else:
            for _ in range(node.most - node.least):
                here = self._state(None, (self.build(node.part, here), after))
        for _ in range(node.least):
            here = self.build(node.part, here)
        return here

    def _state(self, letters: re.Pattern[str] | None, following: tuple[int, ...]) -> int:
        if len(self._automaton.letters) >= STATES_MAX:
            raise InvalidRequest(f"stop_regex: more than {STATES_MAX} states", param=_FIELD)
        self._automaton.letters.append(letters)
        self._automaton.following.append(following)
        return len(self._automaton.letters) - 1


class _PatternParser:
    """Reads a pattern by recursive descent. What one letter may be is left to `re`."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._depth = 0

    def read(self) -> PatternNode:
        node = self._either()
        if self._at < len(self._pattern):
            raise self._error("unbalanced parenthesis")
        return node

    @property
    def _rest(self) -> str:
        return self._pattern[self._at :]

    def _error(self, reason: str) -> InvalidRequest:
        return _refusal(self._pattern, f"{reason} at {self._at}")

    def _takes(self, text: str) -> bool:
        found = self._pattern.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _either(self) -> PatternNode:
        self._depth += 1
        if self._depth > _DEPTH_MAX:
            raise self._error("nested too deep")
        parts = [Concatenation(tuple(self._parts()))]
        while self._takes("|"):
            parts.append(Concatenation(tuple(self._parts())))
        self._depth -= 1
        return parts[0] if len(parts) == 1 else Alternation(tuple(parts))

    def _parts(self) -> Iterator[PatternNode]:
        while self._rest and self._rest[0] not in "|)":
            yield self._repeated(self._part())

    def _part(self) -> PatternNode:
        if self._takes("("):
            if self._rest.startswith("?") and not self._takes("?:"):
                raise self._error("groups are (...) and (?:...) only")
            node = self._either()
            if not self._takes(")"):
                raise self._error("a parenthesis is not closed")
            return node
        if self._rest[0] in "*+?":
            raise self._error("nothing to repeat")
        if self._rest[0] in "^$":
            raise self._error("the beginning and the end of a line are not supported")
        return self._atom()

    def _atom(self) -> Atom:
        letter = self._rest[0]
        if letter == "[":
            found = _SET.match(self._rest)
        elif letter == "\\":
            found = _ESCAPE.match(self._rest)
        else:
            self._at += 1
            return Atom(_letters(letter if letter == "." else re.escape(letter)))
        if found is None:
            raise self._error("a letter that is not supported")
        try:
            letters = _letters(found[0])
        except (re.error, OverflowError) as error:
            raise self._error(str(error)) from None
        self._at += found.end()
        return Atom(letters)

    def _repeated(self, node: PatternNode) -> PatternNode:
        while self._rest and self._rest[0] in "*+?{":
            if self._takes("*"):
                node = Repetition(node, 0, None)
            elif self._takes("+"):
                node = Repetition(node, 1, None)
            elif self._takes("?"):
                node = Repetition(node, 0, 1)
            else:
                node = self._bounded(node)
            if self._takes("+"):
                raise self._error("possessive repeats are not supported")
            self._takes("?")  # the shortest match is taken anyway
        return node

    def _bounded(self, node: PatternNode) -> PatternNode:
        found = _BOUNDS.match(self._rest)
        if found is None or not (found[1] or found[3]):
            raise self._error("a brace that is no repeat is written \\{")
        self._at += found.end()
        least = int(found[1] or 0)
        most = (int(found[3]) if found[3] else None) if found[2] else least
        if most is not None and most < least:
            raise self._error("the bounds are the wrong way round")
        return Repetition(node, least, most)


@lru_cache(maxsize=1024)
def _letters(source: str) -> re.Pattern[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sets that another dialect would read otherwise
        return re.compile(source)
