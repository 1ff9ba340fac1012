"""Token ids to text, a token at a time, never showing half a character.

Ids are decoded one by one whatever batch they came in, so the text is a pure function of the ids:
a detokenizer that starts over from offset 0 says the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int], bool], str]
"""(ids, skip special tokens) -> text."""

HELD_TOKENS_MAX = 8
"""Tokens that are decoded together at most, beside the context: a text may go on for ever without
a token that ends with its character."""

BROKEN_MAX = 3
"""Of a UTF-8 character's four bytes, one at least is still to come: of as many U+FFFD at the end of
a text is not known what they become. Those before them stay what they are."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class IncrementalDecoder:
    """Turns the ids of one choice into text; the pieces add up to the text of all ids at once.

    A token's text depends on its neighbours: SentencePiece drops the first space, byte tokens are
    parts of characters. So the ids since the last clean cut are decoded together with the ones
    just before it, and the difference is what is new. Special tokens that are skipped are no such
    context: the word behind them would lose its space as if it were the first.

    Two differences stay. A U+FFFD that the model itself spells in bytes looks like a character that
    is not whole yet: the bytes behind it may come out as U+FFFD, too. And where tokens that stand
    for bytes make no valid text, SentencePiece shows every byte of their whole run as U+FFFD; here
    what was whole is out already and stays.
    """

    def __init__(self, decode: Decode, skip_special_tokens: bool) -> None:
        self._decode = decode
        self._skip = skip_special_tokens
        self._context: list[int] = []  # ids whose text is out
        self._held: list[int] = []  # ids whose text may still end with half a character
        self._shown = ""  # what is out of the text of both

    @property
    def has_pending(self) -> bool:
        """Whether the text of some token is not out yet."""
        return bool(self._held)

    def push(self, token_id: int) -> str:
        """Take the next id; return the text that is certain now, perhaps none."""
        self._held.append(token_id)
        text = self._text([*self._context, *self._held])
        if not text.endswith(REPLACEMENT):
            return self._release(text)
        new = self._advance(text)
        if len(self._held) >= HELD_TOKENS_MAX:
            self._forget()
        return new

    def flush(self) -> str:
        """Return what is left at the end: half a character shows as U+FFFD."""
        if not self._held:
            return ""
        return self._release(self._text([*self._context, *self._held]))

    def _release(self, text: str) -> str:
        """Show all that is held, and keep it as context if it can be one."""
        if not text.startswith(self._shown):
            # Bytes that broke the run of the context's: what they are by themselves.
            text, self._shown = self._text(self._held), ""
        new = text[len(self._shown) :]
        if self._writes(self._held):
            self._context = self._held
        self._held = []
        self._shown = self._text(self._context)
        return new

    def _advance(self, text: str) -> str:
        """Show what is certain of a text that ends with U+FFFD."""
        if not text.startswith(self._shown):
            # SentencePiece shows no byte of a run before all of it is valid.
            if len(self._held) <= BROKEN_MAX:
                return ""
            self._context, self._shown = [], ""
            text = self._text(self._held)
        certain = _certain(text)
        new = certain[len(self._shown) :]
        self._shown = max(self._shown, certain, key=len)
        return new

    def _forget(self) -> None:
        """Keep the fewest of the last ids that still decide what half a character becomes."""
        waiting = len(self._text([*self._context, *self._held])) - len(self._shown)
        texts = [(start, self._text(self._held[start:])) for start in range(1, len(self._held))]
        for whole in (True, False):
            for start, text in reversed(texts):
                shown = text[: len(text) - waiting]
                # Best is a whole character before the broken one. Where each token ends inside of
                # one, these begin inside of one, too: then so many bytes that the broken one is
                # among them to its beginning.
                if shown and REPLACEMENT not in shown if whole else len(text) > BROKEN_MAX:
                    self._context, self._held, self._shown = [], self._held[start:], shown
                    return
        # Half a character, and special tokens that are skipped.
        self._held = [token for token in self._held if self._writes([token])]

    def _writes(self, ids: Sequence[int]) -> bool:
        """Whether ids leave a trace in a text. One that is a space alone does, behind others."""
        return bool(self._text(ids) or self._text([*ids, *ids]))

    def _text(self, ids: Sequence[int]) -> str:
        return self._decode(ids, self._skip)


def _certain(text: str) -> str:
    """A text without the U+FFFD at its end that may become something else."""
    broken = len(text) - len(text.rstrip(REPLACEMENT))
    return text[: len(text) - min(broken, BROKEN_MAX)]
