"""Counts the reasoning tokens of an answer by the markers in its text."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from antiphon.detokenizer.stop import partial_match_length
from antiphon.wire.thinking import SPACE_MAX

if TYPE_CHECKING:
    from antiphon.wire.thinking import ThinkingMarks

_WHITE = " \t\r\n"


class ThinkingCounter:
    """Counts one choice's reasoning tokens, however its text is split into tokens.

    A token that is partly reasoning counts. The gateway splits the text by the same markers.

    Attributes:
        tokens: Tokens so far that are certain to be reasoning.
    """

    def __init__(self, marks: ThinkingMarks) -> None:
        self.tokens = 0
        self._marks = marks
        self._thinks = marks.inside
        self._over = False
        self._text = ""  # the undecided text
        self._at = 0  # where it begins in the whole text
        self._ends: deque[tuple[int, int]] = deque()  # ends of text and tokens, from there on
        self._before = (0, 0)  # the last end before it
        self._counted = 0  # tokens of reasoning that has ended
        self._closed_at = 0  # tokens up to its end
        self._from = 0  # tokens before the reasoning that has not ended

    def push(self, text: str, tokens: int) -> None:
        """Add text; `tokens` is the choice's token count including it."""
        if self._over or not text:
            return
        self._text += text
        self._ends.append((self._at + len(self._text), tokens))
        while not self._over and (self._close() if self._thinks else self._open()):
            pass
        self.tokens = self._counted
        if self._thinks:
            unsure = max(
                (partial_match_length(self._text, cut) for cut in self._marks.cuts), default=0
            )
            self.tokens += self._reach(self._at + len(self._text) - unsure) - self._from

    def end(self, tokens: int) -> None:
        """End the choice at `tokens` tokens: unfinished reasoning extends to there."""
        if self._thinks and not self._over:
            self.tokens = self._counted + tokens - self._from
        self._over = True

    def _close(self) -> bool:
        """Search for the end of reasoning; return whether it was found."""
        marks = self._marks
        places = [(self._text.find(mark), mark) for mark in (marks.end, *marks.cuts)]
        found = min((place for place in places if place[0] >= 0), default=None)
        if found is None:
            self._drop(
                len(self._text) - max(partial_match_length(self._text, mark) for _, mark in places)
            )
            return False
        place, mark = found
        stop = place + len(mark) if mark == marks.end else place
        self._closed_at = self._reach(self._at + stop)
        self._counted += self._closed_at - self._from
        self._thinks, self._over = False, not marks.again
        self._drop(stop)
        return True

    def _open(self) -> bool:
        """Search for the beginning of reasoning; return whether it was found."""
        begin = self._marks.begin
        if self._marks.again:
            place = self._text.find(begin)
            if place < 0:
                self._drop(len(self._text) - partial_match_length(self._text, begin))
                return False
            self._drop(place)
            # The token that ended the previous reasoning may begin this one, too.
            self._from, place = max(self._before[1], self._closed_at), 0
        else:
            head = self._text[:SPACE_MAX]
            place = len(head) - len(head.lstrip(_WHITE))
            if not self._text.startswith(begin, place):
                self._over = not begin.startswith(self._text[place:])
                return False
        self._drop(place + len(begin))
        self._thinks = True
        return True

    def _drop(self, count: int) -> None:
        """Drop the first characters of the undecided text."""
        self._text = self._text[count:]
        self._at += count
        while self._ends and self._ends[0][0] <= self._at:
            self._before = self._ends.popleft()

    def _reach(self, place: int) -> int:
        """Number of tokens up to a position, which is not before the undecided text."""
        if place <= self._before[0]:
            return self._before[1]
        return next(tokens for end, tokens in self._ends if end >= place)
