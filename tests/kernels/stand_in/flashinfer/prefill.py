from __future__ import annotations

from flashinfer.jit import JitSpec, MissingJITCacheError

MISSING: set[tuple[object, ...]] = set()
"""Of modules that are not built: which kernels, for how many numbers a head."""
LOADED: list[tuple[object, ...]] = []


def get_batch_prefill_module(backend: str, *args: object) -> object:
    head_size = args[4]
    if (backend, head_size) in MISSING:
        raise MissingJITCacheError(JitSpec("_".join(map(str, (backend, *args)))))
    LOADED.append((backend, *args))
    return object()
