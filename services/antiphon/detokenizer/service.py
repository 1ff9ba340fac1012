"""Connects the detokenizer's state machine to the bus."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, ClassVar

from antiphon.detokenizer.machine import READS, Action, Detokenizer, SendStop
from antiphon.model_card.served_model import served_name, tokenizer_folder
from antiphon.model_card.tokenizer_file import open_tokenizer
from antiphon.model_card.vocabulary import read_vocabulary
from antiphon.service.endpoint import Endpoint, RequestEndpoint, StreamEndpoint
from antiphon.service.inbox import UnknownSender
from antiphon.service.peers import Peer, PeerChange
from antiphon.service.service import Report, Runtime
from antiphon.service.tasks import perform, repeat
from antiphon.telemetry.tracing import Span, span
from antiphon.wire.base import Role
from antiphon.wire.command import ResendTokens
from antiphon.wire.errors import Unsupported
from antiphon.wire.heartbeat import StreamSeq
from antiphon.wire.routes import DETOKENIZER_CONTROL, OPEN, OPEN_FETCH, STOP, TEXT, TOKENS
from antiphon.wire.seal import AttemptsSealed, SealAttempts
from antiphon.wire.submit import FetchOpenList
from antiphon.wire.text import ResumeText, TextBatch, TextResumed
from antiphon.wire.tokens import TokenNews, TokenStep

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence
    from pathlib import Path

    from tokenizers import Tokenizer

    from antiphon.detokenizer.choice import DetokenizerRequest
    from antiphon.wire.ids import ModelName, RequestId
    from antiphon.wire.submit import OpenList, OpenListState


log = logging.getLogger(__name__)

TICK_S = 0.5
SEALED_ENVELOPE_BYTES = 4 * 1024
"""More than a reply takes besides its sealed requests."""


class DetokenizerService:
    """Answers resumes, follows tokens; sends text, stops and resends."""

    role: ClassVar = Role.DETOKENIZER

    def __init__(self, runtime: Runtime, tokenizer: Tokenizer, tokens: Sequence[bytes]) -> None:
        def decode(ids: Sequence[int], skip_special_tokens: bool) -> str:
            return tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

        self._runtime = runtime
        self._model = served_name(runtime.settings)
        self._machine = Detokenizer(
            runtime.process,
            decode,
            runtime.settings.detokenizer.requests_max,
            tokens,
            runtime.peers.to_local_ms,
        )
        self._moved = asyncio.Event()
        self._spans = TextSpans()

    @staticmethod
    @asynccontextmanager
    async def lifespan(runtime: Runtime) -> AsyncGenerator[DetokenizerService]:
        folder = await asyncio.to_thread(tokenizer_folder, runtime.settings)
        tokenizer = await asyncio.to_thread(open_tokenizer, folder)
        tokens = await asyncio.to_thread(_read_token_bytes, folder)
        service = DetokenizerService(runtime, tokenizer, tokens)
        runtime.peers.watch(service._on_peer)
        runtime.group.create_task(repeat(service._tick, TICK_S), name="tick")
        yield service

    def endpoints(self) -> Sequence[Endpoint]:
        here = {"detokenizer": self._runtime.process.instance}
        return (
            StreamEndpoint(route=TOKENS, apply=self._on_tokens, address=here),
            StreamEndpoint(route=OPEN, apply=self._on_open, address={"model": self._model}),
            RequestEndpoint(
                route=DETOKENIZER_CONTROL,
                handler=self._on_control,
                address=here,
                while_draining=True,
            ),
        )

    def model(self) -> ModelName | None:
        return self._model

    def report(self) -> Report:
        streams = self._machine.sent.items()
        return Report(
            load=self._machine.live,
            streams=tuple(StreamSeq(receiver=gateway, seq=seq) for gateway, seq in streams),
            reads=READS,
        )

    async def drain(self) -> None:
        """Wait until the live requests have ended; the leader assigns no new ones."""
        while self._machine.live:
            self._moved.clear()
            await self._moved.wait()

    def _on_tokens(self, news: TokenNews) -> None:
        if not self._runtime.peers.is_alive(news.worker):
            raise UnknownSender(f"tokens of {news.worker.instance}, which is no live peer")
        self._spans.begin(news)
        self._do(self._machine.on_tokens(news, self._runtime.clock.now()))
        self._spans.end(self._machine.requests)

    def _on_open(self, message: OpenList | OpenListState) -> None:
        if self._runtime.peers.is_expired(message.not_after_unix_ms, message.owner):
            self._runtime.metrics.late.labels(OPEN.name).inc()
            return
        self._do(self._machine.on_open_list(message, self._runtime.clock.now()))

    def _on_peer(self, change: PeerChange, peer: Peer) -> None:
        """Detect a lost tail by a worker's heartbeat; drop the state of dead processes."""
        process, now = peer.process, self._runtime.clock.now()
        match change, peer.heartbeat.role:
            case PeerChange.DIED, Role.WORKER:
                self._machine.on_worker_died(process)
            case PeerChange.DIED, Role.GATEWAY:
                self._do(self._machine.on_owner_died(process, now))
            case _, Role.WORKER:
                for stream in peer.heartbeat.streams:
                    if stream.receiver == self._runtime.process.instance:
                        self._do(self._machine.on_worker_seq(process, stream.seq, now))
            case _:
                pass

    async def _on_control(
        self, message: ResumeText | SealAttempts, _: object
    ) -> TextResumed | AttemptsSealed:
        if isinstance(message, SealAttempts):
            bytes_max = self._runtime.settings.bus.payload_bytes_max - SEALED_ENVELOPE_BYTES
            return self._machine.on_seal(message, bytes_max)
        rows, actions = self._machine.on_resume(message)
        self._do(actions)
        return TextResumed(rows=rows)

    def _do(self, actions: Sequence[Action]) -> None:
        # Nothing is lost while the link is down: the gateway requests text beyond its offsets, and
        # a gap at a worker shows again with its next batch or heartbeat.
        perform(actions, self._act)
        self._moved.set()

    def _act(self, action: Action) -> None:
        bus = self._runtime.bus
        match action:
            case TextBatch():
                bus.publish(TEXT, action, gateway=action.gateway.instance)
            case SendStop(worker, stop):
                bus.publish(STOP, stop, worker=worker)
            case ResendTokens(worker=worker):
                self._runtime.metrics.gaps.labels(TOKENS.name).inc()
                bus.publish(STOP, action, worker=worker.instance)
            case FetchOpenList(gateway=gateway):
                bus.publish(OPEN_FETCH, action, gateway=gateway.instance)

    def _tick(self) -> None:
        clock = self._runtime.clock
        self._do(self._machine.on_tick(clock.now(), clock.unix_ms()))
        self._spans.end(self._machine.requests)


def _read_token_bytes(folder: Path) -> Sequence[bytes]:
    """The bytes of each token; empty if the tokenizer does not define them."""
    try:
        return read_vocabulary(folder).tokens
    except Unsupported as error:
        log.info("bytes of tokens are those of their texts", extra={"reason": error.message})
        return ()


class TextSpans:
    """Tracing: one span per request, from its first token to its end in this detokenizer."""

    def __init__(self) -> None:
        self._open: dict[RequestId, Span] = {}

    def begin(self, news: TokenNews) -> None:
        if isinstance(news, TokenStep):
            return
        for row in news.rows:
            stream = row.stream
            if stream is None or stream.traceparent is None or row.request_id in self._open:
                continue
            opened = span("detokenizer.text", stream.traceparent, request_id=row.request_id)
            self._open[row.request_id] = opened.start()

    def end(self, requests: Mapping[RequestId, DetokenizerRequest]) -> None:
        if not self._open:
            return
        for request_id in list(self._open):
            request = requests.get(request_id)
            if request is None or request.ended:
                self._open.pop(request_id).end()
