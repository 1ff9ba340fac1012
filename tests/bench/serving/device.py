"""What the machine can do at most, measured beside every result: reading memory, multiplying.

Decode reads every weight once a step, so tokens/s at batch 1 cannot exceed read rate / bytes of
the weights; prefill cannot exceed the rate of the matrix product. Both drift from run to run on a
shared machine, hence a limit is only worth something beside the figure it limits.

    python -m tests.bench.serving.device
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

SWEEP_BYTES = 1 << 30
SWEEPS = 8
PRODUCTS = 20
ROWS, WIDTH = 512, 2048
"""A chunk of a prompt through a layer of a middling model."""


class Device(msgspec.Struct, frozen=True):
    """Best of several tries, with as many threads as there are cores.

    Attributes:
        read_gb_s: Sum over a gigabyte that no cache holds.
        product_gflop_s: bf16 matrix product, (512, 2048) by (2048, 2048).
    """

    read_gb_s: float
    product_gflop_s: float


def measure_device() -> Device:
    """Measure in a process of its own, so that the load generator stays free of torch."""
    done = subprocess.run([sys.executable, "-m", __name__], capture_output=True, check=True)
    return msgspec.json.decode(done.stdout, type=Device)


def main() -> None:
    """Measure and print JSON."""
    import torch  # noqa: PLC0415 the parent process imports this file for the struct alone

    torch.set_num_threads(os.cpu_count() or 1)
    numbers = torch.ones(SWEEP_BYTES // 8, dtype=torch.int64)
    read_s = _best_s(SWEEPS, numbers.sum)
    rows = torch.randn(ROWS, WIDTH).bfloat16()
    weight = torch.randn(WIDTH, WIDTH).bfloat16()
    product_s = _best_s(PRODUCTS, lambda: torch.nn.functional.linear(rows, weight))
    device = Device(
        round(SWEEP_BYTES / read_s / 1e9, 1), round(2 * ROWS * WIDTH**2 / product_s / 1e9, 1)
    )
    print(msgspec.json.encode(device).decode())


def _best_s(tries: int, work: Callable[[], object]) -> float:
    def once() -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    once()
    return min(once() for _ in range(tries))


if __name__ == "__main__":
    main()
