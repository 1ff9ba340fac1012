"""External corpora of a worker: added in parts, removed and listed by control calls."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from antiphon.wire.codec import id_count
from antiphon.wire.command import AddCorpus, ControlDone, ListCorpora, RemoveCorpus
from antiphon.wire.errors import Overloaded, Unsupported

if TYPE_CHECKING:
    from antiphon.model_worker.speculation.ngram import NgramDrafter
    from antiphon.wire.ids import RequestId

CorpusCommand = AddCorpus | RemoveCorpus | ListCorpora


@dataclass(slots=True)
class _Upload:
    """The parts of a corpus that have arrived. They have at most `corpus_tokens_max` tokens."""

    id: RequestId
    parts: int = 0
    tokens: int = 0
    documents: list[bytes] = field(default_factory=list[bytes])


class ExternalCorpora:
    """Answers the control calls for corpora, on the event loop; steps go on meanwhile.

    An upload whose sender is gone is kept until the next one begins.
    """

    def __init__(self, ngrams: NgramDrafter | None) -> None:
        self._ngrams = ngrams
        self._upload: _Upload | None = None
        self._changing = asyncio.Lock()

    async def answer(self, command: CorpusCommand) -> ControlDone:
        """Apply a command; the reply lists the corpora.

        Raises:
            Overloaded: Another corpus is being added, or was since the part before.
            InvalidRequest: The corpus cannot be added.
            Unsupported: Speculative decoding or external corpora are disabled.
        """
        ngrams = self._enabled()
        match command:
            case AddCorpus():
                await self._receive(ngrams, command)
            case RemoveCorpus(corpus_id=name):
                async with self._changing:
                    if name in ngrams.list_corpora():
                        ngrams.remove_corpus(name)
            case ListCorpora():
                pass
        return ControlDone(corpora=dict(ngrams.list_corpora()))

    def _enabled(self) -> NgramDrafter:
        if self._ngrams is None:
            raise Unsupported(
                "external corpora are disabled: speculation.algorithm is none; start the server "
                "with --speculative-algorithm NGRAM"
            )
        self._ngrams.check_corpora_enabled()
        return self._ngrams

    async def _receive(self, ngrams: NgramDrafter, part: AddCorpus) -> None:
        upload = _Upload(part.upload) if part.part == 0 else self._upload
        if upload is None or (upload.id, upload.parts) != (part.upload, part.part):
            raise _busy()
        self._upload = None  # unless this part is accepted
        upload.tokens += sum(map(id_count, part.documents))
        ngrams.check_corpus(part.corpus_id, upload.tokens)
        upload.documents += part.documents
        upload.parts += 1
        if not part.last:
            self._upload = upload
            return
        if self._changing.locked():
            raise _busy()
        async with self._changing:
            await asyncio.to_thread(ngrams.add_corpus, part.corpus_id, upload.documents)


def _busy() -> Overloaded:
    return Overloaded("another corpus is being added; retry later", retry_after_s=1.0)
