"""Stop patterns (`stop_regex`): validated by the gateway, matched by the detokenizer.

A Thompson automaton (Thompson 1968, CACM 11(6)) matches character by character: the time per
character is bounded by the number of states, whatever the text, so that no pattern can block the
detokenizer, which all requests share. Patterns that need more than the characters so far, such as
look-around, back-references and line anchors, are rejected.
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
_FIELD = "stop_regex"
STATES_MAX = 512
"""Maximum states of a request's automata, over all choices: `[a-z]{400}` fits. Each state costs
time at every character of a choice."""

_WORK_MAX = 16 * STATES_MAX
_DEPTH_MAX = 64
_BOUNDS = re.compile(r"\{(\d{0,4})(,?)(\d{0,4})\}")
_ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|[dDsSwWnrtfva]|[^\w\s])")
_REPEATS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_SET = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Atom:
    """One character of the text: any that the pattern `letters` matches."""

    letters: re.Pattern[str]


@dataclass(frozen=True, slots=True)
class Concatenation:
    parts: tuple[PatternNode, ...]


@dataclass(frozen=True, slots=True)
class Alternation:
    parts: tuple[PatternNode, ...]


@dataclass(frozen=True, slots=True)
class Repetition:
    """`part` repeated `least` to `most` times; None: unbounded."""

    part: PatternNode
    least: int
    most: int | None


PatternNode = Atom | Concatenation | Alternation | Repetition


@dataclass(slots=True)
class Automaton:
    """An NFA; states are indexes. A state without `letters` has only empty transitions."""

    start: int = 0
    accept: int = 0
    letters: list[re.Pattern[str] | None] = field(default_factory=list[re.Pattern[str] | None])
    following: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    _reach: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    _work: int = 0

    @property
    def size(self) -> int:
        return len(self.letters)

    def build(self, node: PatternNode, after: int) -> int:
        """Add states for `node`, from its end to its start, and return its start state.

        `after` is the start state of what follows it.
        """
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
            self.following[here] = (self.build(node.part, here), after)
        else:
            for _ in range(node.most - node.least):
                here = self._state(None, (self.build(node.part, here), after))
        for _ in range(node.least):
            here = self.build(node.part, here)
        return here

    def _state(self, letters: re.Pattern[str] | None, following: tuple[int, ...]) -> int:
        if len(self.letters) >= STATES_MAX:
            raise InvalidRequest(f"stop_regex: more than {STATES_MAX} states", param=_FIELD)
        self.letters.append(letters)
        self.following.append(following)
        return len(self.letters) - 1

    def reach(self, state: int) -> tuple[int, ...]:
        """The empty closure: states with letters, and the accepting one, reached from `state`."""
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
    """Searches one text. The first match to complete wins, and among those the longest."""

    def __init__(self, automaton: Automaton) -> None:
        self._automaton = automaton
        self._threads: dict[int, int] = {}
        self._at = 0

    @property
    def held_from(self) -> int:
        """Start of the earliest match still possible, as an offset in the whole text."""
        return min(self._threads.values(), default=self._at)

    def feed(self, text: str) -> tuple[int, int] | None:
        """Process more text; return the start and end of a match, once there is one."""
        for letter in text:
            if (match_start := self._step(letter)) is not None:
                return match_start, self._at
        return None

    def _step(self, letter: str) -> int | None:
        automaton, threads, moved = self._automaton, self._threads, dict[int, int]()
        for state in automaton.reach(automaton.start):
            threads.setdefault(state, self._at)
        for state, match_start in threads.items():
            letters = automaton.letters[state]
            if letters is None or letters.match(letter) is None:
                continue
            for after in automaton.reach(automaton.following[state][0]):
                if moved.get(after, match_start) >= match_start:
                    moved[after] = match_start
        self._threads = moved
        self._at += 1
        return moved.get(automaton.accept)


@lru_cache(maxsize=256)
def compile_pattern(pattern: str) -> Automaton:
    """Compile a pattern to an automaton.

    InvalidRequest: it is malformed, too long, matches the empty text, or needs an unsupported
    construct.
    """
    if len(pattern.encode(errors="replace")) > PATTERN_BYTES_MAX:
        raise InvalidRequest(f"a stop_regex has at most {PATTERN_BYTES_MAX} bytes", param=_FIELD)
    node = _PatternParser(pattern).read()
    automaton = Automaton(letters=[None], following=[()])
    automaton.start = automaton.build(node, automaton.accept)
    if automaton.accept in automaton.reach(automaton.start):
        raise _refusal(pattern, "it matches the empty text")
    return automaton


def check_patterns(patterns: Sequence[str], choices: int) -> None:
    """Reject patterns that are unsupported, or have too many states over all choices."""
    states = sum(compile_pattern(pattern).size for pattern in patterns)
    if states * choices > STATES_MAX:
        text = f"stop_regex: {states} states in {choices} answers are {states * choices}"
        raise InvalidRequest(f"{text}; a request has at most {STATES_MAX}", param=_FIELD)


def _refusal(pattern: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"stop_regex {pattern!r}: {reason}", param=_FIELD)


class _PatternParser:
    """Parses a pattern by recursive descent. Character classes are left to `re`."""

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
            if self._rest[0] == "{":
                node = self._bounded(node)
            else:
                node = Repetition(node, *_REPEATS[self._rest[0]])
                self._at += 1
            if self._takes("+"):
                raise self._error("possessive repeats are not supported")
            self._takes("?")  # lazy repeats: the first match to complete wins anyway
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
        warnings.simplefilter("ignore")  # about character sets that other dialects read differently
        return re.compile(source)
