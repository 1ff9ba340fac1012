from __future__ import annotations

import os
from pathlib import Path

MISSING_LATENTS: set[tuple[str, object, object]] = set()
"""Of modules that are not built: which kernels, for how many numbers of a latent and beside it."""
LOADED_LATENTS: list[tuple[object, ...]] = []


class MissingJITCacheError(RuntimeError):
    """A module is not built, and must not be compiled.

    Attributes:
        spec: What would be compiled.
    """

    def __init__(self, spec: JitSpec) -> None:
        if not os.getenv("FLASHINFER_DISABLE_JIT"):
            raise AssertionError("it would be compiled, which takes minutes")
        super().__init__("it is not found in the JIT cache")
        self.spec = spec


class JitSpec:
    """A module that is compiled by writing down what for."""

    folder = Path()

    def __init__(self, name: str) -> None:
        self.name = name
        self.jit_library_path = self.folder / "compiled" / f"{name}.so"
        self.aot_path = self.folder / "aot" / name / f"{name}.so"

    def build(self) -> None:
        assert not os.getenv("FLASHINFER_DISABLE_JIT"), "it would raise"
        self.jit_library_path.parent.mkdir(exist_ok=True)
        self.jit_library_path.write_text(os.getenv("FLASHINFER_CUDA_ARCH_LIST", ""))


class LatentSpec(JitSpec):
    def __init__(self, arguments: tuple[object, ...]) -> None:
        super().__init__("_".join(map(str, ("mla", *arguments))))
        self._arguments = arguments

    def build_and_load(self) -> object:
        backend, *_, latent, rotated, _ = self._arguments
        if (backend, latent, rotated) in MISSING_LATENTS:
            raise MissingJITCacheError(self)
        LOADED_LATENTS.append(self._arguments)
        return object()


def gen_batch_mla_module(backend: str, *args: object) -> LatentSpec:
    return LatentSpec((backend, *args))
