"""An OpenAI completions server around OpenVINO's ContinuousBatchingPipeline.

OpenVINO has a server of its own that is no Python package, so this one stands in: as thin as it
can be, so that what is measured is the pipeline. It runs alone, in OpenVINO's environment. A
thread steps the pipeline; after each step, what is new goes to the event loop in one call.

    python -P openvino_server.py --folder EXPORTED --model NAME --port PORT --threads N
"""

from __future__ import annotations

import argparse
import asyncio
import codecs
import itertools
import json
import queue
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import openvino_genai as genai  # pyright: ignore[reportMissingImports]
from aiohttp import web
from openvino import Tensor  # pyright: ignore[reportMissingImports]
from tokenizers import Tokenizer, pre_tokenizers

if TYPE_CHECKING:
    from collections.abc import Iterable

CACHE_GB = 2
SEQUENCES_MAX = 64
STEP_TOKENS_MAX = 2048


@dataclass
class Ask:
    prompt: str
    output_tokens: int
    ignore_eos: bool
    news: asyncio.Queue[list[int] | None] = field(default_factory=asyncio.Queue)
    prompt_tokens: int = 0


class Engine(threading.Thread):
    """Steps the pipeline while there is work, and sleeps on its queue while there is none."""

    def __init__(self, folder: Path, threads: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(daemon=True)
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.max_num_seqs = SEQUENCES_MAX
        scheduler.max_num_batched_tokens = STEP_TOKENS_MAX
        scheduler.enable_prefix_caching = True
        self._pipeline = genai.ContinuousBatchingPipeline(
            str(folder), scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
        )
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._loop = loop
        self._asks: queue.SimpleQueue[Ask] = queue.SimpleQueue()
        self._open: list[tuple[Ask, Any]] = []  # with the `GenerationHandle`
        self._ids = itertools.count()

    def submit(self, ask: Ask) -> None:
        self._asks.put(ask)

    def run(self) -> None:
        while True:
            self._take(wait=not self._open)
            self._pipeline.step()
            self._loop.call_soon_threadsafe(deliver, list(self._read()))

    def _take(self, *, wait: bool) -> None:
        while wait or not self._asks.empty():
            ask = self._asks.get()
            config = genai.GenerationConfig()
            config.max_new_tokens = ask.output_tokens
            config.ignore_eos = ask.ignore_eos
            config.do_sample = False
            ids = self._tokenizer.encode(ask.prompt).ids
            ask.prompt_tokens = len(ids)
            prompt = Tensor(np.array([ids], dtype=np.int64))
            handle = self._pipeline.add_request(next(self._ids), prompt, config)
            self._open.append((ask, handle))
            wait = False

    def _read(self) -> Iterable[tuple[Ask, list[int] | None]]:
        still: list[tuple[Ask, Any]] = []
        for ask, handle in self._open:
            running = handle.get_status() == genai.py_openvino_genai.GenerationStatus.RUNNING
            while handle.can_read():
                yield ask, [i for out in handle.read().values() for i in out.generated_ids]
            if running:
                still.append((ask, handle))
            else:
                yield ask, None
        self._open = still


def deliver(news: list[tuple[Ask, list[int] | None]]) -> None:
    """Hand each request what is new of it; None is its end."""
    for ask, ids in news:
        ask.news.put_nowait(ids)


class Server:
    """POST /v1/completions, streamed; GET /health."""

    def __init__(self, folder: Path, model: str, threads: int) -> None:
        self._folder = folder
        self._model = model
        self._threads = threads
        vocabulary = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
        self._bytes = token_bytes(vocabulary)

    async def start(self, _: web.Application) -> None:
        loop = asyncio.get_running_loop()
        self._engine = Engine(self._folder, self._threads, loop)
        self._engine.start()

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        ask = Ask(body["prompt"], body["max_tokens"], body.get("ignore_eos", False))
        self._engine.submit(ask)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        count = 0
        while (ids := await ask.news.get()) is not None:
            count += len(ids)
            text = decoder.decode(b"".join(self._bytes[i] for i in ids))
            if text:
                await response.write(self._event([{"index": 0, "text": text}]))
        usage = {"prompt_tokens": ask.prompt_tokens, "completion_tokens": count}
        last = self._event([{"index": 0, "text": "", "finish_reason": "length"}])
        await response.write(last + self._event([], usage) + b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _event(self, choices: list[dict[str, object]], usage: object = None) -> bytes:
        chunk = {
            "id": "cmpl",
            "object": "text_completion",
            "model": self._model,
            "choices": choices,
            "usage": usage,
        }
        return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def token_bytes(vocabulary: dict[str, int]) -> list[bytes]:
    """Return the bytes of each token id: byte-level BPE writes bytes as letters of an alphabet.

    Source: `bytes_to_unicode` of GPT-2's encoder; printable bytes stand for themselves.
    """
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    plain = [n for n in range(256) if chr(n) in alphabet]
    others = [n for n in range(256) if chr(n) not in alphabet]
    letters = {chr(n): n for n in plain} | {chr(256 + k): n for k, n in enumerate(others)}
    said = [b""] * (max(vocabulary.values()) + 1)
    for token, n in vocabulary.items():
        if all(letter in letters for letter in token):
            said[n] = bytes(letters[letter] for letter in token)
    return said


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    server = Server(arguments.folder, arguments.model, arguments.threads)
    app = web.Application(client_max_size=2**23)
    app.on_startup.append(server.start)
    app.add_routes(
        [web.get("/health", server.health), web.post("/v1/completions", server.complete)]
    )
    web.run_app(app, host="127.0.0.1", port=arguments.port, print=None, access_log=None)


if __name__ == "__main__":
    main()
