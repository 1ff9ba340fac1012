"""The client: a connection, one stream per request, and batches of texts to embed."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Self, TypeVar, Unpack

import msgspec

from antiphon.bus.bus import Bus
from antiphon.bus.nats import NatsTransport
from antiphon.bus.transport import BusDown, NoResponders, ReplyLost, Transport
from antiphon.client.stream import (
    NO_RESPONDERS_TIMEOUT_S,
    Completion,
    CompletionChunk,
    GenerationStream,
    now,
)
from antiphon.config.settings import BusConfig
from antiphon.service.clock import SystemClock
from antiphon.service.startup import address_for_others, bind
from antiphon.service.tasks import gather
from antiphon.transfer.blobs import BlobServer, BlobStore
from antiphon.wire.base import Message, Process, Usage
from antiphon.wire.errors import DeadlineExceeded, InvalidRequest
from antiphon.wire.generate import (
    CompleteOptions,
    EmbedReply,
    EmbedRequest,
    GenerateOptions,
    GenerateRequest,
)
from antiphon.wire.ids import (
    DEFAULT_TENANT,
    ClientKey,
    ClusterName,
    InstanceId,
    ModelName,
    TenantId,
    new_incarnation,
    new_request_id,
)
from antiphon.wire.media import MediumInput
from antiphon.wire.routes import EMBED
from antiphon.wire.token_outputs import join_chunks, unpack_floats
from antiphon.wire.tokenize import ChatMessage

M = TypeVar("M", bound=Message)

TIMEOUT_S = 600.0
INLINE_BYTES_MAX = 256 * 1024
"""Media of a request that have more bytes in all are fetched from the client."""
MEDIA_BYTES_MAX = 1024**3
"""Maximum size of the media of open requests, which the client serves."""

Conversation = str | Sequence[tuple[str, str] | ChatMessage]
"""A user message; or messages, as (role, content), or as `ChatMessage`, which has tool calls."""


class Client:
    """Client of the gateways of one cluster.

    Args:
        server: URLs of NATS servers, comma-separated; or a transport.
        cluster: Name of the cluster.
        tenant: The tenant, whose inboxes the NATS user must be allowed to use.
        api_key: The tenant's API key, where the gateways require one.
        user: NATS user, if the server requires one.
        password: Password of the NATS user.
        media_host: IP address of this machine at which gateways fetch media that are too large for
            a message; they must allow it (`media.claim_networks`). Empty: such media are rejected.
    """

    def __init__(
        self,
        server: str | Transport,
        *,
        cluster: str = "antiphon",
        tenant: str = DEFAULT_TENANT,
        api_key: str = "",
        user: str = "",
        password: str = "",
        media_host: str = "",
    ) -> None:
        name = InstanceId(f"client-{new_incarnation()}")
        if isinstance(server, str):
            given = {"url": server, "user": user, "password": password}
            server = NatsTransport(msgspec.convert(given, BusConfig), name=name)
        self._tenant = TenantId(tenant)
        self._api_key = api_key or None
        self._open: set[GenerationStream] = set()
        self._media_host = media_host
        self._media: BlobStore | None = None
        self._exit = AsyncExitStack()
        self._bus = Bus(
            server,
            ClusterName(cluster),
            Process(instance=name, incarnation=new_incarnation()),
            tenant=self._tenant,
        )

    async def __aenter__(self) -> Self:
        await self._bus.__aenter__()
        if self._media_host:
            self._media = await self._exit.enter_async_context(served_blobs(self._media_host))
        return self

    async def __aexit__(self, *error: object) -> None:
        async with asyncio.TaskGroup() as group:
            for stream in self._open:  # streams of loops that the caller left early
                group.create_task(stream.cancel())
        await self._exit.aclose()
        await self._bus.__aexit__(*error)

    @property
    def media_bytes_held(self) -> int:
        """Size of the media of open requests that gateways may fetch from here."""
        return 0 if self._media is None else self._media.bytes_held

    async def generate(
        self,
        model: str,
        conversation: Conversation,
        *,
        timeout_s: float = TIMEOUT_S,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerator[CompletionChunk]:
        """Stream a response. Leaving the iterator early cancels the request.

        Each byte of the text is yielded once and in order, despite lost messages and reconnects.
        With the option `resume_s`, at most 60, the response is also continued if the connection was
        lost for so many seconds, or its gateway has died.

        Raises:
            EngineError: The request failed; raised from the iteration.
        """
        request = _request(model, conversation, timeout_s, options)
        async with self._stream(request) as stream, aclosing(stream.chunks(timeout_s)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def complete(
        self,
        model: str,
        conversation: Conversation,
        *,
        timeout_s: float = TIMEOUT_S,
        **options: Unpack[CompleteOptions],
    ) -> Completion:
        """Return the whole response.

        Raises:
            EngineError: The request failed.
        """
        request = _request(model, conversation, timeout_s, options)
        # Text alone fits into one message; token outputs may not.
        request = msgspec.structs.replace(request, stream=request.details is not None)
        async with self._stream(request) as stream, aclosing(stream.chunks(timeout_s)) as received:
            chunks = [chunk async for chunk in received]
        end = stream.end
        assert end is not None, "a stream ended without its terminal"
        return Completion(
            "".join(chunk.text for chunk in chunks),
            end.choices[0].finish_reason,
            end.usage,
            end.request_id,
            join_chunks(chunk.details for chunk in chunks),
        )

    async def embed(
        self,
        model: str,
        texts: Sequence[str],
        *,
        pairs: Sequence[str] | None = None,
        dimensions: int | None = None,
        cache_salt: str = "",
        priority: int | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> EmbedResult:
        """Return the embedding of each text, or its scores from a classifier or reward model.

        Args:
            model: The served model.
            texts: Any number of texts; they are sent in batches.
            pairs: A second text for each, for models that score pairs.
            dimensions: Truncate each vector to this length (Matryoshka models only).
            cache_salt: Cached prefixes are shared only with requests of the same salt.
            priority: Higher runs first, where priority scheduling is enabled.
            timeout_s: Timeout of all batches together.

        Raises:
            EngineError: A batch failed.
        """
        if pairs is not None and len(pairs) != len(texts):
            raise InvalidRequest(f"{len(pairs)} second texts for {len(texts)} first ones")
        if not texts:
            return EmbedResult([], (), Usage())
        fields: dict[str, object] = {
            "model": model,
            "dimensions": dimensions,
            "cache_salt": cache_salt,
            "priority": priority,
            "api_key": self._api_key,
        }
        requests: list[EmbedRequest] = []
        for at in range(0, len(texts), BATCH):
            fields["texts"] = tuple(texts[at : at + BATCH])
            fields["pairs"] = pairs and tuple(pairs[at : at + BATCH])
            requests.append(_checked(fields, EmbedRequest))
        return await embed(self._bus, requests, timeout_s)

    @asynccontextmanager
    async def _stream(self, request: GenerateRequest) -> AsyncGenerator[GenerationStream]:
        media = await self._claimed(request.media, request.timeout_s or TIMEOUT_S)
        request = msgspec.structs.replace(request, api_key=self._api_key, media=media)
        stream = GenerationStream(self._bus, self._tenant, request)
        self._open.add(stream)
        try:
            yield stream
        finally:
            self._open.discard(stream)
            for medium in media:
                if self._media is not None and medium.claim is not None:
                    self._media.discard(medium.claim)

    async def _claimed(
        self, media: tuple[MediumInput, ...], lifetime_s: float
    ) -> tuple[MediumInput, ...]:
        """Serve the bytes of media that do not fit into a message, until the request ends."""
        store = self._media
        if store is None or sum(len(each.data or b"") for each in media) <= INLINE_BYTES_MAX:
            return media
        claimed = list[MediumInput]()
        for each in media:
            if (data := each.data) is not None:
                checksum = (await asyncio.to_thread(hashlib.sha256, data)).digest()
                claim = store.put(data, lifetime_s, checksum=checksum)
                claimed.append(msgspec.structs.replace(each, data=None, claim=claim))
            else:
                claimed.append(each)
        return tuple(claimed)


def _request(
    model: str,
    conversation: Conversation,
    timeout_s: float,
    options: GenerateOptions | CompleteOptions,
) -> GenerateRequest:
    turns = [("user", conversation)] if isinstance(conversation, str) else conversation
    fields = {
        "key": ClientKey(new_request_id()),
        "model": ModelName(model),
        "messages": tuple(
            turn if isinstance(turn, ChatMessage) else ChatMessage(role=turn[0], content=turn[1])
            for turn in turns
        ),
        "timeout_s": timeout_s,
        **options,
    }
    return _checked(fields, GenerateRequest)


def _checked(fields: Mapping[str, object], kind: type[M]) -> M:
    """Convert the fields to a request; `InvalidRequest` for one that is out of bounds."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error)) from error


