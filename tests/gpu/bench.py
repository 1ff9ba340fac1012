"""The stages that time kernels and steps on a GPU: `python -m tests.gpu.bench NAME`.

Each prints JSON: what was reached of a rate that was measured beside it, and the aim.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from tests.gpu.costs import AIMS, GpuRates, decode_cost
from tests.gpu.models import greedy_requests, open_sized, runner_of
from tests.gpu.timing import COPY_BYTES, PRODUCT_SIDE, Stopwatch, idle_share
from tests.kernels.dry_run import PAGE_TOKENS
from tests.kernels.published import MODELS
from tests.models.model_loop import ModelLoop

from antiphon.kernels.attention import AttentionMetadata, KvShape
from antiphon.kernels.experts import ExpertWeights, PlainMatrix
from antiphon.kernels.kv import row_pages_shape
from antiphon.kernels.linear_fp8 import E4M3, Fp8Matrix
from antiphon.kernels.op import DeviceCapability
from antiphon.kernels.ops import Ops, select
from antiphon.kernels.upload import upload_to

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray
    from tests.kernels.published import Sizes
    from torch import Tensor

    from antiphon.model_worker.batching.mailbox import Mail
    from antiphon.model_worker.runner.opening import OpenModel

DEVICE = "cuda"
KIND = torch.bfloat16
LLAMA, QWEN = MODELS["Llama-3.1-8B"], MODELS["Qwen3-30B-A3B"]
IDLE_MAX = 0.03
HOST_MS_MAX = 0.5
"""Of a step, and hidden: while the GPU computes the one before."""
PROFILED = range(20, 50)
"""Which decode steps in a row are profiled."""
PROMPTS = 9
"""Of each length, whose median counts."""
Facts = dict[str, Any]


class GpuBench:
    """What the stages share: a device with its kernels, a stopwatch, and rates beside which.

    On `interpreter`, the kernels compute on CPU tensors, and times say nothing.
    """

    def __init__(
        self, kind: str = DEVICE, *, copy_bytes: int = COPY_BYTES, side: int = PRODUCT_SIDE
    ) -> None:
        self.device = torch.device("cuda" if kind == "cuda" else "cpu")
        sm = None
        if kind == "cuda":
            major, minor = torch.cuda.get_device_capability(self.device)
            sm = 10 * major + minor
        self.ops: Ops = select(DeviceCapability(kind, KIND, sm))
        self.upload: Callable[[NDArray[Any]], Tensor] = upload_to(kind, self.device)
        self.watch = Stopwatch(self.device)
        self._side = side
        self.copy_rate = self.watch.copy_rate(copy_bytes)

    def product_rate(self) -> float:
        return self.watch.product_rate(self._side)

    def randn(self, *size: int, dtype: torch.dtype = KIND) -> Tensor:
        return torch.randn(size, dtype=dtype, device=self.device)

    def rates(self, cases: Mapping[str, tuple[int, Callable[[], object]]]) -> Facts:
        """Of calls that read and write so many bytes: the share of a copy's rate."""
        found: Facts = {}
        for name, (size_bytes, call) in cases.items():
            seconds = self.watch.seconds(call)
            found[name] = _rounded(
                microseconds=seconds * 1e6,
                gb_s=size_bytes / seconds / 1e9,
                share=size_bytes / seconds / self.copy_rate,
            )
        return found


