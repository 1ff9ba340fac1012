"""Compile the modules of FlashInfer ahead of time, where an image is built. No GPU is needed.

    pip install nvidia-cuda-nvcc
    python -m antiphon.kernels.flashinfer.build
    python -m antiphon.kernels.flashinfer.build --capabilities 9.0a --head-sizes 128

They come to lie in FlashInfer's package, where it looks first. It is asked for each module as a
worker asks, with compiling disabled: it names what it lacks, and that is compiled. The compiler is
that of CUDA's wheels, which `CUDA_HOME` replaces.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from antiphon.kernels.flashinfer.backend import DISABLE_JIT, PACKAGE, module_loaders
from antiphon.kernels.op import AttentionFeatures, DeviceCapability

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

CAPABILITIES = ("9.0a", "10.0a")
"""Compute capabilities that are compiled for; `a`: with the instructions of this one alone."""
HEAD_SIZES = (64, 128, 256)
CACHE_DTYPES = {"bfloat16": None, "float8_e4m3fn": torch.float8_e4m3fn}
LATENT, LATENT_KEY = 512, 576
"""Numbers of a cached latent, and those with its rotated part, as DeepSeek's models have them."""


class ModuleSpec(Protocol):
    """How FlashInfer describes a module."""

    name: str
    jit_library_path: Path
    aot_path: Path

    def build(self) -> None: ...


class CannotCompile(Exception):
    """Modules cannot be compiled here; the message says what is missing."""


def main() -> int:
    """Build, or say in one line why not. Returns the exit status."""
    given = _arguments()
    if not given.capabilities:
        return 0  # FlashInfer cannot be imported for none
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = " ".join(given.capabilities)
    try:
        with tempfile.TemporaryDirectory() as folder:
            if "CUDA_HOME" not in os.environ:
                os.environ["CUDA_HOME"] = str(lay_out_toolkit(Path(folder)))
            for spec in missing(devices(given.capabilities, given.head_sizes, given.cache_dtypes)):
                sys.stdout.write(f"{build(spec)}\n")
                sys.stdout.flush()
    except (CannotCompile, ImportError) as error:
        sys.stderr.write(f"FlashInfer's modules are not built: {error}\n")
        return 1
    return 0


def devices(
    capabilities: Iterable[str], head_sizes: Sequence[int], cache_dtypes: Sequence[str]
) -> Iterator[DeviceCapability]:
    """Devices, and what models on them attend with, whose modules are compiled: in bfloat16."""
    flags = (False, True)
    attention = tuple(
        AttentionFeatures(size, window=window, softcap=softcap)
        for size, window, softcap in product(head_sizes, flags, flags)
    )
    for capability, name in product(capabilities, cache_dtypes):
        sm, cache_dtype = int(capability.rstrip("af").replace(".", "")), CACHE_DTYPES[name]
        latents = (AttentionFeatures(LATENT_KEY, latent=LATENT),) if cache_dtype is None else ()
        yield DeviceCapability("cuda", torch.bfloat16, sm, cache_dtype, (*attention, *latents))


def missing(devices: Iterable[DeviceCapability]) -> list[ModuleSpec]:
    """What FlashInfer would compile for them, each once, as it describes it."""
    lacks = importlib.import_module(f"{PACKAGE}.jit").MissingJITCacheError
    found: dict[str, ModuleSpec] = {}
    os.environ[DISABLE_JIT] = "1"
    for device in devices:
        for _, load in module_loaders(device):
            try:
                load()
            except lacks as error:
                found.setdefault(error.spec.name, error.spec)
    del os.environ[DISABLE_JIT]
    return [*found.values()]


def build(spec: ModuleSpec) -> Path:
    """Compile a module, and put it where FlashInfer looks first.

    Raises:
        CannotCompile: The compiler refuses it.
    """
    try:
        spec.build()
    except RuntimeError as error:
        raise CannotCompile(f"{spec.name}: {error}") from error
    spec.aot_path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(spec.jit_library_path, spec.aot_path)
    return spec.aot_path


def lay_out_toolkit(folder: Path) -> Path:
    """A folder as `CUDA_HOME` names it, of CUDA's wheels.

    They have no links as linkers look for them, and nothing in the place of the driver's library,
    for which an empty one stands.

    Raises:
        CannotCompile: There is no such wheel, or no compiler of C.
    """
    spec = importlib.util.find_spec("nvidia")
    places = [] if spec is None else [Path(each) for each in spec.submodule_search_locations or ()]
    found = sorted(each.parent.parent for place in places for each in place.glob("cu*/bin/nvcc"))
    if not found:
        raise CannotCompile("there is no nvcc (pip install nvidia-cuda-nvcc), nor CUDA_HOME")
    for name in ("bin", "include", "nvvm"):
        (folder / name).symlink_to(found[-1] / name)
    libraries = folder / "lib64"
    libraries.mkdir()
    for place in places:
        for library in place.glob(f"{found[-1].name}/lib/*"):
            (libraries / library.name).symlink_to(library)
            if ".so." in library.name:  # as `-l` looks for it
                (libraries / f"{library.name.partition('.so.')[0]}.so").symlink_to(library)
    driver = libraries / "libcuda.so"
    command = [
        "gcc",
        "-shared",
        "-Wl,-soname,libcuda.so.1",
        "-o",
        str(driver),
        "-x",
        "c",
        os.devnull,
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise CannotCompile("there is no gcc") from None
    except subprocess.CalledProcessError as error:
        raise CannotCompile(error.stderr.strip()) from error
    return folder


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m antiphon.kernels.flashinfer.build")
    parser.add_argument("--capabilities", nargs="*", type=_capability, default=CAPABILITIES)
    parser.add_argument("--head-sizes", nargs="*", type=int, default=HEAD_SIZES)
    parser.add_argument("--cache-dtypes", nargs="*", choices=CACHE_DTYPES, default=[*CACHE_DTYPES])
    return parser.parse_args()


def _capability(text: str) -> str:
    if re.fullmatch(r"\d+\.\d[af]?", text) is None:
        message = f"{text!r} is no compute capability: these are like 9.0, 9.0a or 10.0f"
        raise argparse.ArgumentTypeError(message)
    return text


if __name__ == "__main__":
    sys.exit(main())
