"""The xgrammar backend: grammars compiled for one vocabulary, with a matcher for each sequence.

The only module that imports xgrammar: it brings torch and transformers, which take a second.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import xgrammar

from antiphon.model_worker.batching.token_masks import words_count
from antiphon.model_worker.grammar.utf8 import START, Utf8
from antiphon.wire.errors import InvalidRequest
from antiphon.wire.grammar import GrammarKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.config.worker import GrammarConfig
    from antiphon.model_card.vocabulary import TokenVocabulary
    from antiphon.model_worker.batching.plan import Ints
    from antiphon.model_worker.grammar.source import GrammarSource


class XgrammarCompiler:
    """Compiles grammars. May be shared by threads."""

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
        """Compile a grammar; may take seconds, without holding the interpreter lock.

        Raises:
            InvalidRequest: The grammar is invalid, or matches no output.
        """
        try:
            compiled = self._compile(source)
        except (RuntimeError, ValueError) as error:
            message = f"grammar: {_readable(str(error))}"
            raise InvalidRequest(message, param="grammar") from error
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


class XgrammarGrammar:
    """A compiled grammar, shared by any number of sequences."""

    def __init__(
        self,
        compiled: xgrammar.CompiledGrammar,
        vocabulary: TokenVocabulary,
        utf8: Utf8,
        end_ids: frozenset[int],
    ) -> None:
        self.size_bytes = compiled.memory_size_bytes
        self._compiled = compiled
        self._vocabulary = vocabulary
        self._utf8 = utf8
        self._end_ids = end_ids

    def eos_ids(self, stop_token_ids: Sequence[int]) -> frozenset[int]:
        """The EOS tokens of a complete output: the model's, and stop tokens without text."""
        tokens = self._vocabulary.tokens
        return self._end_ids.union(
            token for token in stop_token_ids if token < len(tokens) and not tokens[token]
        )

    def start(self, stop_token_ids: Sequence[int]) -> XgrammarMatcher:
        """The state at the start of an output."""
        ends = sorted(self.eos_ids(stop_token_ids))
        matcher = xgrammar.GrammarMatcher(self._compiled, override_stop_tokens=ends)
        return XgrammarMatcher(matcher, self._utf8)


class XgrammarMatcher:
    """A `GrammarState` over xgrammar's matcher.

    With an ambiguous grammar the parse grows with the output until one token takes minutes. Nothing
    here bounds that: callers run it where no other sequence waits for it.
    """

    def __init__(self, matcher: xgrammar.GrammarMatcher, utf8: Utf8) -> None:
        self._matcher = matcher
        self._utf8 = utf8
        self._utf8_states = [START]  # before each token, and after the last one

    @property
    def terminated(self) -> bool:
        """See `GrammarState`."""
        return self._matcher.is_terminated()

    def accept(self, token: int) -> bool:
        """See `GrammarState`."""
        try:
            accepted = self._matcher.accept_token(token)
        except _RAISED as error:
            raise _blame(error) from error
        if accepted:
            self._utf8_states.append(self._utf8.after(self._utf8_states[-1], token))
        return accepted

    def fill(self, words: Ints) -> bool:
        """See `GrammarState`."""
        try:
            self._matcher.fill_next_token_bitmask(words[np.newaxis])
        except _RAISED as error:
            raise _blame(error) from error
        words &= self._utf8.masks[self._utf8_states[-1]]
        if not words.any():
            raise InvalidRequest("grammar: no token may come next", param="grammar")
        return True

    def rollback(self, tokens: int) -> None:
        """See `GrammarState`."""
        if tokens:
            self._matcher.rollback(tokens)
            del self._utf8_states[-tokens:]


def _readable(message: str) -> str:
    """The message without the compiler's source locations, in one line of bounded length."""
    plain = _PLACE.sub("", message).replace("\n", " ").strip()
    return plain if len(plain) <= _MESSAGE_MAX else f"{plain[:_MESSAGE_MAX]}…"


def _blame(error: Exception) -> InvalidRequest:
    """Map whatever the matcher raises over a request's text to an error of that request alone."""
    return InvalidRequest(f"grammar: {error}", param="grammar")


_RAISED = (RuntimeError, ValueError, MemoryError)
_PLACE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: (?:Check failed: \(.*?\) is false: )?")
_MESSAGE_MAX = 300
