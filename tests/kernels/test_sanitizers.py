"""The C++ kernels neither read or write outside their operands nor rely on undefined behaviour."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

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
        [sys.executable, "-m", "tests.kernels.sanitized", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
