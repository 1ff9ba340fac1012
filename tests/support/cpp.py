"""The C++ sources for tools: `compile_commands.json` for editors, and clang-tidy over all of them.

`python -m tests.support.cpp` writes `compile_commands.json` beside the sources' checkout; with
`--tidy` it runs clang-tidy with the checks of `.clang-tidy` and fails on any finding. g++ takes an
instruction set from a pragma in the source; clang does not know that pragma and gets it as flags.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from antiphon.kernels.cpu import build

ROOT = Path(__file__).parents[2]
COMMANDS = ROOT / "compile_commands.json"
_TARGET = re.compile(r'^#pragma GCC target\(\s*\\?\s*"([^"]+)"', re.MULTILINE)


def compile_commands() -> list[dict[str, object]]:
    """Return an entry a translation unit, as the JSON Compilation Database Format has it."""
    includes = [str(build.TORCH / "include"), sysconfig.get_paths()["include"]]
    systems = [part for folder in includes for part in ("-isystem", folder)]
    return [
        {
            "directory": str(ROOT),
            "file": str(unit),
            "arguments": ["g++", *build.FLAGS, *isa_flags(unit), *systems, "-c", str(unit)],
        }
        for unit in sorted(build.SOURCES.glob("*.cpp"))
    ]


def isa_flags(unit: Path) -> list[str]:
    """Return the instruction sets that a unit's pragma names, as flags."""
    named = _TARGET.search(unit.read_text("utf-8"))
    return [] if named is None else [f"-m{name}" for name in named[1].split(",")]


def write() -> Path:
    COMMANDS.write_text(json.dumps(compile_commands(), indent=2) + "\n")
    return COMMANDS


def tidy() -> int:
    """Run clang-tidy over all units, as many at once as there are cores; return the failures."""
    folder = write().parent
    executable = Path(sys.executable).with_name("clang-tidy")
    # GCC's headers of OpenMP; its intrinsics are clang's own.
    openmp = subprocess.run(
        ["g++", "-print-file-name=include"], capture_output=True, text=True, check=True
    ).stdout.strip()

    def check(unit: Path) -> int:
        done = subprocess.run(
            [
                *(str(executable), "--quiet", f"-p={folder}", "--warnings-as-errors=*"),
                *(f"--extra-arg=-idirafter{openmp}", "--extra-arg=-Wno-unknown-warning-option"),
                str(unit),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        sys.stdout.write(done.stdout)
        return done.returncode

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return sum(code != 0 for code in pool.map(check, sorted(build.SOURCES.glob("*.cpp"))))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.cpp")
    parser.add_argument("--tidy", action="store_true", help="run clang-tidy too")
    if parser.parse_args().tidy:
        return tidy()
    sys.stdout.write(f"{write()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
