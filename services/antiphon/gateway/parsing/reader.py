"""Text that comes in pieces, read as if it were all there.

A format is a generator: it reads by `yield from` the methods of a `Reader`, which wait (`yield`)
where the text at hand does not decide what comes next. No method looks at where a piece ends for
any other purpose, so what a format makes of a text cannot depend on how the text was cut.

The reader forgets what was read: what it holds is what is undecided.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")

Steps = Generator[None, None, T]
"""Work that waits for text, and then returns a `T`."""
Emit = Callable[[str], None]

TRIM_MAX = 16
"""Most white space that is dropped before a mark, and so the most that waits for one."""

_WHITE = " \t\r\n"
_SPACE = re.compile(r"[ \t\r\n]*")


def drop(_: str) -> None:
    """Emit nothing."""


class Marks:
    """Strings to be found in a text: the earliest counts.

    None may stand inside another one except as its end, or which one is found would depend on how
    much of the text is there.
    """

    def __init__(self, *marks: str, trim: bool = False, trim_end: bool = False) -> None:
        """Prepare the search.

        Args:
            marks: The strings.
            trim: Whether white space before a mark belongs to it.
            trim_end: Whether the end of the text counts as a mark in this.
        """
        for mark in marks:
            inner = [other for other in marks if other != mark and other in mark[:-1]]
            assert not inner, f"{mark!r} holds {inner}"
        trim = trim or trim_end
        self.trim = trim
        self.trim_end = trim_end
        self._found = re.compile("|".join(map(re.escape, marks))) if marks else None
        partial = "|".join(_beginning(mark) for mark in marks if len(mark) > 1) or "(?!)"
        space = f"[ \\t\\r\\n]{{0,{TRIM_MAX}}}" if trim else ""
        self._held = re.compile(f"{space}(?:{partial})?\\Z")
        self._held_max = max(map(len, marks), default=0) + (TRIM_MAX if trim else 0)

    def search(self, text: str, at: int) -> re.Match[str] | None:
        """Find the first mark from there on."""
        return self._found.search(text, at) if self._found else None

    def held_from(self, text: str, at: int) -> int:
        """The place from which on the text may be, or become, a part of a mark."""
        held = self._held.search(text, max(at, len(text) - self._held_max))
        assert held is not None, "the empty end always matches"
        return held.start()


AFTER_CALLS = Marks(trim_end=True)
"""No mark at all; white space at the end is dropped."""


class Reader:
    """The text of one answer, as far as it has come and has not been read."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self.trimmed = ""
        """The white space that was dropped before the last mark."""
        self._kept: list[str] | None = None
        self._kept_from = 0
        self._show: Emit | None = None

    @property
    def held(self) -> int:
        """Characters that came and were not read yet."""
        return len(self._text) - self._at

    @property
    def ended(self) -> bool:
        """Whether everything was read and no more will come."""
        return self._ended and self._at == len(self._text)

    def push(self, text: str) -> None:
        """Take the next piece."""
        if self._kept is not None:
            self._kept.append(self._text[self._kept_from : self._at])
        self.flush()
        self._kept_from = 0
        self._text = self._text[self._at :] + text
        self._at = 0

    def close(self) -> None:
        """Say that no more will come."""
        self._ended = True

    def keep(self, read: str = "") -> None:
        """Remember what is read from here on, and before it what was `read` just now."""
        self.forget()
        self._kept = [read]
        self._kept_from = self._at

    def kept(self) -> str:
        """Return what was read since `keep`, and forget it; empty where nothing is kept."""
        parts = [*self._kept, self._text[self._kept_from : self._at]] if self._kept else []
        self.forget()
        return "".join(parts)

    def forget(self) -> None:
        """Remember nothing any more, and copy nothing."""
        self.flush()
        self._kept = self._show = None

    def show(self, emit: Emit) -> None:
        """Copy what is read from here on, as it is, until `keep`, `kept` or `forget`."""
        self.forget()
        self._show = emit
        self._kept_from = self._at

    @property
    def shows(self) -> bool:
        """Whether what is read is copied."""
        return self._show is not None

    def flush(self) -> None:
        """Copy what was read, if it is copied."""
        if self._show is not None and self._at > self._kept_from:
            self._show(self._text[self._kept_from : self._at])
            self._kept_from = self._at

    def until(self, marks: Marks, emit: Emit) -> Steps[str | None]:
        """Emit text up to a mark and read the mark, too. None: the text ended without one."""
        while True:
            found = marks.search(self._text, self._at)
            if found is not None:
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
        """Emit everything."""
        while not self._ended:
            self._emit_to(len(self._text), emit)
            yield
        self._emit_to(len(self._text), emit)

    def run(self, pattern: re.Pattern[str], emit: Emit = drop) -> Steps[None]:
        """Emit characters as long as they match; `pattern` is of the form `[...]*`."""
        while True:
            match = pattern.match(self._text, self._at)
            assert match is not None, "a run may be empty"
            self._emit_to(match.end(), emit)
            if self._at < len(self._text) or self._ended:
                return
            yield

    def space(self) -> Steps[None]:
        """Read white space, however much."""
        yield from self.run(_SPACE)

    def word(self, pattern: re.Pattern[str], most: int) -> Steps[str]:
        """Read characters as long as they match, at most so many; `pattern` is as in `run`."""
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
        """Read so many characters, or fewer where the text ends."""
        while len(self._text) - self._at < count and not self._ended:
            yield
        taken = self._text[self._at : self._at + count]
        self._at += len(taken)
        return taken

    def starts(self, *literals: str) -> Steps[str | None]:
        """Read one of these if it comes next; else read nothing.

        None of them may begin with another one.
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
        """Where the text up to there ends without its white space."""
        least = max(self._at, end - TRIM_MAX)
        return least + len(self._text[least:end].rstrip(_WHITE))

    def _emit_to(self, end: int, emit: Emit) -> None:
        if end > self._at:
            text = self._text[self._at : end]
            self._at = end
            emit(text)


def _beginning(mark: str) -> str:
    """A pattern of all beginnings of a mark but the whole of it, the longest first."""
    pattern = ""
    for character in reversed(mark[:-1]):
        pattern = re.escape(character) + (f"(?:{pattern})?" if pattern else "")
    return pattern
