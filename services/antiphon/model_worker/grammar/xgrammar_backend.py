"""The xgrammar backend: grammars compiled for one vocabulary, with a matcher for each sequence.

The only module that imports xgrammar: it brings torch and transformers, which take a second.

Compiled grammars match bytes, and their character classes let some byte sequences through that
encode no character: surrogate halves and overlong forms. No UTF-8 decoder would read these as what
the grammar meant, so `Utf8` masks the tokens that begin them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xgrammar

from antiphon.model_worker.batching.token_masks import pack, words_count
from antiphon.model_worker.grammar.source import GrammarSource, invalid_grammar
from antiphon.wire.sampling import GrammarKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from antiphon.config.worker import GrammarConfig
    from antiphon.model_card.vocabulary import TokenVocabulary
    from antiphon.model_worker.batching.plan import Ints


START = 0
"""Between two characters."""
_ONE, _TWO, _THREE, _E0, _ED, _F0, _F4, _BROKEN = range(1, 9)
"""How many bytes are still expected; after some leading bytes the next has a narrower range."""


class XgrammarCompiler:
    def __init__(
        self, vocabulary: TokenVocabulary, end_ids: frozenset[int], config: GrammarConfig
    ) -> None:
        self._config = config
        self._end_ids = end_ids
        self._vocabulary = vocabulary
        self._utf8 = Utf8(vocabulary.tokens)
        info = xgrammar.TokenizerInfo(
            list(vocabulary.tokens), xgrammar.VocabType.RAW, stop_token_ids=sorted(end_ids)
        )
        # One thread a grammar, since our setting bounds concurrent compiles. And one cache, ours.
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, source: GrammarSource) -> XgrammarGrammar:
        """Compile a grammar; may take seconds, without holding the interpreter lock."""
        try:
            compiled = self._compile(source)
        except (RuntimeError, ValueError) as error:
            raise invalid_grammar(_readable(str(error))) from error
        grammar = XgrammarGrammar(compiled, self._vocabulary, self._utf8, self._end_ids)
        grammar.start(()).fill(np.zeros(words_count(len(self._vocabulary.tokens)), np.int32))
        return grammar

    def _compile(self, source: GrammarSource) -> xgrammar.CompiledGrammar:
        match source.kind:
            case GrammarKind.REGEX:
                return self._compiler.compile_regex(source.text)
            case GrammarKind.EBNF:
                return self._compiler.compile_grammar(source.text)
            case GrammarKind.STRUCTURAL_TAG:
                return self._compiler.compile_structural_tag(source.text)
            case GrammarKind.JSON_SCHEMA | GrammarKind.JSON_OBJECT:
                compact = self._config.compact_json
                return self._compiler.compile_json_schema(
                    source.text,
                    any_whitespace=not compact,
                    max_whitespace_cnt=None if compact else self._config.whitespace_max,
                )


@dataclass(frozen=True, slots=True)
class XgrammarGrammar:
    compiled: xgrammar.CompiledGrammar
    vocabulary: TokenVocabulary
    utf8: Utf8
    model_eos_ids: frozenset[int]

    @property
    def size_bytes(self) -> int:
        return self.compiled.memory_size_bytes

    def eos_ids(self, stop_token_ids: Sequence[int]) -> frozenset[int]:
        """The EOS tokens of a complete output: the model's, and stop tokens without text."""
        tokens = self.vocabulary.tokens
        return self.model_eos_ids.union(
            token for token in stop_token_ids if token < len(tokens) and not tokens[token]
        )

    def start(self, stop_token_ids: Sequence[int]) -> XgrammarMatcher:
        ends = self.eos_ids(stop_token_ids)
        matcher = xgrammar.GrammarMatcher(self.compiled, override_stop_tokens=sorted(ends))
        return XgrammarMatcher(matcher, self.utf8, self.vocabulary.tokens, ends)


class XgrammarMatcher:
    """A `GrammarState` over xgrammar's matcher.

    With an ambiguous grammar the parse grows with the output until one token takes minutes. Nothing
    here bounds that: callers run it where no other sequence waits for it.
    """

    def __init__(
        self,
        matcher: xgrammar.GrammarMatcher,
        utf8: Utf8,
        tokens: Sequence[bytes],
        ends: frozenset[int],
    ) -> None:
        self._matcher = matcher
        self._tokens = tokens
        self._ends = ends
        self._utf8 = utf8
        self._utf8_states = [START]  # before each token, and after the last one

    @property
    def terminated(self) -> bool:
        return self._matcher.is_terminated()

    def accept(self, token: int) -> bool:
        if token < len(self._tokens) and not self._tokens[token] and token not in self._ends:
            return False  # no grammar has a token without text; xgrammar writes a warning of each
        try:
            accepted = self._matcher.accept_token(token)
        except _RAISED as error:
            raise invalid_grammar(str(error)) from error
        if accepted:
            self._utf8_states.append(self._utf8.after(self._utf8_states[-1], token))
        return accepted

    def fill(self, words: Ints) -> bool:
        try:
            self._matcher.fill_next_token_bitmask(words[np.newaxis])
        except _RAISED as error:
            raise invalid_grammar(str(error)) from error
        words &= self._utf8.masks[self._utf8_states[-1]]
        if not words.any():
            raise invalid_grammar("no token may come next")
        return True

    def rollback(self, tokens: int) -> None:
        if tokens:
            self._matcher.rollback(tokens)
            del self._utf8_states[-tokens:]


class Utf8:
    """The tokens that keep an output well-formed UTF-8, by state. Immutable.

    Axes: S states, V vocabulary, W = ceil(V / 32) words.
    """

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._ends = ends = _ends(tokens, _table())
        silent = np.array([not token for token in tokens])
        allowed = ends != _BROKEN
        allowed[1:, silent] = False  # no special token within a character
        self.masks: list[Ints] = [pack(row) for row in allowed]

    def after(self, state: int, token: int) -> int:
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


def _readable(message: str) -> str:
    """The message without the compiler's source locations, in one line of bounded length."""
    plain = _PLACE.sub("", message).replace("\n", " ").strip()
    return plain if len(plain) <= _MESSAGE_MAX else f"{plain[:_MESSAGE_MAX]}…"


_RAISED = (RuntimeError, ValueError, MemoryError)
"""Whatever a matcher raises over a request's text is an error of that request alone."""
_PLACE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: (?:Check failed: \(.*?\) is false: )?")
_MESSAGE_MAX = 300
