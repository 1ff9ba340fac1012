"""External corpora, from which drafts of speculative decoding are taken: add, remove, list."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec
from msgspec import Meta

from antiphon.gateway.http.core.endpoints import Endpoints, operation
from antiphon.gateway.http.core.fields import UnsupportedField
from antiphon.gateway.http.core.operation import json_reply
from antiphon.gateway.requests.generation_request import GenerationRequest
from antiphon.gateway.requests.tokenizer_client import CARD_TIMEOUT_S
from antiphon.service.clock import deadline_in
from antiphon.service.tasks import gather
from antiphon.wire.codec import id_count, split_rows
from antiphon.wire.command import (
    CORPUS_PART_BYTES_MAX,
    AddCorpus,
    CorpusId,
    ListCorpora,
    RemoveCorpus,
)
from antiphon.wire.errors import InvalidRequest, Overloaded
from antiphon.wire.ids import new_request_id

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence

    from aiohttp import web

    from antiphon.gateway.peers import WorkerControl

DOCUMENTS_MAX = 4096
"""Maximum number of documents of one request."""
TEXT_BYTES_MAX = 8192
"""Longer documents are cut into texts of this size, so that the ids of one fit one message. Few
drafts are lost: a match is short, and does not go beyond a cut."""
_TEXTS_AT_ONCE = 16
"""Texts that are tokenized at the same time: fewer than a tokenizer queues."""
_TOKENIZE_S = 30.0
TURN_S = 30.0
"""Maximum time that a request waits while another corpus is added."""
_ADD_S = 120.0
"""Reply timeout of a worker that adds a corpus: it indexes about half a million tokens a second."""

_FILE = "the server reads no files of its own; send the texts as documents"
_CHUNKS = "token ids are not accepted; send the texts as documents"


class AddCorpusBody(msgspec.Struct, frozen=True, kw_only=True):
    """Add an external corpus, from which drafts of all requests are taken."""

    documents: Annotated[list[str], Meta(min_length=1, max_length=DOCUMENTS_MAX)]
    """Texts of the corpus. A draft does not go on from one to the next."""
    corpus_id: CorpusId | None = None
    """Id of the corpus, to remove it by. Defaults to a random one."""

    UNSUPPORTED: ClassVar = {
        "file_path": UnsupportedField(_FILE),
        "token_chunks": UnsupportedField(_CHUNKS),
    }


class RemoveCorpusBody(msgspec.Struct, frozen=True):
    """Remove an external corpus."""

    corpus_id: CorpusId
    """Id of the corpus."""


class CorpusReply(msgspec.Struct, frozen=True, kw_only=True):
    """Confirmation that every worker applied the command."""

    success: bool = True
    message: str


class CorpusAdded(CorpusReply, frozen=True, kw_only=True):
    """Confirmation that every worker has the corpus."""

    corpus_id: str
    loaded_token_count: int
    """Number of tokens of the corpus."""


class CorpusList(CorpusReply, frozen=True, kw_only=True):
    """The external corpora. The message names those that some workers lack."""

    corpus_token_counts: dict[str, int]
    """Number of tokens of each corpus by its id."""


@dataclass(frozen=True)
class CorpusEndpoints(Endpoints):
    """Every worker of the model has a copy of each corpus, in memory."""

    workers: WorkerControl
    _adding: asyncio.Lock = field(default_factory=asyncio.Lock)

    @operation(
        "POST",
        "/add_external_corpus",
        "Add an external corpus to every worker. It is lost when a worker restarts.",
        body=AddCorpusBody,
        reply=CorpusAdded,
        examples=({"documents": ["def main() -> None:"]},),
        admin=True,
    )
    async def _add(self, request: web.Request) -> web.Response:
        held = await self._held()
        card = await self.tokenizers.card(CARD_TIMEOUT_S)
        # A byte is at most one token, and a tokenizer may add one in front.
        size = min(TEXT_BYTES_MAX, max(4, card.context_tokens - 1))
        name, texts = await self.response_handler.parse_body(
            request, AddCorpusBody, lambda body: (body.corpus_id, list(_texts(body, size)))
        )
        name = name or uuid.uuid4().hex
        if any(name in corpora for corpora in held):
            raise InvalidRequest.at("corpus_id", f"{name!r} already exists; remove it first")
        async with self._turn():
            documents = await self._tokenized(texts)
            tokens = sum(map(id_count, documents))
            if not tokens:
                raise InvalidRequest.at("documents", "they have no tokens")
            await self._send(name, documents)
        return json_reply(
            CorpusAdded(
                message=f"The corpus {name!r} was added: {tokens} tokens.",
                corpus_id=name,
                loaded_token_count=tokens,
            )
        )

    @operation(
        "POST",
        "/remove_external_corpus",
        "Remove an external corpus from every worker.",
        body=RemoveCorpusBody,
        reply=CorpusReply,
        examples=({"corpus_id": "code"},),
        admin=True,
    )
    async def _remove(self, request: web.Request) -> web.Response:
        body = await self.response_handler.small_body(request, RemoveCorpusBody)
        name = body.corpus_id
        if not any(name in corpora for corpora in await self._held()):
            raise InvalidRequest.at("corpus_id", f"{name!r} does not exist")
        await self.workers.command(RemoveCorpus(corpus_id=name))
        return json_reply(CorpusReply(message=f"The corpus {name!r} was removed."))

    @operation(
        "GET",
        "/list_external_corpora",
        "List the external corpora.",
        reply=CorpusList,
        admin=True,
    )
    async def _list(self, _: web.Request) -> web.Response:
        held = await self._held()
        counts = {name: tokens for corpora in held for name, tokens in corpora.items()}
        partial = [name for name in counts if any(name not in corpora for corpora in held)]
        message = f"Not on every worker: {', '.join(map(repr, partial))}." if partial else ""
        return json_reply(CorpusList(message=message, corpus_token_counts=counts))

    @asynccontextmanager
    async def _turn(self) -> AsyncGenerator[None]:
        """Add one corpus at a time, as the workers do."""
        try:
            async with asyncio.timeout(TURN_S):
                await self._adding.acquire()
        except TimeoutError:
            text = "another corpus is being added; retry later"
            raise Overloaded(text, retry_after_s=1.0) from None
        try:
            yield
        finally:
            self._adding.release()

    async def _held(self) -> list[Mapping[str, int]]:
        """The corpora of each worker; `Unsupported` if they are disabled."""
        return [done.corpora for done in await self.workers.command(ListCorpora())]

    async def _tokenized(self, texts: Sequence[str]) -> list[bytes]:
        documents: list[bytes] = []
        for start in range(0, len(texts), _TEXTS_AT_ONCE):
            deadline = deadline_in(_TOKENIZE_S, self.runtime.clock)
            replies = await gather(
                [
                    self.tokenizers.encode(
                        GenerationRequest(
                            api="corpus", model=None, prompt=text, special_tokens=False
                        ),
                        new_request_id(),
                        deadline,
                        None,
                    )
                    for text in texts[start : start + _TEXTS_AT_ONCE]
                ]
            )
            documents += (reply.token_ids for reply in replies if reply.token_ids)
        return documents

    async def _send(self, name: str, documents: Sequence[bytes]) -> None:
        """Send a corpus to all workers, in parts of a bounded size."""
        upload = new_request_id()
        parts = list(split_rows(documents, len, CORPUS_PART_BYTES_MAX))
        for index, part in enumerate(parts):
            message = AddCorpus(
                corpus_id=name,
                upload=upload,
                part=index,
                last=index == len(parts) - 1,
                documents=tuple(part),
            )
            await self.workers.command(message, timeout_s=_ADD_S)


def _texts(body: AddCorpusBody, bytes_max: int) -> Iterator[str]:
    """Cut the documents into texts of at most so many bytes in UTF-8."""
    for document in body.documents:
        encoded, start = document.encode(), 0
        while start < len(encoded):
            end = start + bytes_max
            while end < len(encoded) and encoded[end] & 0xC0 == 0x80:  # within a character
                end -= 1
            yield encoded[start:end].decode()
            start = end
