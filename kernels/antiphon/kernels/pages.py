"""Pages of a pool, copied to one buffer and back.

Axes: L layers, P pages of the pool, N pages that are copied, B bytes of a page in one layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.kernels.op import kernel
from antiphon.kernels.triton.backend import triton

if TYPE_CHECKING:
    from torch import Tensor


@kernel("pages.gather", triton("pages:gather"), invariant=True)
def gather(pool: Tensor, pages: Tensor) -> Tensor:
    """Copy pages: pool (L, P, B) uint8, pages (N,) int32  ->  (L, N, B), layer by layer."""
    return pool.index_select(1, pages)


@kernel("pages.scatter", triton("pages:scatter"), invariant=True)
def scatter(pool: Tensor, pages: Tensor, packed: Tensor) -> None:
    """Copy what `gather` has copied, (L, N, B), to pages (N,) int32; a number below 0 to none."""
    kept = pages >= 0
    pool.index_copy_(1, pages[kept].long(), packed[:, kept])
