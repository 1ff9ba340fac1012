"""Checks and times the kernels and the worker on a GPU, in stages, the cheapest first.

python -m tests.gpu --stages parity launches
python -m tests.gpu --bench
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.gpu.stages import GpuStage, run_stages

from antiphon.model_worker.startup.gpu import find_gpu
from antiphon.service.startup import CannotStart

DEVICE = "cuda"
PARITY = str(Path(__file__).parents[1] / "kernels" / "interpreted" / "parity.py")
PYTEST = (
    *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "300"),
    *("-W", "default"),  # what libraries of a GPU warn of fails nothing
)
ON_DEVICE = (*PYTEST, "--on", DEVICE, "-k", "not mutants", PARITY)
ONE_EACH = (*PYTEST, "--on", DEVICE, "--last", "-k", "not mutants and not 2_to_the_31", PARITY)
SANITIZER = "compute-sanitizer"


def _check(name: str, promise: str, timeout_s: float) -> GpuStage:
    command = (sys.executable, "-m", "tests.gpu.checks", name)
    return GpuStage(name=name, promise=promise, command=command, timeout_s=timeout_s)


def _bench(name: str, promise: str) -> GpuStage:
    command = (sys.executable, "-m", "tests.gpu.bench", name)
    return GpuStage(name=name, promise=promise, command=command)


CHECKS = (
    _check("versions", "what is installed, and a GPU that the kernels are compiled for", 120),
    GpuStage(
        name="sanitizer",
        promise="each kernel once under compute-sanitizer",
        # Without torch's cache each tensor is an allocation, whose ends are checked.
        command=(
            *("env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1"),
            *(SANITIZER, "--tool", "memcheck", "--error-exitcode", "86"),
            *ONE_EACH,
        ),
        needs=SANITIZER,
    ),
    GpuStage(
        name="parity",
        promise="each kernel against its reference on the CPU",
        command=ON_DEVICE,
    ),
    _check("flashinfer", "FlashInfer's attention against the reference, if it is installed", 300),
    _check("launches", "a worker launches nothing but what was compiled ahead of time", 300),
    _check("graphs", "steps of one size have the same bits with graphs and without", 300),
    _check("determinism", "deterministic inference has the same bits alone and together", 300),
    _check("ranks", "two ranks, with a GPU each, have the tokens of one, but for near ties", 300),
    _check("prompts", "64 prompts have the tokens of the CPU in float32, but for near ties", 600),
)
BENCHES = (
    _bench("memory", "kernels that wait for memory, and decode attention, against copies"),
    _bench("matmul", "experts and linears in fp8 against products of torch and copies"),
    _bench("sampling", "sampling of 256 rows of 128k logits, in times that these are read"),
    _bench("decode", "decode steps of Llama-3.1-8B's shape against the roofline"),
    _bench("prefill", "prefills of that shape, in pieces against kernel by kernel"),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--bench", action="store_true", help="only the stages that time something")
    names = [stage.name for stage in (*CHECKS, *BENCHES)]
    parser.add_argument("--stages", nargs="+", choices=names, help="only these stages")
    given = parser.parse_args()
    stages = BENCHES if given.bench else (*CHECKS, *BENCHES)
    if given.stages is not None:
        stages = tuple(each for each in (*CHECKS, *BENCHES) if each.name in given.stages)
    try:
        find_gpu(DEVICE)
    except CannotStart as error:
        print(error, file=sys.stderr)
        return 1
    return run_stages(stages)


if __name__ == "__main__":
    sys.exit(main())
