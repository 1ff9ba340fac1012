"""A compiler of one-sentence grammars, which does as it is told."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from antiphon.model_worker.batching.token_masks import pack
from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.model_worker.batching.plan import Ints
    from antiphon.model_worker.grammar.source import GrammarSource

VOCAB_SIZE = 40
END = 2


class Word:
    """A grammar of one sentence: the letters of its text, as ids, and an end."""

    def __init__(self, text: str) -> None:
        self.letters = [*(byte - ord("a") + 3 for byte in text.encode()), END]
        self.size_bytes = 1000 * len(text)
        self.place = 0

    def eos_ids(self, stop_token_ids: Sequence[int]) -> frozenset[int]:
        return frozenset({END, *stop_token_ids})

    def start(self, stop_token_ids: Sequence[int]) -> Word:
        return Word("".join(chr(ord("a") + letter - 3) for letter in self.letters[:-1]))

    @property
    def terminated(self) -> bool:
        return self.place == len(self.letters)

    def accept(self, token: int) -> bool:
        fits = not self.terminated and self.letters[self.place] == token
        self.place += fits
        return fits

    def fill(self, words: Ints) -> bool:
        words[:] = pack(np.arange(VOCAB_SIZE) == self.letters[self.place])
        return True

    def rollback(self, tokens: int) -> None:
        self.place -= tokens


class Compiler:
    """Compiles at once, but for texts that begin with `slow`: these wait to be released."""

    def __init__(self) -> None:
        self.compiled = Counter[str]()
        self.begun = threading.Event()
        self.released = threading.Event()

    def compile(self, source: GrammarSource) -> Word:
        self.compiled[source.text] += 1
        if source.text.startswith("slow"):
            self.begun.set()
            assert self.released.wait(20)
        if source.text.startswith("bad"):
            raise InvalidRequest("grammar: bad", param="grammar")
        if source.text.startswith("bug"):
            raise ZeroDivisionError
        return Word(source.text)
