"""The cases of the comparison: each a load, the figures computed from it, and their limits.

A step reads all weights once and the keys and values of every request, and multiplies every token
with every weight: it takes as long as the longer of the two, by the machine's measured rates.
Attention's own products, which no case makes large, are left out; so are sampling and HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.bench.models import LLAMA_135M, QWEN_05B, SMOLLM2, Shape
from tests.bench.serving.load import RandomLengths, SharedPrefix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tests.bench.machine import Device
    from tests.bench.serving.metrics import Metrics

BF16_BYTES = 2


def prefill_s(shape: Shape, device: Device, tokens: int) -> float:
    """Time that the products of so many prompt tokens take."""
    return 2 * shape.weights_count * tokens / (device.product_gflop_s * 1e9)


def step_s(
    shape: Shape,
    device: Device,
    rows: int,
    context_tokens: float,
    weight_bytes: int = BF16_BYTES,
) -> float:
    """Time of one decode step of so many requests with so many tokens behind each."""
    read = weight_bytes * shape.weights_count + rows * context_tokens * shape.kv_bytes
    return max(read / (device.read_gb_s * 1e9), prefill_s(shape, device, rows))


def output_limit(
    shape: Shape,
    device: Device,
    *,
    rows: int,
    new_tokens: int,
    prompt_tokens: int,
    output: int,
    weight_bytes: int = BF16_BYTES,
) -> float:
    """Return the output tok/s of so many clients, all of them always busy.

    `new_tokens` are the prompt tokens that no cache holds, `weight_bytes` those read of a weight.
    """
    behind = prompt_tokens + output / 2
    decode_s = (output - 1) * step_s(shape, device, rows, behind, weight_bytes)
    return rows * output / (prefill_s(shape, device, rows * new_tokens) + decode_s)


@dataclass(frozen=True)
class Figure:
    """One number of a case, and what the device allows.

    `must` and `aim` are the required and the targeted ratio of ours to the best peer's.
    """

    name: str
    unit: str
    of: Callable[[Metrics], float]
    limit: Callable[[Device], float]
    higher_wins: bool = True
    must: float | None = None
    aim: float | None = None

    @property
    def title(self) -> str:
        return f"{self.name}, {self.unit}"

    def times_behind(self, run: Metrics, others: Iterable[Metrics]) -> float:
        """How many times worse a run is than the best of others: 1 if it is that one."""
        mine, theirs = self.of(run), [self.of(each) for each in others]
        return max(theirs) / mine if self.higher_wins else mine / min(theirs)


@dataclass(frozen=True)
class Case:
    """One load on a server that was warmed up with other prompts."""

    name: str
    title: str
    shape: Shape
    dataset: RandomLengths | SharedPrefix
    clients: int
    requests: int
    figures: tuple[Figure, ...]


def _output(shape: Shape, must: float, aim: float, **load: int) -> Figure:
    """Output rate, limited as `output_limit` says of such a load."""
    return Figure(
        "output",
        "tok/s",
        lambda metrics: metrics.output_tokens_per_s,
        lambda device: output_limit(shape, device, **load),
        must=must,
        aim=aim,
    )


def _decode(shape: Shape, clients: int, requests: int, must: float, aim: float) -> Case:
    load = {"rows": clients, "new_tokens": 128, "prompt_tokens": 128, "output": 128}
    return Case(
        f"{shape.name}-{clients}",
        f"{shape.name}, 128 in / 128 out, concurrency {clients}",
        shape,
        RandomLengths(128, 128),
        clients,
        requests,
        (_output(shape, must, aim, **load),),
    )


_SHARED_PREFIX = Case(
    "shared-prefix",
    f"{LLAMA_135M.name}, 800 in (768 shared) / 32 out, 8 clients",
    LLAMA_135M,
    SharedPrefix(768, 32, 32),
    8,
    48,
    (_output(LLAMA_135M, 1.1, 1.5, rows=8, new_tokens=32, prompt_tokens=800, output=32),),
)


def _last_ms(device: Device) -> float:
    """Time of the last of 16 prompts that are computed one after the other."""
    return 1000 * prefill_s(LLAMA_135M, device, 16 * 128)


def _middle_ms(device: Device) -> float:
    return _last_ms(device) / 2


_BURST = Case(
    "ttft",
    f"{LLAMA_135M.name}, 16 at once, 128 in",
    LLAMA_135M,
    RandomLengths(128, 8),
    16,
    16,
    (
        Figure("TTFT p50", "ms", lambda m: m.ttft_ms.p50, _middle_ms, False, 0.7, 0.55),
        Figure("TTFT max", "ms", lambda m: m.ttft_ms.max, _last_ms, False, 1.05),
    ),
)
"""It has 8 output tokens, so that no first token waits for another request's last one."""
_PREFILL = Case(
    "prefill",
    f"{LLAMA_135M.name}, prefill of 1,024 tokens, one at a time",
    LLAMA_135M,
    RandomLengths(1024, 1),
    1,
    5,
    (
        Figure(
            "prefill",
            "tok/s",
            lambda metrics: 1024 * 1000 / metrics.e2e_ms.p50,
            lambda device: 1024 / prefill_s(LLAMA_135M, device, 1024),
            must=0.95,
            aim=1.05,
        ),
    ),
)
CASES = (
    _decode(LLAMA_135M, 1, 4, 1.0, 1.2),
    _decode(LLAMA_135M, 16, 48, 1.1, 1.5),
    _decode(LLAMA_135M, 64, 128, 1.1, 1.5),
    *(_SHARED_PREFIX, _BURST, _PREFILL),
    _decode(QWEN_05B, 1, 2, 1.0, 1.2),
    _decode(QWEN_05B, 16, 32, 1.1, 1.5),
    _decode(SMOLLM2, 1, 4, 1.0, 1.2),
    _decode(SMOLLM2, 16, 48, 1.1, 1.5),
)