def memory(
    bench: GpuBench | None = None,
    sizes: Sizes = LLAMA,
    *,
    tokens: int = 8192,
    rows: int = 64,
    keys: int = 4096,
) -> Facts:
    """Norms, activations, rotary and store, copies of pages, and decode attention."""
    bench = bench or GpuBench()
    ops, (queries, kv_heads, size) = bench.ops, sizes.heads
    x, y, weight = (bench.randn(*each, sizes.hidden) for each in ((tokens,), (tokens,), ()))
    both = bench.randn(tokens, 2 * sizes.width)
    logits = bench.randn(min(tokens, 256), sizes.vocabulary, dtype=torch.float32)
    pages_each = -(-keys // PAGE_TOKENS)
    pages = max(rows * pages_each, -(-tokens // PAGE_TOKENS))
    shape = row_pages_shape(pages, PAGE_TOKENS, kv_heads, size)
    cache = [bench.randn(*shape) for _ in range(2)]
    random = np.random.default_rng(0)
    table = random.permutation(rows * pages_each).astype(np.int32).reshape(rows, pages_each)
    lengths = np.full(rows, keys, np.int32)
    decoded = AttentionMetadata(
        KvShape(PAGE_TOKENS, kv_heads, queries // kv_heads, size, KIND),
        table,
        np.ones(rows, np.int32),
        lengths,
        bench.upload,
    )
    q = bench.randn(rows, queries, size)
    heads = bench.randn(tokens, queries + 2 * kv_heads, size)
    turns = bench.randn(tokens, 1, size)
    slots = bench.upload(random.permutation(pages * PAGE_TOKENS)[:tokens].astype(np.int64))
    pool = cache[0].view(torch.uint8).view(1, pages, -1)
    numbers = bench.upload(np.arange(min(64, pages), dtype=np.int32))
    read_bytes = rows * keys * kv_heads * size * 2 * KIND.itemsize + 2 * q.nbytes
    store = partial(ops.qk_norm_rope_store, heads, turns, turns, *cache, slots, None)
    attend = partial(ops.paged_attention, q, *cache, decoded, size**-0.5)
    cases: dict[str, tuple[int, Callable[[], object]]] = {
        "norm.rmsnorm": (2 * x.nbytes, lambda: ops.rmsnorm(x, weight, 1e-5)),
        "norm.add_rmsnorm": (4 * x.nbytes, lambda: ops.add_rmsnorm(x, y, weight, 1e-5)),
        "activation.silu_mul": (both.nbytes * 3 // 2, lambda: ops.silu_mul(both)),
        "attention.heads": (2 * heads.nbytes + 2 * turns.nbytes, store),
        "rows.finite": (logits.nbytes, lambda: ops.finite_rows(logits)),
        "pages.gather": (
            2 * len(numbers) * pool.shape[2],
            lambda: ops.gather_pages(pool, numbers),
        ),
        f"attention.paged, {rows} rows of {keys}": (read_bytes, attend),
    }
    return {
        "copy_gb_s": round(bench.copy_rate / 1e9, 1),
        "aim": AIMS["memory"],
        **bench.rates(cases),
    }


def matmul(
    bench: GpuBench | None = None,
    dense: Sizes = LLAMA,
    sparse: Sizes = QWEN,
    counts: tuple[int, ...] = (64, 4096),
) -> Facts:
    """Experts with evenly and unevenly chosen ones, and linears in fp8.

    What is attainable is the slower of the products, at torch's rate in bfloat16 or twice that in
    fp8, and of the bytes of weights and activations at the rate of a copy.
    """
    bench = bench or GpuBench()
    product_rate, found = bench.product_rate(), dict[str, Any]()

    def measured(name: str, operations: float, size_bytes: int, call: Callable[[], object]) -> None:
        rate = product_rate * (2 if name.startswith("linear.fp8") else 1)
        attainable = max(operations / rate, size_bytes / bench.copy_rate)
        seconds = bench.watch.seconds(call)
        found[name] = _rounded(
            microseconds=seconds * 1e6,
            tflop_s=operations / seconds / 1e12,
            share=attainable / seconds,
        )

    for tokens in counts:
        for outputs, inputs in ((2 * dense.width, dense.hidden), (dense.hidden, dense.width)):
            codes = bench.randn(outputs, inputs).to(E4M3)
            scales = torch.ones((1, outputs), device=bench.device)
            x, matrix = bench.randn(tokens, inputs), Fp8Matrix(codes, scales, inputs)
            size_bytes = codes.nbytes + 3 * x.nbytes // 2 + tokens * outputs * KIND.itemsize
            measured(
                f"linear.fp8, {tokens} by {outputs} x {inputs}",
                2 * tokens * outputs * inputs,
                size_bytes,
                partial(bench.ops.linear_fp8, x, matrix),
            )
        assert sparse.experts is not None, "a model with experts"
        count, top_k = sparse.experts
        gate_up = bench.randn(count, 2 * sparse.width, sparse.hidden) / sparse.hidden**0.5
        down = bench.randn(count, sparse.hidden, sparse.width) / sparse.width**0.5
        weights = ExpertWeights(PlainMatrix(gate_up), PlainMatrix(down))
        x = bench.randn(tokens, sparse.hidden)
        for name, likely in (
            ("uniform", torch.ones(count)),
            ("Zipf", 1 / torch.arange(1, count + 1)),
        ):
            generator = torch.Generator().manual_seed(0)
            chosen = torch.multinomial(likely.expand(tokens, count), top_k, generator=generator)
            used = len(chosen.unique())
            expert_bytes = (gate_up[0].nbytes + down[0].nbytes) * used
            shares = torch.full((tokens, top_k), 1 / top_k, device=bench.device)
            measured(
                f"moe.experts, {tokens} tokens, {name}",
                6 * tokens * top_k * sparse.hidden * sparse.width,
                expert_bytes + 2 * x.nbytes,
                partial(bench.ops.experts, x, chosen.to(bench.device), shares, weights, "silu"),
            )
    return {"torch_tflop_s": round(product_rate / 1e12, 1), "aim": AIMS["matmul"], **found}


def sampling(bench: GpuBench | None = None, rows: int = 256, vocabulary: int = 128_000) -> Facts:
    """Draws with and without filters, in reads of all logits at the rate of a copy."""
    bench = bench or GpuBench()
    logits = bench.randn(rows, vocabulary, dtype=torch.float32) * 3
    read_s = logits.nbytes / bench.copy_rate
    column = partial(torch.full, (rows,), device=bench.device)
    uniform, heat, least = column(0.5, dtype=torch.float64), column(1.0), column(0.0)
    found: Facts = {}
    for name, top_k, top_p in (("all tokens", 0, 1.0), ("top-p 0.9", 0, 0.9), ("top-k 50", 50, 1)):
        k, p = column(top_k, dtype=torch.int64), column(float(top_p))
        seconds = bench.watch.seconds(partial(bench.ops.sample, logits, uniform, heat, k, p, least))
        found[name] = _rounded(microseconds=seconds * 1e6, reads=seconds / read_s)
    return {"aim": AIMS["reads"], **found}


class TimedLoop(ModelLoop):
    """Times turns in which all of so many rows are decoded, one after the other.

    With a profiler, some of these are profiled instead. What the host works in a turn is the time
    of its thread, which sleeps while it waits for the device.
    """

    def __init__(self, model: OpenModel, rows: int, **limits: Any) -> None:
        super().__init__(model, overlap=True, running_max=rows, **limits)
        self.steps_s: list[float] = []
        self.hosts_s: list[float] = []
        self.profiler: torch.profiler.profile | None = None
        self._rows, self._turns, self._ended_s = rows, 0, 0.0

    def _turn(self, mail: Mail) -> None:
        worked_s = time.thread_time()
        super()._turn(mail)
        worked_s = time.thread_time() - worked_s
        ended_s, report = time.perf_counter(), self.reports[-1]
        self._turns = self._turns + 1 if report.rows == report.tokens == self._rows else 0
        if self.profiler is not None:
            if self._turns == PROFILED.start:
                self.profiler.start()
            if self._turns == PROFILED.stop:
                torch.cuda.synchronize()
                self.profiler.stop()
        elif self._turns > 1:
            self.steps_s.append(ended_s - self._ended_s)
            self.hosts_s.append(worked_s)
        self._ended_s = ended_s


def decode(
    bench: GpuBench | None = None,
    sizes: Sizes = LLAMA,
    *,
    layers: int = 32,
    batches: tuple[int, ...] = (1, 256),
    prompt_tokens: int = 512,
    new_tokens: int = 96,
) -> Facts:
    """Steps of a whole model with random weights, by graphs, from the batching loop.

    The roofline is that of `decode_cost`, at the rates of a copy and of a product of torch. Idle is
    the share of some steps in which the GPU computes nothing: hidden behind its steps, what the
    host works in one costs nothing.
    """
    bench = bench or GpuBench()
    device = "cuda" if bench.device.type == "cuda" else "interpreter"
    rates, found = GpuRates(bench.copy_rate, bench.product_rate()), dict[str, Any]()
    context = prompt_tokens + new_tokens
    for rows in batches:
        model = open_sized(sizes, layers, device, rows=rows, tokens=context)
        runner_of(model).capture((rows,))
        step_tokens = min(8192, rows * prompt_tokens)
        loop = TimedLoop(
            model,
            rows,
            step_tokens_max=step_tokens,
            chunk_tokens=step_tokens,
            context_tokens=context,
        )
        run = partial(_generate, loop, sizes.vocabulary, rows, prompt_tokens, new_tokens)
        run()
        step_s = float(np.median(loop.steps_s))
        keys = context - new_tokens // 4
        floor_s = decode_cost(sizes, layers, rows, keys).seconds(rates)
        found[f"batch {rows}"] = _rounded(
            step_ms=step_s * 1e3,
            tokens_s=rows / step_s,
            share=floor_s / step_s,
            aim=AIMS.get(f"batch {rows}", 0.0),
            host_ms=float(np.median(loop.hosts_s)) * 1e3,
            host_ms_aim=HOST_MS_MAX,
            idle=_idle(loop, run) if device == "cuda" else 1.0,
            idle_aim=IDLE_MAX,
        )
        del model, loop, run
    return found


def prefill(
    bench: GpuBench | None = None,
    sizes: Sizes = LLAMA,
    *,
    layers: int = 32,
    lengths: tuple[int, ...] = (128, 512, 2048),
) -> Facts:
    """A prompt of so many tokens that generates one, launched kernel by kernel and in pieces."""
    bench, most = bench or GpuBench(), max(lengths)
    device = "cuda" if bench.device.type == "cuda" else "interpreter"
    model = open_sized(sizes, layers, device, rows=1, tokens=most + 1)
    loop = ModelLoop(
        model,
        overlap=True,
        running_max=1,
        step_tokens_max=most,
        chunk_tokens=most,
        context_tokens=most + 1,
    )
    found: Facts = {}
    for way in ("kernel by kernel", "in pieces"):
        if way == "in pieces":
            _, seconds, size_bytes = runner_of(model).capture_prefills(lengths)
            found["capture"] = _rounded(seconds=seconds, mib=size_bytes / 2**20)
        for tokens in lengths:
            taken_s: list[float] = []
            for _ in range(PROMPTS):
                began_s = time.perf_counter()
                _generate(loop, sizes.vocabulary, 1, tokens, 1)
                taken_s.append(time.perf_counter() - began_s)
            milliseconds = float(np.median(taken_s)) * 1e3
            found[f"{tokens} tokens, {way}"] = _rounded(milliseconds=milliseconds)
    return found


def _generate(
    loop: ModelLoop, vocabulary: int, rows: int, prompt_tokens: int, new_tokens: int
) -> None:
    loop.run(greedy_requests(vocabulary, rows, prompt_tokens, new_tokens))


def _idle(loop: TimedLoop, run: Callable[[], object]) -> float:
    activities = [torch.profiler.ProfilerActivity.CUDA]
    loop.profiler = profiler = torch.profiler.profile(activities=activities)
    run()
    intervals = [
        (each.time_range.start, each.time_range.end)
        for each in profiler.events() or ()
        if each.device_type.name == "CUDA"
    ]
    assert intervals, "the profiler has seen no kernel"
    begin, end = min(start for start, _ in intervals), max(stop for _, stop in intervals)
    return idle_share(intervals, begin, end)


def _rounded(**figures: float) -> Facts:
    return {name: float(f"{value:.4g}") for name, value in figures.items()}


STAGES: dict[str, Callable[[], Facts]] = {
    "memory": memory,
    "matmul": matmul,
    "sampling": sampling,
    "decode": decode,
    "prefill": prefill,
}


def main() -> None:
    print(msgspec.json.encode(STAGES[sys.argv[1]]()).decode())


if __name__ == "__main__":
    main()
