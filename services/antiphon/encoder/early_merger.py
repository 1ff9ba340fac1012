"""MiniCPM-V's merger behind an inner layer: each window of patches becomes one of the same width.

Axes: P patches of an image, C width, D size of a head.

Source: Yao et al. 2024, arXiv:2408.01800.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.nn.functional as F  # noqa: N812  # the usual name

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from antiphon.encoder.linear import Linear

    Norm = Callable[[Tensor], Tensor]

EARLY = 2
"""Edge of the windows that are merged behind an inner layer, in patches."""


@dataclass(frozen=True, slots=True)
class EarlyMerger:
    """Attention within windows of patches, and a block that makes one of each, of the same width.

    `first` and `second` are behind the norm of all patches of a window as one row.
    """

    heads: int
    norm: Norm
    qkv: Linear
    out: Linear
    row_norm: Norm
    first: Linear
    second: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """One of each window of patches, which follow each other: (P, C)  ->  (P / 4, C)."""
        windows, size = len(x) // EARLY**2, EARLY**2
        heads_of = self.qkv(self.norm(x)).view(windows, size, 3, self.heads, -1)
        q, k, v = heads_of.permute(2, 0, 3, 1, 4)  # each (windows, heads, size, D)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        patches = (x + self.out(mixed)).view(windows, size, -1)
        wide = F.gelu(self.first(self.row_norm(patches.flatten(1))), approximate="tanh")
        return self.second(wide) + patches.mean(dim=1)
