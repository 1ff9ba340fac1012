"""Compiles the C++ kernels for this Python, this torch and this machine.

`python -m antiphon.kernels.cpu.build`, run by `make setup` and when an image or a wheel is built,
never by a serving process. The library holds the kernels of every instruction set. It is stored in
the environment that torch is installed in, or comes with the package in a wheel, under a hash of
everything that it depends on: the sources, Python and torch's minor version, within which its ABI
stays. So a library of anything else is never loaded.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

PACKAGE = Path(__file__).parent
SOURCES = PACKAGE / "csrc"
CACHE_FOLDER = Path(sys.prefix) / "lib" / "antiphon"
KEPT_S = 3600.0
"""How long objects and libraries of other sources are kept."""
MODULE = "antiphon_cpu_kernels"
ARITHMETIC_FLAGS = (
    *("-std=c++20", "-O3"),
    # Fused multiply-add only where the source asks for it.
    "-ffp-contract=off",
)
FLAGS = (
    *ARITHMETIC_FLAGS,
    *("-fPIC", "-fopenmp", "-fvisibility=hidden", "-DNDEBUG"),
    # https://gcc.gnu.org/bugzilla/show_bug.cgi?id=105593: GCC 12 warns about its own intrinsics.
    *("-Wall", "-Wextra", "-Wno-maybe-uninitialized"),
    f"-DTORCH_EXTENSION_NAME={MODULE}",
    f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
)
TORCH = Path(torch.__file__).parent
TORCH_MINOR = ".".join(torch.__version__.split(".")[:2])
_VERSION_DIGITS = 8
_INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)


class CannotBuild(Exception):
    """The kernels cannot be compiled here; the message names what is missing."""


def library() -> Path:
    name = f"kernels-{_digest(*map(_object_key, _units()))}.so"
    packaged = PACKAGE / name
    return packaged if packaged.exists() else CACHE_FOLDER / name


def version() -> str:
    """A hash of the sources, equal on all machines that have the same."""
    texts = (path.read_text("utf-8") for path in sorted(SOURCES.iterdir()))
    return _digest(*ARITHMETIC_FLAGS, *texts)[:_VERSION_DIGITS]


def build() -> Path:
    """Compile what is missing, and return the library. Files are written atomically.

    Raises:
        CannotBuild: There is no compiler, there are no Python headers, or compiling failed.
    """
    if (built := library()).exists():
        return built
    compiler = _compiler()
    CACHE_FOLDER.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        # Those of instruction sets, which take longest, are among the last and begun first.
        objects = list(pool.map(partial(_compile, compiler), reversed(_units())))[::-1]
    link = [compiler, "-shared", "-fopenmp", *map(str, objects), f"-L{TORCH / 'lib'}"]
    libraries = ["-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
    _produce([*link, *libraries], built)
    _forget_old({built, *objects})
    return built


def main() -> int:
    try:
        built = build()
    except CannotBuild as error:
        sys.stderr.write(f"CPU kernels not built, torch's own are used: {error}\n")
        return 1
    sys.stdout.write(f"{built}\n")
    return 0


def _units() -> list[Path]:
    return sorted(SOURCES.glob("*.cpp"))


def _object_key(unit: Path) -> str:
    about = (TORCH_MINOR, sysconfig.get_config_var("SOABI"), *FLAGS)
    return _digest(*about, *(path.read_text("utf-8") for path in sorted(_closure(unit))))


def _closure(path: Path, seen: frozenset[Path] = frozenset()) -> frozenset[Path]:
    """A source and all our headers that it includes, directly or not."""
    seen |= {path}
    for name in _INCLUDE.findall(path.read_text("utf-8")):
        if (included := SOURCES / name) not in seen:
            seen |= _closure(included, seen)
    return seen


def _forget_old(used: set[Path]) -> None:
    """Delete old unused files; younger ones may belong to a concurrent build."""
    for path in CACHE_FOLDER.glob("*-*.*o"):
        if path not in used and time.time() - path.stat().st_mtime > KEPT_S:
            path.unlink(missing_ok=True)


def _digest(*parts: str | None) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]


def _compiler() -> str:
    if platform.machine() != "x86_64":
        raise CannotBuild(f"they are written for x86-64, and this is {platform.machine()}")
    if (compiler := shutil.which("g++")) is None:
        raise CannotBuild("there is no g++ (on Debian and Ubuntu: apt install g++)")
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        raise CannotBuild("Python.h is missing (on Debian and Ubuntu: apt install python3-dev)")
    return compiler


def _compile(compiler: str, unit: Path) -> Path:
    target = CACHE_FOLDER / f"{unit.stem}-{_object_key(unit)}.o"
    if not target.exists():
        folders = (TORCH / "include", sysconfig.get_paths()["include"])
        includes = [part for folder in folders for part in ("-isystem", str(folder))]
        _produce([compiler, *FLAGS, *includes, "-c", str(unit)], target)
    return target


def _produce(command: list[str], target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=CACHE_FOLDER) as folder:
        written = Path(folder) / target.name
        done = subprocess.run(  # noqa: S603 (our own command)
            [*command, "-o", str(written)], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if "error" in line]
            raise CannotBuild("\n".join(lines[:10] or done.stderr.splitlines()[-10:]))
        written.replace(target)


if __name__ == "__main__":
    sys.exit(main())
