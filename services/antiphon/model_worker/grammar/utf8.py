"""Which tokens keep an output well-formed UTF-8.

Compiled grammars match bytes, and their character classes let some byte sequences through that
encode no character: surrogate halves and overlong forms. No UTF-8 decoder would read these as what
the grammar meant.

Axes: S states, V vocabulary, W = ceil(V / 32) words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from antiphon.model_worker.batching.token_masks import pack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from antiphon.model_worker.batching.plan import Ints

START = 0
"""Between two characters."""
_ONE, _TWO, _THREE, _E0, _ED, _F0, _F4, _BROKEN = range(1, 9)
"""How many bytes are still expected; after some leading bytes the next has a narrower range."""


class Utf8:
    """The bytes of each token, and the tokens allowed in each state. Immutable."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._ends = ends = _ends(tokens, _table())
        silent = np.array([not token for token in tokens])
        allowed = ends != _BROKEN
        allowed[1:, silent] = False  # no special token within a character
        self.masks: list[Ints] = [pack(row) for row in allowed]

    def after(self, state: int, token: int) -> int:
        """The state after a token."""
        return int(self._ends[state, token])


def _table() -> NDArray[np.uint8]:
    """The next state by state and byte. Source: The Unicode Standard 15.0, table 3-7."""
    table = np.full((_BROKEN + 1, 256), _BROKEN, np.uint8)
    for state, first, last, following in (
        (START, 0x00, 0x7F, START),
        (START, 0xC2, 0xDF, _ONE),
        (START, 0xE0, 0xE0, _E0),
        (START, 0xE1, 0xEF, _TWO),
        (START, 0xED, 0xED, _ED),
        (START, 0xF0, 0xF0, _F0),
        (START, 0xF1, 0xF3, _THREE),
        (START, 0xF4, 0xF4, _F4),
        (_ONE, 0x80, 0xBF, START),
        (_TWO, 0x80, 0xBF, _ONE),
        (_THREE, 0x80, 0xBF, _TWO),
        (_E0, 0xA0, 0xBF, _ONE),
        (_ED, 0x80, 0x9F, _ONE),
        (_F0, 0x90, 0xBF, _TWO),
        (_F4, 0x80, 0x8F, _TWO),
    ):
        table[state, first : last + 1] = following
    return table


def _ends(tokens: Sequence[bytes], table: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The state after each token from each state, (S, V)."""
    lengths = np.array([len(token) for token in tokens])
    starts = np.cumsum(lengths) - lengths
    text = np.frombuffer(b"".join(tokens), np.uint8)
    states = np.repeat(np.arange(_BROKEN, dtype=np.uint8)[:, np.newaxis], len(tokens), axis=1)
    for place in range(int(lengths.max(initial=0))):
        longer = np.flatnonzero(lengths > place)
        states[:, longer] = table[states[:, longer], text[starts[longer] + place]]
    return states