BATCH = 16
"""Texts per call."""
CALLS_MAX = 4
"""Maximum concurrent calls."""
EMBED_SILENCE_S = 60.0
"""Time after which a call is repeated: its reply may have been lost."""
PAUSE_S = 0.2


@asynccontextmanager
async def served_blobs(host: str) -> AsyncGenerator[BlobStore]:
    """Serve blobs at a free port of an address of this machine."""
    with bind(host, 0) as bound:
        store = BlobStore(address_for_others(bound, host, host), MEDIA_BYTES_MAX, SystemClock())
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(BlobServer(bound, store).run())
            try:
                yield store
            finally:
                serving.cancel()


@dataclass(frozen=True, slots=True)
class EmbedResult:
    """Embeddings in the order of the texts; or scores, one for each of the labels."""

    vectors: list[Sequence[float]]
    labels: tuple[str, ...]
    usage: Usage


async def embed(bus: Bus, requests: Sequence[EmbedRequest], timeout_s: float) -> EmbedResult:
    """Send the requests and join their replies; the first error cancels the other calls."""
    deadline = now() + timeout_s
    slots = asyncio.Semaphore(CALLS_MAX)

    async def one(request: EmbedRequest) -> EmbedReply:
        async with slots:
            return await _call(bus, request, deadline)

    replies = await gather([one(request) for request in requests])
    usage = Usage(
        prompt_tokens=sum(reply.usage.prompt_tokens for reply in replies),
        cached_tokens=sum(reply.usage.cached_tokens for reply in replies),
    )
    vectors = [unpack_floats(vector) for reply in replies for vector in reply.vectors]
    return EmbedResult(vectors, replies[0].labels, usage)


async def _call(bus: Bus, request: EmbedRequest, deadline: float) -> EmbedReply:
    """Retry until there is a reply: repeating an embedding request is harmless."""
    tries, no_responders_since = 0, None
    while (left_s := deadline - now()) > 0:
        tries += 1
        attempt = msgspec.structs.replace(request, timeout_s=left_s)
        try:
            return await bus.call(
                EMBED, attempt, timeout_s=min(left_s, EMBED_SILENCE_S), model=request.model
            )
        except NoResponders:
            no_responders_since = now() if no_responders_since is None else no_responders_since
            if tries == 1 or now() - no_responders_since >= NO_RESPONDERS_TIMEOUT_S:
                raise
        except (ReplyLost, BusDown):
            no_responders_since = None
        except DeadlineExceeded:
            continue
        await asyncio.sleep(min(PAUSE_S, max(0.0, deadline - now())))
    raise DeadlineExceeded("no embeddings were received before the timeout")
