"""Renders and encodes heavy texts in child processes, apart from small texts and the event loop.

python -m antiphon.tokenizer.encode_process SETTINGS PARENT_PID MEMORY_BYTES_MAX
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from antiphon.model_card.audio import AudioCard, PromptAudio
from antiphon.model_card.vision.vision_card import VisionCard
from antiphon.service.process_pool import ProcessPool, serve
from antiphon.tokenizer.encoding import EncodedPrompt, TextEncoder
from antiphon.tokenizer.model_tokenizer import read_model_tokenizer
from antiphon.tokenizer.transcription import Transcriber
from antiphon.wire.errors import ErrorReply, decode_error, encode_error
from antiphon.wire.namespaces import PageOrigin
from antiphon.wire.tokenize import EncodeRequest

_MEMORY_BYTES_MAX = 8 * 1024**3
"""A vocabulary takes up to 1 GiB of address space, an encoding of 8 MiB of text another."""
_JOB_S = 60.0
"""Maximum time of one text in a child that is ready; the largest takes some seconds."""


class EncoderSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings with which a child builds the same encoder as its parent."""

    folder: str
    chat_template: str
    completion_template: str
    chat_template_name: str
    origin: PageOrigin
    text_bytes_max: int
    context_tokens: int
    vision: VisionCard | None = None
    audio: AudioCard | None = None
    prompt_audio: PromptAudio | None = None

    def encoder(self) -> TextEncoder:
        words = read_model_tokenizer(
            Path(self.folder),
            self.chat_template,
            self.completion_template,
            self.chat_template_name,
            self.vision,
            self.prompt_audio,
        )
        transcriber = None if self.audio is None else Transcriber.of(words.tokenizer, self.audio)
        return TextEncoder(
            words, self.origin, self.text_bytes_max, self.context_tokens, transcriber
        )


class EncodeProcesses:
    """Encodes heavy texts, one per process at a time, while its `pool` is entered."""

    def __init__(self, settings: EncoderSettings, processes: int) -> None:
        shown = msgspec.json.encode(settings).decode()
        self.pool = ProcessPool(
            ("-m", "antiphon.tokenizer.encode_process", shown),
            job_s=_JOB_S,
            processes=processes,
            memory_bytes_max=_MEMORY_BYTES_MAX,
        )

    async def encode(self, text: EncodeRequest, *, timeout_s: float) -> EncodedPrompt:
        """Encode a text; tenants are served round-robin.

        If the caller is cancelled, a text that is being encoded occupies its process to its end.

        Raises:
            EngineError: The text is rejected, too many texts wait, or it took too long.
        """
        job = msgspec.msgpack.encode(text)
        result = await self.pool.run(job, timeout_s=timeout_s, owner=text.tenant)
        outcome = msgspec.msgpack.decode(result, type=EncodedPrompt | ErrorReply)
        if isinstance(outcome, ErrorReply):
            raise decode_error(outcome)
        return outcome


def main(arguments: list[str]) -> None:
    shown, parent_pid, memory_bytes_max = arguments
    encoder = msgspec.json.decode(shown, type=EncoderSettings).encoder()

    def work(job: bytes) -> bytes:
        (result,) = encoder.encode([msgspec.msgpack.decode(job, type=EncodeRequest)])
        outcome = result if isinstance(result, EncodedPrompt) else encode_error(result)
        return msgspec.msgpack.encode(outcome)

    serve(work, parent_pid, memory_bytes_max)


if __name__ == "__main__":
    main(sys.argv[1:])
