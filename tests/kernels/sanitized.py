"""Run the kernels' tests on a library that AddressSanitizer and UBSan watch; `make test-long`.

The sanitizers' libraries must be loaded first, by LD_PRELOAD: see test_sanitizers.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from antiphon.kernels.cpu import build, extension

SANITIZERS = (
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
    *("-fno-omit-frame-pointer", "-g1"),
    # Operands are read at any address, by instructions that allow it.
    "-fno-sanitize=alignment",
)

LIMITED = (
    "tests/kernels/test_bounds.py::test_a_team_whose_threads_find_no_memory_says_so_and_works_on"
)
"""It limits the address space, of which AddressSanitizer reserves terabytes."""


def main(folder: Path) -> int:
    """Build into a folder of its own, and run the tests there; return pytest's exit status."""
    build.FLAGS = (*build.FLAGS, *SANITIZERS)
    build.CACHE_FOLDER = folder
    build.build()
    assert extension.unavailable_reason() is None
    here = Path(__file__).parent
    return pytest.main(
        [
            *("-q", "-p", "no:cacheprovider", "-o", "timeout=600"),
            # What a sanitizer writes before it ends the process is not captured.
            "--capture=sys",
            *(str(here), f"--ignore={here / 'test_build.py'}", f"--deselect={LIMITED}"),
        ]
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
