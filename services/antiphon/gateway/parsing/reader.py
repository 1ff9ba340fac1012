"""Reads text that arrives in pieces as if it were complete.

A format is a generator: it reads by `yield from` the methods of a `Reader`, which wait (`yield`)
while the available text does not decide what comes next. No method uses piece boundaries otherwise,
so the output of a format cannot depend on how the text was split.

The reader discards what was read: it holds only the undecided text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")

Steps = Generator[None, None, T]  # work that waits for text, and then returns a `T`
Emit = Callable[[str], None]

TRIM_MAX = 16
"""Maximum white space dropped before a delimiter, and so the most that is held for one."""

WHITE = re.compile(r"[ \t\r\n]*")


def drop(_: str) -> None:
    pass


class Marks:
    """Strings to search for: the earliest match counts.

    None may occur inside another one except at its end, or the match would depend on how much of
    the text has arrived.
    """

    def __init__(self, *marks: str, trim: bool = False, trim_end: bool = False) -> None:
        for mark in marks:
            inner = [other for other in marks if other != mark and other in mark[:-1]]
            assert not inner, f"{mark!r} contains {inner}"
        trim = trim or trim_end
        self.trim = trim  # white space before a match belongs to it
        self.trim_end = trim_end  # the end of the text counts as a match for trimming
        self.found = re.compile("|".join(map(re.escape, marks)) or "(?!)")
        partial = "|".join(_beginning(mark) for mark in marks if len(mark) > 1) or "(?!)"
        space = f"[ \\t\\r\\n]{{0,{TRIM_MAX}}}" if trim else ""
        self._held = re.compile(f"{space}(?:{partial})?\\Z")
        self._held_max = max(map(len, marks), default=0) + (TRIM_MAX if trim else 0)

    def held_from(self, text: str, at: int) -> int:
        """Position from which the text may be, or become, part of a match."""
        held = self._held.search(text, max(at, len(text) - self._held_max))
        assert held is not None, "the empty end always matches"
        return held.start()


AFTER_CALLS = Marks(trim_end=True)  # no strings: only white space at the end is dropped


class Reader:
    """The part of one output that has arrived and was not read."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self.trimmed = ""  # white space dropped before the last match
        self._kept: list[str] | None = None
        self._kept_from = 0
        self._show: Emit | None = None

    @property
    def held(self) -> int:
        return len(self._text) - self._at

    @property
    def ended(self) -> bool:
        """Whether everything was read and no more will arrive."""
        return self._ended and self._at == len(self._text)

    def push(self, text: str) -> None:
        if self._kept is not None:
            self._kept.append(self._text[self._kept_from : self._at])
        self.flush()
        self._kept_from = 0
        self._text = self._text[self._at :] + text
        self._at = 0

    def close(self) -> None:
        self._ended = True

    def keep(self, read: str = "") -> None:
        """Record what is read from here on, after `read`, which was read just now."""
        self.forget()
        self._kept = [read]
        self._kept_from = self._at

    def kept(self) -> str:
        """Return the recorded text and stop recording; empty if nothing is recorded."""
        parts = [*self._kept, self._text[self._kept_from : self._at]] if self._kept else []
        self.forget()
        return "".join(parts)

    def forget(self) -> None:
        """Stop recording and copying."""
        self.flush()
        self._kept = self._show = None

    def show(self, emit: Emit) -> None:
        """Copy what is read from here on, unchanged, until `keep`, `kept` or `forget`."""
        self.forget()
        self._show = emit
        self._kept_from = self._at

    @property
    def shows(self) -> bool:
        return self._show is not None

    def flush(self) -> None:
        if self._show is not None and self._at > self._kept_from:
            self._show(self._text[self._kept_from : self._at])
            self._kept_from = self._at

    def until(self, marks: Marks, emit: Emit) -> Steps[str | None]:
        """Emit text up to a match and read the match; return None if the text ended without one."""
        while True:
            if (found := marks.found.search(self._text, self._at)) is not None:
                end = found.start()
                self._emit_to(self._trimmed(end) if marks.trim else end, emit)
                self.trimmed = self._text[self._at : end]
                self._at = found.end()
                return found[0]
            if self._ended:
                end = len(self._text)
                self._emit_to(self._trimmed(end) if marks.trim_end else end, emit)
                self._at = end
                return None
            self._emit_to(marks.held_from(self._text, self._at), emit)
            yield

    def rest(self, emit: Emit) -> Steps[None]:
        while not self._ended:
            self._emit_to(len(self._text), emit)
            yield
        self._emit_to(len(self._text), emit)

    def run(self, pattern: re.Pattern[str], emit: Emit = drop) -> Steps[None]:
        """Emit characters while they match; `pattern` has the form `[...]*`."""
        while True:
            match = pattern.match(self._text, self._at)
            assert match is not None, "a run may be empty"
            self._emit_to(match.end(), emit)
            if self._at < len(self._text) or self._ended:
                return
            yield

    def space(self) -> Steps[None]:
        yield from self.run(WHITE)

    def word(self, pattern: re.Pattern[str], most: int) -> Steps[str]:
        """Read up to `most` characters while they match; `pattern` is as in `run`."""
        while True:
            match = pattern.match(self._text, self._at, self._at + most)
            assert match is not None, "a word may be empty"
            if match.end() < len(self._text) or self._ended or len(match[0]) == most:
                self._at = match.end()
                return match[0]
            yield

    def peek(self) -> Steps[str]:
        """Return the next character without reading it; empty at the end."""
        while self._at == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def take(self, count: int) -> Steps[str]:
        """Read this many characters, or fewer at the end."""
        while len(self._text) - self._at < count and not self._ended:
            yield
        taken = self._text[self._at : self._at + count]
        self._at += len(taken)
        return taken

    def starts(self, *literals: str) -> Steps[str | None]:
        """Read one of these strings if it comes next, else nothing.

        None may be a prefix of another one.
        """
        while True:
            for literal in literals:
                if self._text.startswith(literal, self._at):
                    self._at += len(literal)
                    return literal
            here = self._text[self._at : self._at + max(map(len, literals))]
            if self._ended or not any(literal.startswith(here) for literal in literals):
                return None
            yield

    def _trimmed(self, end: int) -> int:
        """Position of the end without trailing white space."""
        least = max(self._at, end - TRIM_MAX)
        return least + len(self._text[least:end].rstrip(" \t\r\n"))

    def _emit_to(self, end: int, emit: Emit) -> None:
        if end > self._at:
            text = self._text[self._at : end]
            self._at = end
            emit(text)


def _beginning(mark: str) -> str:
    """A pattern of all proper prefixes of a delimiter, the longest first."""
    pattern = ""
    for character in reversed(mark[:-1]):
        pattern = re.escape(character) + (f"(?:{pattern})?" if pattern else "")
    return pattern
