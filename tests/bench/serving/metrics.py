"""Numbers over timelines, with the definitions of SGLang's `bench_serving`.

    TTFT        from sending to the first text
    E2E         from sending to the end of the stream
    TPOT        (E2E - TTFT) / (output tokens - 1), for answers of more than one token
    ITL         between two pieces of text; a piece of n tokens counts as n gaps of an n-th each
    concurrency the sum of all E2E over the duration: how many were open on average
    goodput     requests a second that kept every promise of the SLO

The duration is from the first request sent to the end of the last. Failed requests count as failed
and nowhere else.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tests.bench.serving.client import Timeline


class Spread(msgspec.Struct, frozen=True):
    """A distribution. All zero where there is nothing to distribute."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0
    std: float = 0.0


class Slo(msgspec.Struct, frozen=True):
    """What a request must keep to be good; unset is not promised."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def promises(self) -> list[tuple[str, float]]:
        named = (("TTFT", self.ttft_ms), ("TPOT", self.tpot_ms), ("E2E", self.e2e_ms))
        return [(name, most) for name, most in named if most is not None]

    def kept(self, timeline: Timeline) -> bool:
        took = {"TTFT": ttft_ms(timeline), "TPOT": tpot_ms(timeline), "E2E": e2e_ms(timeline)}
        return all((took[name] or 0.0) <= most for name, most in self.promises())


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """One run in numbers.

    Attributes:
        late_ms_max: How much later than due the load generator sent: large means do not believe it.
        cached_tokens: Prompt tokens from the cache, as the server reports; None if it does not.
        goodput: Requests a second that kept the SLO; None without one.
        total_tokens_per_s: Of prompts and outputs together; None in results that are older.
    """

    requests: int
    failed: int
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    concurrency: float
    goodput: float | None
    ttft_ms: Spread
    tpot_ms: Spread
    itl_ms: Spread
    e2e_ms: Spread
    late_ms_max: float
    total_tokens_per_s: float | None = None


def measure(
    timelines: Sequence[Timeline], tokens: Callable[[str], int], slo: Slo | None = None
) -> Metrics:
    """Reduce a run; `tokens` counts those of a piece of text, for ITL."""
    good = [timeline for timeline in timelines if timeline.error is None]
    duration_s = _duration_s(good)
    prompt = sum(timeline.prompt_tokens for timeline in good)
    output = sum(timeline.output_tokens for timeline in good)
    return Metrics(
        requests=len(timelines),
        failed=len(timelines) - len(good),
        duration_s=duration_s,
        prompt_tokens=prompt,
        output_tokens=output,
        cached_tokens=_cached(good),
        requests_per_s=_rate(len(good), duration_s),
        prompt_tokens_per_s=_rate(prompt, duration_s),
        output_tokens_per_s=_rate(output, duration_s),
        total_tokens_per_s=_rate(prompt + output, duration_s),
        concurrency=_rate(sum(map(e2e_ms, good)) / 1000, duration_s),
        goodput=_rate(sum(map(slo.kept, good)), duration_s) if slo else None,
        ttft_ms=spread(map(ttft_ms, good)),
        tpot_ms=spread(each for each in map(tpot_ms, good) if each is not None),
        itl_ms=spread(gap for timeline in good for gap in itl_ms(timeline, tokens)),
        e2e_ms=spread(map(e2e_ms, good)),
        late_ms_max=max((1000 * (each.sent_s - each.due_s) for each in good), default=0.0),
    )


def ttft_ms(timeline: Timeline) -> float:
    """Time to the first text; to the end, where an answer has none."""
    first = timeline.pieces[0].at_s if timeline.pieces else timeline.ended_s
    return 1000 * (first - timeline.sent_s)


def e2e_ms(timeline: Timeline) -> float:
    return 1000 * (timeline.ended_s - timeline.sent_s)


def tpot_ms(timeline: Timeline) -> float | None:
    """Time a token after the first; None for answers of one token."""
    if timeline.output_tokens <= 1:
        return None
    return (e2e_ms(timeline) - ttft_ms(timeline)) / (timeline.output_tokens - 1)


def itl_ms(timeline: Timeline, tokens: Callable[[str], int]) -> Iterator[float]:
    """Yield the gap before each token after the first piece."""
    for before, piece in pairwise(timeline.pieces):
        count = max(1, tokens(piece.text))
        for _ in range(count):
            yield 1000 * (piece.at_s - before.at_s) / count


def spread(values: Iterable[float]) -> Spread:
    """Sum up a distribution; percentiles are interpolated linearly."""
    array = np.fromiter(values, float)
    if not array.size:
        return Spread()
    p50, p90, p95, p99 = (float(each) for each in np.percentile(array, (50, 90, 95, 99)))
    return Spread(float(array.mean()), p50, p90, p95, p99, float(array.max()), float(array.std()))


def _duration_s(good: Sequence[Timeline]) -> float:
    if not good:
        return 0.0
    return max(each.ended_s for each in good) - min(each.sent_s for each in good)


def _cached(good: Sequence[Timeline]) -> int | None:
    said = [each.cached_tokens for each in good if each.cached_tokens is not None]
    return sum(said) if said else None


def _rate(amount: float, duration_s: float) -> float:
    return amount / duration_s if duration_s else 0.0
