"""Texts beside images: their time to first token, by where the encoder runs.

Clients send new images to the small model of `images.py`, and others short texts. An encoder in a
process of its own has an even share of the cores beside the worker. In the worker's process, a form
that only this bench starts, both use all cores. Expected: with processes of their own, texts lose
the cores that the tower uses; in one process they also wait for the interpreter's lock, and their
kernels for those of the tower.

    python -m tests.bench.texts_beside_images
"""

from __future__ import annotations

import asyncio
from itertools import count, islice
from typing import TYPE_CHECKING

import aiohttp
from tests.bench.images import CLIENTS, ask, body, pictures, serve_small
from tests.bench.summary import Measurement, arguments, here, measured, report

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.system.stack import Stack

ROUNDS = 5
TEXTS, IMAGES = 60, 80
"""Texts of a round, and images that are sent beside them at most."""
PAUSE_S = 0.05
"""Between an answer and the next text, so that a round of texts lasts as long as several images."""


async def texts_beside(
    stack: Stack, images: Sequence[bytes], numbers: Iterator[int]
) -> list[float]:
    """Times to the only token of texts in ms, while other clients send bodies with images.

    Raises:
        AssertionError: The images ended before the texts.
    """
    times: list[float] = []
    left, answered = iter(images), asyncio.Event()

    async def send_images() -> None:
        for data in left:
            await ask(session, stack, data)
            answered.set()

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        senders = [group.create_task(send_images()) for _ in range(CLIENTS if images else 0)]
        if senders:
            await answered.wait()
        for number in islice(numbers, TEXTS):
            await asyncio.sleep(PAUSE_S)
            asked = body(stack, f"{number}: say how you are.")
            times.append(1000 * await ask(session, stack, asked))
        assert not any(each.done() for each in senders), "too few images"
        for each in senders:
            each.cancel()
    return times


def measure_texts(stacks: Mapping[str, Stack], rounds: int) -> Iterator[Measurement]:
    """Measure texts alone and beside images, of all stacks in turn."""
    source, numbers = pictures(1024, 1024), count()
    alone: dict[str, list[float]] = {arm: [] for arm in stacks}
    beside: dict[str, list[float]] = {arm: [] for arm in stacks}
    for _ in range(rounds):
        for arm, stack in stacks.items():
            images = [body(stack, "What?", [each]) for each in islice(source, IMAGES)]
            alone[arm] += asyncio.run(texts_beside(stack, (), numbers))
            beside[arm] += asyncio.run(texts_beside(stack, images, numbers))
    case = f"while {CLIENTS} clients send new images of 1,024 x 1,024"
    for arm in stacks:
        yield measured("text_first_token_ms", alone[arm], case="alone", arm=arm)
        yield measured("text_first_token_ms", beside[arm], case=case, arm=arm)


def main() -> None:
    file = "texts-beside-images.json"
    given = arguments(description=__doc__, rounds=ROUNDS, file=file).parse_args()
    with (
        serve_small(1) as apart,
        serve_small(2) as two,
        serve_small(0, "tests.bench.joint_process") as joint,
    ):
        stacks = {"1 encoder": apart, "2 encoders": two, "in the worker's process": joint}
        rows: list[Measurement] = [*measure_texts(stacks, given.rounds)]
    setup = {"clients": CLIENTS, "rounds": given.rounds}
    report(here("texts-beside-images", setup, rows), given.json)


if __name__ == "__main__":
    main()
