"""The n-gram drafter: drafts from prompts, outputs and external corpora."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from antiphon.model_worker.speculation.draft_tree import best_path
from antiphon.model_worker.speculation.text_index import TextIndex
from antiphon.wire.command import CORPORA_MAX
from antiphon.wire.digests import TOKEN_BYTES
from antiphon.wire.errors import InvalidRequest, Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from antiphon.config.speculation import SpeculationConfig
    from antiphon.model_worker.speculation.text_index import NgramLevel

_CORPUS = b""
"""The namespace of a corpus, in an index of its own."""


class NgramDrafter:
    """Drafts the tokens that followed the longest match of a context's end, in texts or corpora.

    Each of the `texts` belongs to a namespace, which stands for a tenant and a cache salt: its
    tokens are proposed in no other one. Corpora are read by all.

    SGLang verifies a tree of drafts. Here a draft is a chain, the best path through such a tree:
    see `best_path`. Its trie counts an n-gram again for each window that is inserted with it; here
    an n-gram counts as often as it occurs, up to 16 times.

    Called from the batching loop, except for `add_corpus`.
    """

    def __init__(self, config: SpeculationConfig) -> None:
        self._config = config
        self._drafts_max = config.verify_tokens - 1
        self.window_max = min(config.ngram_window_max, config.ngram_depth - 1)
        self.texts = self._index(config.ngram_capacity)
        self._corpora: Mapping[str, TextIndex] = {}

    def propose(self, namespace: bytes, ids_tail: bytes, drafts_max: int) -> list[int]:
        """Return up to `drafts_max` tokens that may come next; empty without a match.

        The longest match wins; among equally long ones texts of the namespace go before corpora,
        and corpora in the order in which they were added.

        Args:
            namespace: Where matches are searched, besides the corpora.
            ids_tail: The last tokens of the request, at least `window_max` if there are as many;
                int32, little-endian. They may be part of its text.
            drafts_max: Maximum number of tokens, besides the maximum of the settings.
        """
        context = ids_tail[-self.window_max * TOKEN_BYTES :]
        drafts_max = min(drafts_max, self._drafts_max)
        found = self._source(self.texts, namespace, context, drafts_max)
        for corpus in self._corpora.values():
            tokens_max = min(drafts_max, self._config.corpus_draft_tokens)
            other = self._source(corpus, _CORPUS, context, tokens_max)
            if other is not None and (found is None or other.longest > found.longest):
                found = other
        if found is None:
            return []
        return best_path(found.levels, self._config, found.tokens_max)

    def add_corpus(self, name: str, documents: Iterable[bytes]) -> int:
        """Add a corpus of documents, as ids, and return the number of its tokens.

        It takes 1.3 us a token, or more for short documents. Another thread than the loop's may do
        it, one corpus at a time: drafts use a corpus once it is complete.

        Raises:
            Unsupported, InvalidRequest: See `check_corpus`.
        """
        self.check_corpus(name, 0)
        corpus = self._index(self._config.corpus_tokens_max)
        for document in documents:
            self.check_corpus(name, corpus.tokens + len(document) // TOKEN_BYTES)
            text = corpus.begin(_CORPUS)
            corpus.extend(text, document)
            corpus.end(text)
        self._corpora = {**self._corpora, name: corpus}
        return corpus.tokens

    def check_corpora_enabled(self) -> None:
        """`Unsupported` if drafts from corpora are disabled."""
        if not self._config.corpus_draft_tokens:
            raise Unsupported(
                "external corpora are disabled: speculation.corpus_draft_tokens is 0; start the "
                "server with --speculative-ngram-external-sam-budget"
            )

    def check_corpus(self, name: str, tokens: int) -> None:
        """Reject a corpus of so many tokens that cannot be added.

        Raises:
            Unsupported: Drafts from corpora are disabled.
            InvalidRequest: The name is in use, or there would be too many corpora or tokens.
        """
        self.check_corpora_enabled()
        corpora, tokens_max = self.list_corpora(), self._config.corpus_tokens_max
        if name in corpora:
            raise InvalidRequest.at("corpus_id", f"{name!r} already exists; remove it first")
        if len(corpora) >= CORPORA_MAX:
            raise InvalidRequest.at(
                "corpus_id", f"there are {CORPORA_MAX} corpora, the limit; remove one first"
            )
        if sum(corpora.values()) + tokens > tokens_max:
            raise InvalidRequest.at(
                "documents",
                f"the corpora would have more than {tokens_max} tokens "
                "(speculation.corpus_tokens_max)",
            )

    def remove_corpus(self, name: str) -> None:
        """Remove a corpus; `InvalidRequest` if there is none of that name."""
        if name not in self._corpora:
            raise InvalidRequest.at("corpus_id", f"{name!r} does not exist")
        self._corpora = {key: corpus for key, corpus in self._corpora.items() if key != name}

    def list_corpora(self) -> Mapping[str, int]:
        """Number of tokens by name, in the order in which they were added."""
        return {name: corpus.tokens for name, corpus in self._corpora.items()}

    def _source(
        self, index: TextIndex, namespace: bytes, context: bytes, tokens_max: int
    ) -> _Source | None:
        if tokens_max < 1:
            return None
        longest = self._config.ngram_depth - self._config.ngram_window_min
        levels = index.levels(namespace, context, min(tokens_max, longest))
        if (first := next(levels, None)) is None:
            return None
        return _Source(first.longest, chain((first,), levels), tokens_max)

    def _index(self, capacity: int) -> TextIndex:
        return TextIndex(
            capacity=capacity,
            width_min=self._config.ngram_window_min,
            width_max=self.window_max,
        )


class _Source(NamedTuple):
    """The matches of one index, and the maximum length of a draft from it."""

    longest: int
    levels: Iterator[NgramLevel]
    tokens_max: int
