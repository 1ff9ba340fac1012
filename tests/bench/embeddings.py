"""Vectors over HTTP, against transformers in one process with batches of 32 sorted by length.

A round embeds all texts once with transformers and once in each way over HTTP, and a ratio is of
one round. Expected for the shape of MiniLM: a text of 124 tokens costs 2.6 GFLOP in the linears,
5 ms of a core with bf16 instructions and half of that with AMX, a third of it more in what is
between them, and its way through the services 2.5 ms. The shape of BERT-base has 8 times the
arithmetic and the same way.

    python -m tests.bench.embeddings
    python -m tests.bench.embeddings --rounds 1 --models minilm-l6 --json FILE
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from typing import TYPE_CHECKING

import aiohttp
import msgspec
import numpy as np
from tests.bench.embedders import BERT_BASE, ENCODERS, MINILM, made_encoder
from tests.bench.prose import PROSE
from tests.bench.summary import Measurement, arguments, here, measured, report
from tests.system.stack import Stack, serving

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    Vectors = NDArray[np.float32]

ROUNDS = 5
TEXTS = {MINILM.name: 256, BERT_BASE.name: 64}
"""Fewer of the larger shape: with both, transformers takes seconds for all of them."""
WORDS = (20, 110)
BATCH = 32
DIFFERENCE_MAX = 0.03
"""Of vectors of length 1 in bfloat16, in any number."""
OURS, THEIRS = "antiphon", "transformers"


class Way(msgspec.Struct, frozen=True):
    """How a client sends the texts: so many a request, so many requests at once."""

    name: str
    texts: int
    open_max: int


WAYS = (
    Way("batches of 32, two at a time", BATCH, 2),
    Way("batches of 32, one after another", BATCH, 1),
    Way("single texts at once", 1, max(TEXTS.values())),
)


class _Embedding(msgspec.Struct):
    embedding: list[float]


class _Reply(msgspec.Struct):
    data: list[_Embedding]


def texts(count: int) -> list[str]:
    """Runs of words from the prose of the benchmarks; their lengths are uniformly distributed."""
    words, draw = PROSE.read_text().split(), random.Random(0)
    lengths = [draw.randint(*WORDS) for _ in range(count)]
    starts = [draw.randrange(len(words) - length) for length in lengths]
    return [
        " ".join(words[start : start + length])
        for start, length in zip(starts, lengths, strict=True)
    ]


class Transformers:
    """The model in this process, as `SentenceTransformer.encode` computes it."""

    def __init__(self, folder: Path, cores: int) -> None:
        import torch  # noqa: PLC0415
        from transformers import AutoModel, AutoTokenizer  # noqa: PLC0415

        torch.set_num_threads(cores)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModel.from_pretrained(
            folder, dtype=torch.bfloat16, add_pooling_layer=False
        ).eval()

    def embed(self, texts: Sequence[str]) -> Vectors:
        import torch  # noqa: PLC0415

        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        vectors: list[torch.Tensor] = []
        with torch.inference_mode():
            for start in range(0, len(order), BATCH):
                batch = [texts[index] for index in order[start : start + BATCH]]
                encoded = self._tokenizer(
                    batch, padding=True, truncation=True, max_length=512, return_tensors="pt"
                )
                hidden = self._model(**encoded).last_hidden_state
                mask = encoded["attention_mask"].unsqueeze(-1).to(hidden.dtype)
                mean = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
                vectors.append(torch.nn.functional.normalize(mean.float(), dim=1))
        found = torch.cat(vectors).numpy()
        result = np.empty_like(found)
        result[order] = found
        return result


async def post_all(url: str, texts: Sequence[str], way: Way) -> tuple[float, Vectors]:
    """Embed all texts over HTTP; the seconds until the last reply was read, and the vectors."""
    starts = range(0, len(texts), way.texts)
    bodies = [
        msgspec.json.encode({"input": list(texts[start : start + way.texts])}) for start in starts
    ]
    replies: list[bytes] = [b""] * len(bodies)
    left = iter(enumerate(bodies))
    connector = aiohttp.TCPConnector(limit=0)
    headers = {"Content-Type": "application/json"}

    async def client(session: aiohttp.ClientSession) -> None:
        for index, body in left:
            async with session.post(f"{url}/v1/embeddings", data=body, headers=headers) as reply:
                reply.raise_for_status()
                replies[index] = await reply.read()

    async with aiohttp.ClientSession(connector=connector) as session:
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(min(way.open_max, len(bodies))):
                group.create_task(client(session))
        seconds = time.perf_counter() - began
    rows = [
        one.embedding for each in replies for one in msgspec.json.decode(each, type=_Reply).data
    ]
    return seconds, np.array(rows, np.float32)


def measure(name: str, stack: Stack, transformers: Transformers, rounds: int) -> list[Measurement]:
    """Measure rounds over the same texts, after one that only warms up.

    Raises:
        AssertionError: The vectors differ.
    """
    given, theirs = texts(TEXTS[name]), list[float]()
    ours: dict[Way, list[float]] = {way: [] for way in WAYS}
    for number in range(-1, rounds):
        began = time.perf_counter()
        expected = transformers.embed(given)
        their_s = time.perf_counter() - began
        if number >= 0:
            theirs.append(len(given) / their_s)
        for way, rates in ours.items():
            our_s, found = asyncio.run(post_all(stack.url, given, way))
            difference = float(np.abs(found - expected).max())
            assert difference < DIFFERENCE_MAX, f"vectors differ by {difference}"
            if number >= 0:
                rates.append(len(given) / our_s)
    return [
        row for way, rates in ours.items() for row in _rows(f"{name}, {way.name}", rates, theirs)
    ]


def _rows(case: str, ours: Sequence[float], theirs: Sequence[float]) -> Iterable[Measurement]:
    yield measured("texts_s", ours, case=case, arm=OURS)
    yield measured("texts_s", theirs, case=case, arm=THEIRS)
    ratios = (one / other for one, other in zip(ours, theirs, strict=True))
    yield measured("ratio", ratios, case=case, arm=OURS, against=THEIRS, by_round=True)


def main() -> None:
    parser = arguments(description=__doc__, rounds=ROUNDS, file="embeddings.json")
    parser.add_argument("--models", nargs="*", choices=list(ENCODERS), default=list(ENCODERS))
    given = parser.parse_args()
    cores, rows = os.cpu_count() or 1, list[Measurement]()
    for name in given.models:
        folder = made_encoder(ENCODERS[name])
        transformers = Transformers(folder, cores)
        served = ("--model-path", str(folder), "--model-threads", str(cores))
        with serving(*served, "--dtype", "bfloat16") as stack:
            rows += measure(name, stack, transformers, given.rounds)
    counts = ", ".join(f"{TEXTS[name]} ({name})" for name in given.models)
    setup = {"texts": counts, "words": f"{WORDS[0]}-{WORDS[1]}", "rounds": given.rounds}
    report(here("embeddings", setup, rows), given.json)


if __name__ == "__main__":
    main()
