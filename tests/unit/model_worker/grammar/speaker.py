"""Says whatever a grammar allows, by chance: what a model with random logits would say."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from antiphon.model_worker.grammar.matcher import DeferredGrammarState, GrammarMatcher, GrammarState

if TYPE_CHECKING:
    from antiphon.model_card.vocabulary import TokenVocabulary
    from antiphon.model_worker.batching.plan import Ints
    from antiphon.model_worker.batching.state import Finish
    from antiphon.model_worker.grammar.xgrammar_backend import XgrammarGrammar


@dataclass(slots=True)
class Said:
    """An answer, its ids, the mask before each of them, and how it ended, if it did."""

    text: bytes
    ids: list[int] = field(default_factory=list[int])
    masks: list[list[int] | None] = field(default_factory=list["list[int] | None"])
    finish: Finish | None = None


def allowed(mask: Ints | None, size: int) -> list[int]:
    """The ids whose bits are set; all if there is no mask."""
    if mask is None:
        return list(range(size))
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:size]).tolist()


def guide_of(
    compiled: XgrammarGrammar, vocabulary: TokenVocabulary, after: tuple[int, ...] = ()
) -> GrammarMatcher:
    state: GrammarState = compiled.start(())
    if after:
        state = DeferredGrammarState(state, after)
    return GrammarMatcher(state, len(vocabulary.tokens), compiled.eos_ids(()))


def speak(
    guide: GrammarMatcher,
    vocabulary: TokenVocabulary,
    *,
    seed: int,
    tokens_max: int = 400,
    hurry: float = 0.02,
    closers: bytes = b'"]}',
    often: bytes = b"",
) -> Said:
    """Draw allowed tokens, each as likely as any other, until an end.

    `hurry` is how much likelier with each token the end is, or else one of `closers`: by chance
    alone an array of arrays seldom ends. Every other token is one of `often`, where it may.
    """
    random = np.random.default_rng(seed)
    ends = {id_ for id_, token in enumerate(vocabulary.tokens) if not token}
    closing = {vocabulary.tokens.index(bytes([byte])) for byte in closers}
    short = {vocabulary.tokens.index(bytes([byte])) for byte in often}
    said = Said(b"")
    for number in range(tokens_max):
        said.masks.append(None if guide.masks[0] is None else guide.masks[0].tolist())
        ids = allowed(guide.masks[0], len(vocabulary.tokens))
        hurried = ends.intersection(ids) or closing.intersection(ids)
        hurries = hurried and random.random() < hurry * number
        if short.intersection(ids) and not hurries and random.random() < 0.5:
            ids = sorted(short.intersection(ids))
        token = int(random.choice(sorted(hurried) if hurries else ids))
        said.finish = guide.accept_token(token)
        if said.finish is not None:
            return said
        said.ids.append(token)
        said.text += vocabulary.tokens[token]
    return said


def accepts(grammar: XgrammarGrammar, vocabulary: TokenVocabulary, text: str, *end: int) -> bool:
    """Whether an answer may begin with this text, byte by byte, and then with these ids."""
    ids = [vocabulary.tokens.index(bytes([byte])) for byte in text.encode()]
    return all(map(grammar.start(()).accept, [*ids, *end]))
