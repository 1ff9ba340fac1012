"""Drafts for running requests from n-grams: the text of each request is kept up to date."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from antiphon.model_worker.batching.plan import NO_IDS, Ints
from antiphon.wire.namespaces import tenant_salt

if TYPE_CHECKING:
    from antiphon.model_worker.batching.request import Request
    from antiphon.model_worker.batching.state import ChoiceKey
    from antiphon.model_worker.speculation.ngram import NgramDrafter
    from antiphon.model_worker.speculation.text_index import IndexedText

log = logging.getLogger(__name__)

TOKENS_MAX = 2048
"""Tokens that are indexed at once, in 3 ms: a long prompt takes several steps."""


class RequestTexts:
    """Indexes prompts and outputs, and drafts how these go on."""

    def __init__(self, ngrams: NgramDrafter) -> None:
        self.ngrams = ngrams
        self._texts: dict[ChoiceKey, tuple[IndexedText, int]] = {}

    def propose(self, request: Request, drafts_max: int) -> Ints:
        """Return up to so many tokens that may follow the known ones; often none."""
        if self._index(request) < request.length:
            return NO_IDS
        tail = request.ids(max(0, request.length - self.ngrams.window_max))
        drafts = self.ngrams.propose(_namespace(request), _packed(tail), drafts_max)
        ends = [index for index, token in enumerate(drafts) if token in request.end_ids]
        return np.array(drafts[: ends[0]] if ends else drafts, np.int32)

    def ended(self, request: Request) -> None:
        """Keep the text of a request for others; as much as was indexed, should the rest fail."""
        if request.key not in self._texts:
            return
        try:
            self._index(request)
        except Exception:
            log.exception("text not indexed", extra={"request_id": request.state.request_id})
        text, _ = self._texts.pop(request.key)
        self.ngrams.texts.end(text)

    def _index(self, request: Request) -> int:
        """Index what is new of a request; return up to which token it is indexed.

        What it found in the prefix cache was indexed with the request that computed it.
        """
        text, end = self._texts.get(request.key) or (
            self.ngrams.texts.begin(_namespace(request)),
            request.cached_tokens,
        )
        until = min(request.length, end + TOKENS_MAX)
        if until > end:
            self.ngrams.texts.extend(text, _packed(request.ids(end, until)))
        self._texts[request.key] = text, until
        return until


def _namespace(request: Request) -> bytes:
    return tenant_salt(request.state.tenant, request.state.cache_salt)


def _packed(ids: Ints) -> bytes:
    return ids.astype("<i4", copy=False).tobytes()
