"""Connects the tokenizer to the bus: answers calls, has no state."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from antiphon.model_card.audio import read_audio, read_prompt_audio
from antiphon.model_card.card import ModelCard, read_card
from antiphon.model_card.pooling import Pooling, read_pooling
from antiphon.model_card.served_model import model_files, served_name, tokenizer_folder
from antiphon.model_card.vision.vision_card import VisionCard, read_vision, videos_of
from antiphon.service.clock import check, remaining_s
from antiphon.service.endpoint import Endpoint, RequestEndpoint, StreamEndpoint
from antiphon.service.service import Report, Runtime
from antiphon.service.startup import CannotStart
from antiphon.telemetry.tracing import span
from antiphon.tokenizer.encode_process import EncodeProcesses, EncoderSettings
from antiphon.tokenizer.encoding import (
    Batcher,
    EncodedPrompt,
    TextEncoder,
    character_count,
    decode,
    is_heavy,
)
from antiphon.wire.base import Role
from antiphon.wire.claim import PixelLimits
from antiphon.wire.codec import id_count
from antiphon.wire.errors import EngineError, InvalidRequest, PromptTooLong
from antiphon.wire.namespaces import PageOrigin
from antiphon.wire.routes import CANCEL_ENCODE, DECODE, DECODE_AT, TOKENIZE, TOKENIZE_AT
from antiphon.wire.tokenize import (
    CancelEncode,
    DecodeReply,
    DecodeRequest,
    EncodeReply,
    EncodeRequest,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence
    from pathlib import Path

    from antiphon.config.settings import Settings
    from antiphon.wire.ids import ModelName, RequestId


_HEAVY_S = 120.0
"""Maximum time for a heavy text to wait, for a process to start, and to be encoded there."""


def _vision(settings: Settings, folder: Path) -> VisionCard | None:
    """Read how the model takes images.

    Raises:
        CannotStart: It cannot scale them as the settings say.
    """
    vision, media = read_vision(folder), settings.media
    if vision is not None and (media.pixels_min or media.pixels_max):
        try:
            vision.within(PixelLimits(least=media.pixels_min, most=media.pixels_max))
        except InvalidRequest as error:
            raise CannotStart(f"media.pixels_min, media.pixels_max: {error.message}") from error
    return vision


@dataclass(frozen=True, slots=True)
class _Running:
    """The call that encodes a request's text, and the result that later calls wait for."""

    task: asyncio.Task[object]
    result: asyncio.Future[EncodedPrompt]


