from __future__ import annotations

import os

MISSING_LATENTS: set[tuple[str, object, object]] = set()
"""Of modules that are not built: which kernels, for how many numbers of a latent and beside it."""
LOADED_LATENTS: list[tuple[object, ...]] = []


class MissingJITCacheError(RuntimeError):
    """A module is not built, and must not be compiled."""

    @classmethod
    def raised(cls) -> MissingJITCacheError:
        if not os.getenv("FLASHINFER_DISABLE_JIT"):
            raise AssertionError("it would be compiled, which takes minutes")
        return cls("it is not found in the JIT cache")


class JitSpec:
    """A module that is yet to be loaded."""

    def __init__(self, arguments: tuple[object, ...]) -> None:
        self._arguments = arguments

    def build_and_load(self) -> object:
        backend, *_, latent, rotated, _ = self._arguments
        if (backend, latent, rotated) in MISSING_LATENTS:
            raise MissingJITCacheError.raised()
        LOADED_LATENTS.append(self._arguments)
        return object()


def gen_batch_mla_module(backend: str, *args: object) -> JitSpec:
    return JitSpec((backend, *args))
