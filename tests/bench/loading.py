"""Rate and memory of loading a model, against the disk's own rate and the size of the weights.

    python -m tests.bench.loading --json FILE

Each load runs in a process of its own, with its file not in the page cache, in turn with a
sequential read of the same file from the same disk. Memory is the growth of the process's resident
set at its peak (VmHWM, reset after all imports) over the size of the weights as stored. It includes
mapped pages of the file, which loading releases as it proceeds. CPU time stands beside wall time:
on a shared machine, only CPU time is reliable.

A virtual machine gets memory at the first touch, which takes longer than the disk. So a process
before each load touches as much memory and exits; the load reuses that memory.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import msgspec
from tests.bench.models import QWEN_05B, SHAPES, made
from tests.bench.summary import Measurement, Summary, arguments, here, measured, report

LINEARS = ("plain", "packed", "int8")
BLOCK_BYTES = 1 << 20
CACHED_MAX = 0.01
"""Maximum share of a file in the page cache when it is to be read from the disk."""


class Load(msgspec.Struct, frozen=True):
    """One load: from headers to the last weight in place.

    The CPU time is that of all threads; `peak_bytes` is the most growth of the process, and
    `kept_bytes` what is left of it in its own memory.
    """

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    kept_bytes: int
    weight_bytes: int

    @property
    def peak(self) -> float:
        return self.peak_bytes / self.weight_bytes


def forget(file: Path) -> None:
    """Drop a file from the page cache, and check that it is gone.

    Raises:
        RuntimeError: More than a hundredth is still there: another process has it mapped.
    """
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        if (share := _cached(descriptor)) > CACHED_MAX:
            raise RuntimeError(f"{file}: {share:.0%} of it stays in the kernel's cache")
    finally:
        os.close(descriptor)


def _cached(descriptor: int) -> float:
    """Return the share of a file in the page cache, by mincore: reading would fetch it."""
    size = os.fstat(descriptor).st_size
    with mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY) as mapped:
        start = ctypes.c_char.from_buffer(mapped)
        there = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        failed = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), there
        )
        del start  # or else the mapping cannot be closed
    assert not failed, "mincore failed on our own mapping"
    return sum(page & 1 for page in there) / len(there)


def read_seconds(file: Path) -> float:
    """Read a file from the disk, from its beginning to its end, and keep nothing."""
    forget(file)
    block = bytearray(BLOCK_BYTES)
    began = time.perf_counter()
    with file.open("rb", buffering=0) as stream:
        while stream.readinto(block):
            pass
    return time.perf_counter() - began


def touch(size: int) -> None:
    """Have the machine hand out so much memory, in huge pages, and give it back."""
    program = (
        "import mmap, sys\n"
        "memory = mmap.mmap(-1, int(sys.argv[1]), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
        "memory.madvise(mmap.MADV_HUGEPAGE)\n"
        "for page in range(0, len(memory), mmap.PAGESIZE): memory[page] = 1\n"
    )
    subprocess.run([sys.executable, "-c", program, str(size)], check=True)


def load_once(folder: Path, linear: str) -> Load:
    """Load in this process, which has loaded nothing but the smallest model, for its libraries."""
    import torch  # noqa: PLC0415 only the process that loads
    from tests.support.models import load  # noqa: PLC0415

    from antiphon import embedded  # noqa: PLC0415
    from antiphon.config.model import LinearFormat  # noqa: PLC0415
    from antiphon.model_card.card import read_card  # noqa: PLC0415
    from antiphon.resolve.device import detect_device  # noqa: PLC0415
    from antiphon.resolve.memory import weight_bytes  # noqa: PLC0415

    # As the worker's plan has it.
    cores = detect_device().cores
    torch.set_num_threads(max(1, cores - 1) if linear == "plain" else cores)
    load(embedded.path(), linear=linear)
    Path("/proc/self/clear_refs").write_text("5")
    before, own = _status("VmRSS"), _status("RssAnon")
    began, cpu = time.perf_counter(), time.process_time()
    model = load(folder, linear=linear)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    assert model.spec.layers
    card = read_card(folder)
    return Load(
        seconds,
        cpu_seconds,
        peak_bytes=_status("VmHWM") - before,
        kept_bytes=_status("RssAnon") - own,
        weight_bytes=weight_bytes(card, card.dtype, LinearFormat(linear)),
    )


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


def measure(model: str, rounds: int) -> tuple[Summary, dict[str, list[Load]]]:
    folder = made(SHAPES[model]).folder
    file = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    size = file.stat().st_size
    reads: list[float] = []
    loads: dict[str, list[Load]] = {linear: [] for linear in LINEARS}
    rates: dict[str, list[float]] = {linear: [] for linear in LINEARS}
    for _ in range(rounds):
        for linear in LINEARS:
            reads.append(read_seconds(file))
            touch(2 * size)
            forget(file)
            load = _in_a_process(folder, linear)
            loads[linear].append(load)
            rates[linear].append(reads[-1] / load.seconds)
            print(f"{linear}: read {reads[-1]:.2f} s, loaded {load.seconds:.2f} s", file=sys.stderr)
    setup = {
        "model": model,
        "file_bytes": sum(each.stat().st_size for each in folder.glob("*.safetensors")),
        "disk_megabytes_per_s": round(size / median(reads) / 1e6),
        "rounds": rounds,
    }
    rows: list[Measurement] = []
    for case, found in loads.items():
        rows += (
            measured("seconds", (load.seconds for load in found), case=case, by_round=True),
            measured("cpu_seconds", (load.cpu_seconds for load in found), case=case),
            measured("megabytes_per_s", (size / load.seconds / 1e6 for load in found), case=case),
            measured("share_of_disk_rate", rates[case], case=case),
            measured("peak_per_weight_bytes", (load.peak for load in found), case=case),
        )
    return here("loading", setup, rows), loads


def _in_a_process(folder: Path, linear: str) -> Load:
    program = [sys.executable, "-m", "tests.bench.loading", "--once", linear, str(folder)]
    output = subprocess.run(program, check=True, capture_output=True, text=True).stdout
    return msgspec.json.decode(output, type=Load)


def main() -> None:
    parser = arguments(rounds=5)
    parser.add_argument("--model", choices=SHAPES, default=QWEN_05B.name)
    parser.add_argument("--once", nargs=2, metavar=("LINEAR", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.once:
        linear, folder = given.once
        sys.stdout.write(msgspec.json.encode(load_once(Path(folder), linear)).decode())
        return
    summary, loads = measure(given.model, given.rounds)
    report(summary, given.json, loads)


if __name__ == "__main__":
    main()
