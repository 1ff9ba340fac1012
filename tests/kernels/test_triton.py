from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
ATTENTION = "(attention or split or page)"
COSTLY = "(attention or split or page or sampling or experts)"
PARTS = [
    f"{ATTENTION} and not mutants",
    f"not {ATTENTION} and not mutants",
    f"mutants and not {COSTLY}",
    pytest.param(f"mutants and {COSTLY}", marks=pytest.mark.long),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", PARTS)
def test_triton_kernels_equal_their_references(part: str) -> None:
    run_interpreted("parity.py", "-k", part)


def test_the_instruments_find_what_they_must() -> None:
    run_interpreted("instruments.py")


@pytest.mark.timeout(300)
def test_models_generate_the_same_on_triton_kernels() -> None:
    run_interpreted("models.py", "tapes.py")


def run_interpreted(*words: str) -> None:
    """Run the tests of files, the words that end in .py.

    In a process of its own: Triton interprets kernels from its first import on, or never.
    """
    words = tuple(str(FOLDER / word) if word.endswith(".py") else word for word in words)
    words = ("-q", "-p", "no:cacheprovider", "--timeout", "300", "--durations", "8", *words)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        capture_output=True,
        check=False,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout
