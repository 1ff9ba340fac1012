"""The C++ kernels neither read or write outside their operands nor rely on undefined behaviour.

As a program, it runs the kernels' tests on a library that AddressSanitizer and UBSan watch; their
libraries must be loaded first, by LD_PRELOAD.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from antiphon.kernels.cpu import build, extension

SANITIZERS = (
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
    # What is watched is compiled in a third of the time by fewer optimizations.
    *("-O1", "-fno-omit-frame-pointer", "-g1"),
    # Operands are read at any address, by instructions that allow it; and what is no object, or too
    # small a one, is what AddressSanitizer finds.
    "-fno-sanitize=alignment,null,object-size,vptr",
)

ELSEWHERE = ("ahead_of_time", "build", "fake_steps", "flashinfer", "triton", "worker_launches")
"""Tests of kernels of GPUs, and of how these are built: they would take hours."""
LIMITED = (
    "tests/kernels/test_bounds.py::test_a_team_whose_threads_find_no_memory_raises_and_works_on"
)
"""It limits the address space, of which AddressSanitizer reserves terabytes."""

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++"),
]


def library(name: str) -> str:
    """The path of a library that comes with the compiler."""
    return subprocess.run(
        ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_kernels_pass_their_tests_under_sanitizers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_PRELOAD", f"{library('libasan.so')} {library('libubsan.so')}")
    # Python and torch keep what they have until the process ends.
    monkeypatch.setenv("ASAN_OPTIONS", "detect_leaks=0")
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.test_sanitizers", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]


def main(folder: Path) -> int:
    """Build into a folder of its own, and run the tests there; return pytest's exit status."""
    build.FLAGS = (*build.FLAGS, *SANITIZERS)
    build.CACHE_FOLDER = folder
    build.build()
    assert extension.unavailable_reason() is None
    here = Path(__file__).parent
    ignored = [f"--ignore={here / f'test_{name}.py'}" for name in ELSEWHERE]
    return pytest.main(
        [
            *("-q", "-p", "no:cacheprovider", "-o", "timeout=600"),
            # What a sanitizer writes before it ends the process is not captured.
            "--capture=sys",
            *(str(here), *ignored, f"--deselect={LIMITED}"),
        ]
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