class TokenizerService:
    """Renders and encodes prompts; returns the model card's sampling defaults and lengths."""

    role: ClassVar = Role.TOKENIZER

    def __init__(
        self,
        runtime: Runtime,
        card: ModelCard,
        pooling: Pooling | None,
        encoder: TextEncoder,
        processes: EncodeProcesses,
        executor: Executor,
    ) -> None:
        self._runtime = runtime
        self._model = served_name(runtime.settings)
        self._card = card
        self._context_tokens = runtime.settings.model.context_tokens or card.context_tokens
        self._pooling = None if pooling is None else pooling.card
        self._encoder = encoder
        self._vocabulary = encoder.vocabulary
        self._processes = processes
        self._executor = executor
        self._batcher = Batcher[EncodeRequest, EncodedPrompt](
            encoder.encode, executor, runtime.settings.tokenizer.batch_max
        )
        self._in_flight = 0
        self._running: dict[RequestId, _Running] = {}

    @staticmethod
    @asynccontextmanager
    async def lifespan(runtime: Runtime) -> AsyncGenerator[TokenizerService]:
        settings, threads = runtime.settings, runtime.settings.tokenizer.threads
        # In a thread, since a model of the hub may have to be downloaded first.
        files = await asyncio.to_thread(model_files, settings, weights=False)
        card = read_card(files)
        pooling = read_pooling(files, card, embedding=settings.model.embedding)
        folder = await asyncio.to_thread(tokenizer_folder, settings)
        shared = EncoderSettings(
            folder=str(folder),
            chat_template=settings.model.chat_template,
            completion_template=settings.model.completion_template,
            chat_template_name=settings.model.chat_template_name,
            origin=PageOrigin(
                model_digest=settings.cluster.model_digest, cluster_salt=settings.cluster.hash_salt
            ),
            text_bytes_max=settings.tokenizer.text_bytes_max,
            context_tokens=settings.model.context_tokens or card.context_tokens,
            vision=_vision(settings, files.folder),
            audio=read_audio(files.folder),
            prompt_audio=read_prompt_audio(files.folder),
        )
        encoder = await asyncio.to_thread(shared.encoder)
        processes = EncodeProcesses(shared, threads)
        with ThreadPoolExecutor(threads, thread_name_prefix="encode") as executor:
            async with processes.pool:
                service = TokenizerService(runtime, card, pooling, encoder, processes, executor)
                for _ in range(threads):
                    runtime.group.create_task(service._batcher.run())
                yield service

    def endpoints(self) -> Sequence[Endpoint]:
        address = {"model": self._model}
        here = address | {"tokenizer": self._runtime.process.instance}
        return (
            RequestEndpoint(route=TOKENIZE, handler=self._encode, address=address),
            RequestEndpoint(route=TOKENIZE_AT, handler=self._encode, address=here),
            RequestEndpoint(route=DECODE, handler=self._decode, address=address),
            RequestEndpoint(route=DECODE_AT, handler=self._decode, address=here),
            StreamEndpoint(route=CANCEL_ENCODE, apply=self._cancel, address=address),
        )

    def model(self) -> ModelName | None:
        return self._model

    def report(self) -> Report:
        return Report(load=self._in_flight)

    async def drain(self) -> None:
        """Do nothing: there is no state beyond a call."""

    async def _encode(self, request: EncodeRequest, _: object) -> EncodeReply:
        check(request, self._runtime.clock)
        self._in_flight += 1
        try:
            with span("tokenize", request.traceparent):
                encoded = await self._encoded_once(request)
        finally:
            self._in_flight -= 1
        card, context_tokens = self._card, self._context_tokens
        prompt_tokens = id_count(encoded.token_ids)
        if prompt_tokens > context_tokens:
            # Raised here, since so many ids might not fit into a message.
            raise PromptTooLong.of(
                prompt_tokens=prompt_tokens,
                tokens_max=context_tokens,
                param="prompt" if request.messages is None else "messages",
            )
        vision = self._vocabulary.vision
        return EncodeReply(
            request_id=request.request_id,
            token_ids=encoded.token_ids,
            block_digests=encoded.block_digests,
            text_end=encoded.text_end,
            vocabulary_size=card.vocabulary_size,
            context_tokens=context_tokens,
            hidden_size=card.hidden_size,
            defaults=card.sampling,
            architecture=card.architecture,
            model_type=card.model_type,
            tool_parser=self._vocabulary.template_formats.tools,
            reasoning_parser=self._vocabulary.template_formats.reasoning,
            reranks=self._vocabulary.template_formats.reranks,
            second_from=encoded.second_from,
            pooling=self._pooling,
            token_characters=self._vocabulary.token_characters,
            untruncated_tokens=encoded.untruncated_tokens,
            media=encoded.media,
            sees=vision is not None,
            sees_videos=videos_of(vision) is not None,
            takes_audio=self._vocabulary.audio is not None,
            transcription=self._encoder.transcription,
            media_width=0 if vision is None else vision.row_width(card.hidden_size),
        )

    async def _encoded_once(self, request: EncodeRequest) -> EncodedPrompt:
        """Encode a text, or wait for a running call with the same request id.

        A gateway calls again if this process seems to be gone, while it may only be busy.
        """
        if (running := self._running.get(request.request_id)) is not None:
            return await asyncio.shield(running.result)
        task = asyncio.current_task()
        assert task is not None, "a call has a task of its own"
        running = _Running(task, asyncio.get_running_loop().create_future())
        self._running[request.request_id] = running
        try:
            encoded = await self._encode_text(request)
        except EngineError as error:
            running.result.set_exception(error)
            running.result.exception()  # mark it as retrieved: there may be no other call
            raise
        except BaseException:
            running.result.cancel()
            raise
        else:
            running.result.set_result(encoded)
            return encoded
        finally:
            del self._running[request.request_id]

    async def _encode_text(self, request: EncodeRequest) -> EncodedPrompt:
        self._encoder.check_length(request, character_count(request))
        if not is_heavy(request):
            return await self._batcher.submit(request)
        left_s = remaining_s(request.deadline_unix_ms, self._runtime.clock)
        return await self._processes.encode(request, timeout_s=min(left_s, _HEAVY_S))

    def _cancel(self, message: CancelEncode) -> None:
        if (running := self._running.get(message.request_id)) is not None:
            running.task.cancel()

    async def _decode(self, request: DecodeRequest, _: object) -> DecodeReply:
        check(request, self._runtime.clock)
        self._in_flight += 1
        try:
            with span("detokenize", request.traceparent):
                texts = await asyncio.get_running_loop().run_in_executor(
                    self._executor, decode, self._vocabulary, request
                )
        finally:
            self._in_flight -= 1
        return DecodeReply(request_id=request.request_id, texts=texts)
