"""Token ids to text, a token at a time, never showing half a character.

Ids are decoded one by one whatever batch they came in, so the text is a pure function of the ids:
a detokenizer that starts over from offset 0 says the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int], bool], str]
"""(ids, skip special tokens) -> text."""

HELD_TOKENS_MAX = 8
"""A UTF-8 character has at most four bytes. What is still broken after twice as many tokens of a
byte each will never become one, so it is shown as it is."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class IncrementalDecoder:
    """Turns the ids of one choice into text.

    A token's text depends on its neighbours: SentencePiece drops the first space, byte tokens are
    parts of characters. So the ids since the last clean cut are decoded together with the ones
    just before it, and the difference is what is new.
    """

    def __init__(self, decode: Decode, skip_special_tokens: bool) -> None:
        self._decode = decode
        self._skip = skip_special_tokens
        self._shown: list[int] = []  # ids whose text is out, kept for context
        self._shown_text = ""
        self._held: list[int] = []  # ids whose text may still be half a character

    @property
    def holds(self) -> bool:
        """Whether the text of some token is not out yet."""
        return bool(self._held)

    def push(self, token_id: int) -> str:
        """Take the next id; return the text that is certain now, perhaps none."""
        self._held.append(token_id)
        text = self._decode([*self._shown, *self._held], self._skip)
        if text.endswith(REPLACEMENT) and len(self._held) < HELD_TOKENS_MAX:
            return ""
        return self._release(text)

    def flush(self) -> str:
        """Return what is left at the end: half a character shows as U+FFFD."""
        if not self._held:
            return ""
        return self._release(self._decode([*self._shown, *self._held], self._skip))

    def _release(self, text: str) -> str:
        new = text[len(self._shown_text) :]
        self._shown, self._held = self._held, []
        self._shown_text = self._decode(self._shown, self._skip)
        return new
