"""Images in chats over HTTP: rates by size and number of encoders, where the time of a new image
goes, and transformers in one process.

The model has the parts of a LLaVA, small: a tower of 12 layers of 384 and 576 tokens an image, and
4 layers of text. Each image is new, and each answer is one token: what is measured is the way of
an image. Expected of a new image: 30 GFLOP in the tower (22 M parameters, 576 tokens), 0.3 s of a
core in float32; 7 ms to decode 448 x 448 pixels, 150 ms for 8.3 million; 0.9 MB of embedding, less
than a millisecond. An encoder has an even share of the cores beside the worker: one of two.

    python -m tests.bench.images
    python -m tests.bench.images --rounds 1 --json FILE
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import re
import shutil
import time
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np
from PIL import Image
from tests.bench.models import CACHE
from tests.bench.summary import Measurement, arguments, here, measured, report
from tests.support.llava import write_llava
from tests.system.stack import PROGRAM, Stack, read, serving

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

ROUNDS = 5
CLIENTS = 2
ENCODERS = (1, 2)
VISION = {
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "image_size": 336,
    "patch_size": 14,
}
TEXT = {
    "model_type": "llama",
    "tie_word_embeddings": False,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}
TIMES = {
    "fetch": ("encoder", "encoder_fetch_seconds"),
    "decode": ("encoder", "encoder_decode_seconds"),
    "tower": ("encoder", "encoder_request_e2e_latency_seconds"),
    "transfer": ("worker", "embedding_fetch_seconds"),
}
"""Parts of the way of an image: which service measures them, and in which histogram."""


@dataclass(frozen=True)
class Load:
    """Requests of `images` new pictures each."""

    name: str
    width: int
    height: int
    images: int

    @property
    def requests(self) -> int:
        return max(CLIENTS, 8 // self.images)

    @property
    def title(self) -> str:
        return f"{self.name}, {self.images} a request"


SIZES = (("448 x 448", 448, 448), ("1,024 x 1,024", 1024, 1024), ("3,840 x 2,160", 3840, 2160))
LOADS = tuple(Load(*size, images) for size in SIZES for images in (1, 8))


def made_model() -> Path:
    """The folder of the model, written first if it is not there."""
    folder = CACHE / "models" / "llava-small"
    if not (folder / "ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_llava(folder, VISION, TEXT)
        (folder / "ready").touch()
    return folder


def serve_small(encoders: int, program: str = PROGRAM) -> AbstractContextManager[Stack]:
    """A stack of the model with so many encoders of their own."""
    return serving(
        *("--model-path", str(made_model()), "--served-model-name", "small", "--dtype", "float32"),
        *("--supervisor-encoders", str(encoders)),
        program=program,
    )


def pictures(width: int, height: int) -> Iterator[bytes]:
    """JPEGs that differ: areas of colour and some noise, about a byte in five pixels."""
    for seed in count(width):
        draw = np.random.default_rng(seed)
        areas = Image.fromarray(draw.integers(0, 256, (9, 16, 3), dtype=np.uint8))
        smooth = np.asarray(areas.resize((width, height), Image.Resampling.BICUBIC), np.int16)
        noise = draw.integers(-6, 7, (height, width, 1), dtype=np.int16)
        file = io.BytesIO()
        Image.fromarray((smooth + noise).clip(0, 255).astype(np.uint8)).save(file, "JPEG")
        yield file.getvalue()


def body(stack: Stack, text: str, images: Sequence[bytes] = ()) -> bytes:
    urls = ["data:image/jpeg;base64," + base64.b64encode(each).decode() for each in images]
    content: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content.append({"type": "text", "text": text})
    messages = [{"role": "user", "content": content}]
    asked = {"model": stack.model, "messages": messages, "max_tokens": 1, "temperature": 0}
    return json.dumps(asked).encode()


async def ask(session: aiohttp.ClientSession, stack: Stack, data: bytes) -> float:
    """Send a chat; the seconds until its only token is there.

    Raises:
        aiohttp.ClientResponseError: It is refused.
    """
    began = time.perf_counter()
    url, headers = f"{stack.url}/v1/chat/completions", {"Content-Type": "application/json"}
    async with session.post(url, data=data, headers=headers) as reply:
        reply.raise_for_status()
        await reply.read()
    return time.perf_counter() - began


def spent(stack: Stack) -> dict[str, tuple[float, float]]:
    """The seconds and the number of each part so far, of all processes of its service."""
    ports: dict[str, int] = json.loads(stack.get("/server_info"))["metrics_ports"]
    found: dict[str, tuple[float, float]] = {}
    for part, (role, name) in TIMES.items():
        texts = [
            read(f"http://127.0.0.1:{port}/metrics")
            for instance, port in ports.items()
            if instance.startswith(role)
        ]
        seconds, number = (
            sum(float(value) for text in texts for value in _values(text, f"{name}_{end}"))
            for end in ("sum", "count")
        )
        found[part] = seconds, number
    return found


def _values(text: str, name: str) -> Iterable[str]:
    return re.findall(rf"^antiphon_{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)


@dataclass(frozen=True)
class Round:
    """One load, once.

    Attributes:
        images_s: Images a second, of all clients.
        first_ms: Times to the token of each request.
        parts_ms: The time of each part, a mean over the images.
    """

    images_s: float
    first_ms: Sequence[float]
    parts_ms: dict[str, float]


async def play(stack: Stack, load: Load, source: Iterator[bytes]) -> Round:
    bodies = [
        body(stack, "What is this?", [next(source) for _ in range(load.images)])
        for _ in range(load.requests)
    ]
    left, before, times = iter(bodies), spent(stack), list[float]()

    async def client(session: aiohttp.ClientSession) -> None:
        for data in left:
            times.append(await ask(session, stack, data))

    async with aiohttp.ClientSession() as session:
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(client(session))
        seconds = time.perf_counter() - began
    images = load.images * load.requests
    parts_ms: dict[str, float] = {}
    for part, (after_s, number) in spent(stack).items():
        before_s, earlier = before[part]
        assert number - earlier == images, f"{number - earlier} of {images} images: {part}"
        parts_ms[part] = 1000 * (after_s - before_s) / images
    return Round(images / seconds, [1000 * each for each in times], parts_ms)


class Transformers:
    """The model in this process: pixels by its own processor, and one token."""

    def __init__(self, folder: Path, cores: int) -> None:
        import torch  # noqa: PLC0415
        import transformers  # noqa: PLC0415

        torch.set_num_threads(cores)
        size = VISION["image_size"]
        self._processor = transformers.CLIPImageProcessorPil(
            size={"shortest_edge": size}, crop_size={"height": size, "width": size}
        )
        self._model = transformers.LlavaForConditionalGeneration.from_pretrained(folder).eval()

    def images_s(self, load: Load, source: Iterator[bytes]) -> float:
        import torch  # noqa: PLC0415

        data = [[next(source) for _ in range(load.images)] for _ in range(load.requests)]
        config = self._model.config
        placeholders = [config.image_token_index] * config.image_seq_length
        ids = torch.tensor([[1, *(placeholders * load.images), 5, 6, 7]])
        began = time.perf_counter()
        with torch.inference_mode():
            for each in data:
                shown: list[Any] = [Image.open(io.BytesIO(image)) for image in each]
                pixels = self._processor(shown, return_tensors="pt")["pixel_values"]
                self._model(input_ids=ids, pixel_values=pixels, logits_to_keep=1)
        return load.images * load.requests / (time.perf_counter() - began)


def measure(stack: Stack, arm: str, rounds: int, theirs: Transformers | None) -> list[Measurement]:
    """Measure the loads in turn, after one round that only warms up."""
    sources = {name: pictures(*size) for name, *size in SIZES}
    played: dict[Load, list[Round]] = {load: [] for load in LOADS}
    others: dict[Load, list[float]] = {load: [] for load in LOADS}
    for number in range(-1, rounds):
        for load in LOADS:
            found = asyncio.run(play(stack, load, sources[load.name]))
            other = theirs.images_s(load, sources[load.name]) if theirs else None
            if number >= 0:
                played[load].append(found)
                others[load] += [] if other is None else [other]
    return [row for load in LOADS for row in _rows(load, arm, played[load], others[load])]


def _rows(
    load: Load, arm: str, ours: Sequence[Round], theirs: Sequence[float]
) -> Iterator[Measurement]:
    yield measured("images_s", (each.images_s for each in ours), case=load.title, arm=arm)
    first = (time_ms for each in ours for time_ms in each.first_ms)
    yield measured("first_token_ms", first, case=load.title, arm=arm)
    for part in TIMES:
        values = (each.parts_ms[part] for each in ours)
        yield measured(f"{part}_ms", values, case=load.title, arm=arm)
    if theirs:
        other = "transformers"
        yield measured("images_s", theirs, case=load.title, arm=other)
        ratios = (one.images_s / two for one, two in zip(ours, theirs, strict=True))
        yield measured("ratio", ratios, case=load.title, arm=arm, against=other, by_round=True)


def main() -> None:
    given = arguments(description=__doc__, rounds=ROUNDS, file="images.json").parse_args()
    rows = list[Measurement]()
    transformers = Transformers(made_model(), os.cpu_count() or 1)
    for encoders in ENCODERS:
        arm = f"{encoders} encoder" + "s" * (encoders > 1)
        with serve_small(encoders) as stack:
            rows += measure(stack, arm, given.rounds, transformers if encoders == 1 else None)
    setup = {"clients": CLIENTS, "rounds": given.rounds}
    report(here("images", setup, rows), given.json)


if __name__ == "__main__":
    main()
