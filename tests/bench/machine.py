"""The machine that a result was taken on, and what it can do at most.

Decode reads every weight once a step, so tokens/s at batch 1 cannot exceed read rate / bytes of
the weights; prefill cannot exceed the rate of the matrix product. Both drift from run to run on a
shared machine, hence a limit is only worth something beside the figure it limits.

    python -m tests.bench.machine          prints both rates
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

INSTRUCTIONS = (
    ("amx", "amx_bf16"),
    ("avx512bf16", "avx512_bf16"),
    ("avx512", "avx512f"),
    ("avx2", "avx2"),
)
"""Instruction sets of the kernels, the best one first, with the CPU flag that each needs."""
SWEEP_BYTES = 1 << 30
SWEEPS = 8
PRODUCTS = 20
ROWS, WIDTH = 512, 2048
"""A prefill chunk through a layer of a middling model."""


class Machine(msgspec.Struct, frozen=True):
    """Machine and commit of a result; `-dirty` marks uncommitted changes."""

    commit: str
    cpu: str
    cores: int
    load: float


class Device(msgspec.Struct, frozen=True):
    """Best of several tries, with as many threads as there are cores.

    Attributes:
        read_gb_s: Sum over a gigabyte that no cache holds.
        product_gflop_s: bf16 matrix product, (512, 2048) by (2048, 2048).
    """

    read_gb_s: float
    product_gflop_s: float


def machine() -> Machine:
    commit = subprocess.run(
        ["git", "--no-optional-locks", "describe", "--always", "--dirty"],
        capture_output=True,
        check=False,
        text=True,
        cwd=Path(__file__).parent,
    ).stdout.strip()
    cpu = _cpuinfo("model name") or platform.processor()
    return Machine(commit, cpu, os.cpu_count() or 0, round(os.getloadavg()[0], 2))


def instructions() -> str:
    """Return the instruction set that the kernels choose here, without loading them."""
    flags = _cpuinfo("flags").split()
    return next((name for name, flag in INSTRUCTIONS if flag in flags), platform.machine())


def measure_device() -> Device:
    """Measure in a process of its own, so that the load generator stays free of torch."""
    done = subprocess.run([sys.executable, "-m", __name__], capture_output=True, check=True)
    return msgspec.json.decode(done.stdout, type=Device)


def _cpuinfo(field: str) -> str:
    """Return a field of the first processor in /proc/cpuinfo; empty if it is missing."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return ""


def main() -> None:
    import torch  # noqa: PLC0415 the parent process imports this file without torch

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
