"""When requests come: as many at once as allowed (closed loop), or when they please (open loop)."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class ClosedLoop:
    """So many clients, each of which asks again as soon as it is answered.

    It measures what a server can do. It cannot show overload: a slow server is asked less.
    """

    clients: int

    def __str__(self) -> str:
        return f"closed:{self.clients}"


@dataclass(frozen=True)
class Poisson:
    """Requests that know nothing of each other: exponential gaps of mean 1 / rate.

    Source: `bench_serving` of SGLang, `--request-rate`.
    """

    rate_per_s: float
    seed: int = 0

    def times_s(self) -> Iterator[float]:
        """Yield the times since the start at which requests come; the first comes at once."""
        gaps = random.Random(self.seed)
        return itertools.accumulate(
            (gaps.expovariate(self.rate_per_s) for _ in itertools.count()), initial=0.0
        )

    def __str__(self) -> str:
        return f"poisson:{self.rate_per_s:g}"


Arrival = ClosedLoop | Poisson


def parse_arrival(text: str, seed: int) -> Arrival:
    """Read `closed:16` or `poisson:2.5`.

    Raises:
        ValueError: It is neither.
    """
    kind, _, number = text.partition(":")
    if kind == "closed" and number.isdecimal() and int(number) > 0:
        return ClosedLoop(int(number))
    if kind == "poisson" and float(number) > 0:
        return Poisson(float(number), seed)
    raise ValueError(f"{text!r} is neither closed:CLIENTS nor poisson:REQUESTS_PER_S")
