"""The cases of the comparison: each a load, the figures computed from it, and their limits.

A step reads all weights once and the keys and values of every request, and multiplies every token
with every weight and every key and value that it attends to: it takes as long as the longer of the
two, by the machine's measured rates. Exponentials, sampling and HTTP are left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.bench.models import (
    EXPERTS,
    HYBRID,
    LATENT,
    LLAMA_135M,
    LLAMA_135M_CROWD,
    LLAMA_135M_LONG,
    QWEN_05B,
    SMOLLM2,
    SMOLLM2_Q4,
    SMOLLM2_Q8,
    Shape,
)
from tests.bench.serving.load import RandomLengths, SharedPrefix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tests.bench.machine import Device
    from tests.bench.serving.metrics import Metrics


def prefill_s(shape: Shape, device: Device, tokens: int, cached: int = 0) -> float:
    """Time that the products of a prompt's tokens take, which follow so many cached ones.

    Only the last one meets the vocabulary.
    """
    keys = tokens * (cached + (tokens + 1) / 2)
    return _products_s(shape, device, tokens, 1, keys)


def step_s(
    shape: Shape,
    device: Device,
    rows: int,
    context_tokens: float,
    weight_bytes: float | None = None,
) -> float:
    """Time of one decode step of so many requests with so many tokens behind each."""
    each = shape.weight_bytes if weight_bytes is None else weight_bytes
    keys = rows * context_tokens
    read = each * shape.read_count(rows) + keys * shape.kv_bytes
    return max(read / (device.read_gb_s * 1e9), _products_s(shape, device, rows, rows, keys))


def _products_s(shape: Shape, device: Device, tokens: int, logits: int, keys: float) -> float:
    """Time of tokens in layers, of logits, and of queries that meet so many keys and values."""
    layers = tokens * (shape.weights_count - shape.head_count)
    products = layers + logits * shape.head_count + keys * shape.key_count
    return 2 * products / (device.product_gflop_s * 1e9)


def output_limit(
    shape: Shape,
    device: Device,
    *,
    rows: int,
    new_tokens: int,
    prompt_tokens: int,
    output: int,
    weight_bytes: float | None = None,
) -> float:
    """Return the output tok/s of so many clients, all of them always busy.

    `new_tokens` are the prompt tokens that no cache holds, `weight_bytes` those read of a
    weight, where they are not the shape's.
    """
    behind = prompt_tokens + output / 2
    first_s = rows * prefill_s(shape, device, new_tokens, prompt_tokens - new_tokens)
    decode_s = (output - 1) * step_s(shape, device, rows, behind, weight_bytes)
    return rows * output / (first_s + decode_s)


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


def _decode(
    shape: Shape,
    clients: int,
    requests: int,
    must: float,
    aim: float,
    *,
    prompt: int = 128,
    output: int = 128,
) -> Case:
    load = {"rows": clients, "new_tokens": prompt, "prompt_tokens": prompt, "output": output}
    return Case(
        f"{shape.name}-{clients}",
        f"{shape.name}, {prompt:,} in / {output} out, concurrency {clients}",
        shape,
        RandomLengths(prompt, output),
        clients,
        requests,
        (_output(shape, must, aim, **load),),
    )


def _prefill(name: str, shape: Shape, tokens: int, requests: int, must: float, aim: float) -> Case:
    return Case(
        name,
        f"{shape.name}, prefill of {tokens:,} tokens, one at a time",
        shape,
        RandomLengths(tokens, 1),
        1,
        requests,
        (
            Figure(
                "prefill",
                "tok/s",
                lambda metrics: tokens * 1000 / metrics.e2e_ms.p50,
                lambda device: tokens / prefill_s(shape, device, tokens),
                must=must,
                aim=aim,
            ),
        ),
    )


def _token_ms(shape: Shape, prompt: int, must: float, aim: float) -> Case:
    """Time a token behind a long prompt, which a request is sent for without its first token."""
    return Case(
        f"decode-{prompt}",
        f"{shape.name}, {prompt:,} in / 64 out, one client",
        shape,
        RandomLengths(prompt, 64),
        1,
        3,
        (
            Figure(
                "time per output token",
                "ms",
                lambda metrics: metrics.tpot_ms.p50,
                lambda device: 1000 * step_s(shape, device, 1, prompt + 32),
                higher_wins=False,
                must=must,
                aim=aim,
            ),
        ),
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
    return 1000 * 16 * prefill_s(LLAMA_135M, device, 128)


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
CASES = (
    _decode(LLAMA_135M, 1, 4, 1.0, 1.2),
    _decode(LLAMA_135M, 16, 48, 1.1, 1.5),
    _decode(LLAMA_135M, 64, 128, 1.1, 1.5),
    *(_SHARED_PREFIX, _BURST),
    _prefill("prefill", LLAMA_135M, 1024, 5, 0.95, 1.05),
    _decode(QWEN_05B, 1, 2, 1.0, 1.2),
    _decode(QWEN_05B, 16, 32, 1.1, 1.5),
    _decode(SMOLLM2, 1, 4, 1.0, 1.2),
    _decode(SMOLLM2, 16, 48, 1.1, 1.5),
    _decode(SMOLLM2_Q4, 1, 4, 1.0, 1.2),
    _decode(SMOLLM2_Q4, 16, 48, 1.1, 1.5),
    _prefill("prefill-q4_1", SMOLLM2_Q4, 256, 8, 0.95, 1.05),
    _decode(SMOLLM2_Q8, 1, 4, 1.0, 1.2),
    _prefill("prefill-4000", LLAMA_135M_LONG, 4000, 3, 1.15, 1.4),
    _prefill("prefill-7000", LLAMA_135M_LONG, 7000, 2, 1.15, 1.4),
    _token_ms(LLAMA_135M_LONG, 7000, 0.74, 0.67),
    _decode(LLAMA_135M_LONG, 4, 8, 1.2, 1.4, prompt=3000, output=64),
    _decode(LLAMA_135M_CROWD, 200, 400, 1.3, 1.5, prompt=64, output=48),
    _decode(EXPERTS, 1, 4, 1.2, 1.5),
    _decode(EXPERTS, 16, 48, 1.2, 1.5),
    _prefill("experts-prefill", EXPERTS, 1000, 5, 1.1, 1.4),
    _decode(LATENT, 1, 4, 1.0, 1.2),
    _decode(LATENT, 16, 48, 1.1, 1.5),
    _decode(HYBRID, 1, 4, 1.0, 1.2),
    _decode(HYBRID, 16, 48, 1.1, 1.5),
)
