"""Throughput of one client with n-gram drafts, against none.

Two servers of the same model, one of them with `--speculative-algorithm NGRAM`, are asked the same
in turn; a ratio is of one such pair. Expected: a text that repeats itself is as many times faster
as tokens are accepted in a step, divided by what a verified step costs more (1.5 times a decode
step for the embedded model, 1.2 for 135M, whose weights are read once for all tokens of a step); a
sampled text with few matches costs the lookup, some 20 us a step.

    python -m tests.bench.speculation
    python -m tests.bench.speculation --rounds 1
"""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
from tests.bench.prose import PROSE
from tests.bench.services import metrics_urls, scrape
from tests.bench.summary import Measurement, arguments, here, measured, report
from tests.system.stack import Stack, serving

if TYPE_CHECKING:
    from collections.abc import Sequence

ROUNDS = 5
WORKER = "worker-0"
NGRAM = ("--speculative-algorithm", "NGRAM")


class Case(msgspec.Struct, frozen=True):
    """What is asked of a server with these arguments, and how many tokens are generated."""

    name: str
    arguments: tuple[str, ...]
    prompt: str
    tokens: int
    temperature: float = 0.0


def passage() -> str:
    """About 300 tokens of prose."""
    return " ".join(PROSE.read_text().split("## The life of a request")[-1].split()[:210])


def chat(text: str) -> str:
    """A turn as smollm2's template writes it."""
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def cases() -> list[Case]:
    embedded = ("--enable-deterministic-inference",)
    real = ("--model-path", "smollm2")
    repeat = chat(f"Repeat this text word by word:\n\n{passage()}")
    edit = chat(f"Copy this text, but write 'the router' for 'the scheduler':\n\n{passage()}")
    discuss = chat(f"What is this text about?\n\n{passage()}")
    return [
        Case("embedded, repeated text", embedded, "The river runs to the sea. " * 8, 400),
        Case("smollm2, repeat", real, repeat, 300),
        Case("smollm2, edit", real, edit, 300),
        Case("smollm2, temperature 1", real, discuss, 300, 1.0),
    ]


def main() -> None:
    given = arguments(description=__doc__, rounds=ROUNDS, file="speculation.json").parse_args()
    rows = [row for case in cases() for row in asyncio.run(_measure(case, given.rounds))]
    report(here("speculation", {"rounds": given.rounds}, rows), given.json)


async def _measure(case: Case, rounds: int) -> Sequence[Measurement]:
    """Pairs of the same request to both servers, after one that only warms up."""
    seconds: dict[str, list[float]] = {"plain": [], "ngram": []}
    with ExitStack() as exits:
        stacks = {
            "plain": exits.enter_context(serving(*case.arguments)),
            "ngram": exits.enter_context(serving(*case.arguments, *NGRAM)),
        }
        for number in range(-1, rounds):
            texts: dict[str, str] = {}
            for arm, stack in stacks.items():
                took, texts[arm] = await _ask(stack, case, number)
                if number >= 0:
                    seconds[arm].append(took)
            assert texts["plain"] == texts["ngram"], f"{case.name}: drafts have changed the text"
        counted = await _accepted(stacks["ngram"])
    pairs = zip(seconds["plain"], seconds["ngram"], strict=True)
    return [
        measured("tok_s", (case.tokens / s for s in seconds["plain"]), case=case.name, arm="plain"),
        measured("tok_s", (case.tokens / s for s in seconds["ngram"]), case=case.name, arm="ngram"),
        measured("ratio", (plain / ngram for plain, ngram in pairs), case=case.name),
        measured("accept_length", [counted], case=case.name, arm="ngram"),
    ]


async def _ask(stack: Stack, case: Case, seed: int) -> tuple[float, str]:
    """Seconds from the first token to the last, and the text."""
    sampling = {
        "max_new_tokens": case.tokens,
        "temperature": case.temperature,
        "ignore_eos": True,
        "sampling_seed": seed + 1,
    }
    body: dict[str, Any] = {"text": case.prompt, "sampling_params": sampling, "stream": True}
    first, text = None, ""
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{stack.url}/generate", json=body) as response,
    ):
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                first = time.perf_counter() if first is None else first
                text = msgspec.json.decode(line[6:])["text"]
    assert first is not None, "nothing was generated"
    return time.perf_counter() - first, text


async def _accepted(stack: Stack) -> float:
    """Accepted tokens a verified step, since start."""
    page = await asyncio.to_thread(scrape, (await metrics_urls(stack))[WORKER])
    (value,) = (v for name, v in page.items() if "spec_accept_length" in name)
    return value


if __name__ == "__main__":
    main()
