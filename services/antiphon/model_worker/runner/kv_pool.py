"""The pages of a cache group as tensors, and as bytes.

Axes: L layers of the group, N tensors a layer (keys and values, or latents alone), P pages,
S tokens a page, H kv heads, D head size.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np
import torch

from antiphon.kernels.cpu.extension import pool_zeros
from antiphon.kernels.kv import is_fp8

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.kernels.kv import KvSpec
    from antiphon.kernels.latent import LatentSizes
    from antiphon.layers.weights import BuildContext
    from antiphon.model_worker.cache.groups import CacheGroup


class PageCorrupt(Exception):
    """The bytes are not a page of this group, or their checksum does not match."""


class KvPool:
    """The KV cache of one cache group, (L, N, P, S, H, D)."""

    def __init__(self, group: CacheGroup, spec: KvSpec | LatentSizes, build: BuildContext) -> None:
        self.group = group
        page = (group.page_tokens, spec.heads_of(build.tp.ranks), spec.head_size)
        self.dtype = build.kv_dtype
        """Element type of the cache."""
        self._data = pool_zeros(
            *(len(group.layers), spec.tensors, group.pages_total, *page),
            dtype=torch.uint8 if is_fp8(build.kv_dtype) else build.kv_dtype,
            device=build.device,
        )

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the group's `index`-th layer, each (P, S, H, D); latents are both."""
        layer = self._data[index].view(self.dtype)
        return layer[0], layer[-1]

    def zero(self, places: Tensor) -> None:
        """Zero the tokens at `places` (page * S + offset) in every layer."""
        self._data.flatten(2, 3).index_fill_(2, places, 0)

    def read(self, page: int) -> bytes:
        """A page's bytes, all layers."""
        data = self._data[:, :, page].contiguous().view(torch.uint8)
        return data.cpu().numpy().tobytes()

    def write(self, page: int, data: bytes) -> None:
        """Fill a page with bytes from `read`."""
        view = self._data[:, :, page]
        # A copy, since torch has no read-only tensors.
        flat = torch.as_tensor(np.frombuffer(data, np.uint8).copy())
        view.copy_(flat.view(view.dtype).view(view.shape))


class PageCodec:
    """Encodes pages as bytes and back; the only code that knows layout, dtype and shard.

    A page is four bytes of CRC-32 and its data, so that damaged bytes are never attended to.
    """

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool

    def encode(self, page: int) -> bytes:
        """The page with its checksum, as it is transferred and stored."""
        data = self._pool.read(page)
        return zlib.crc32(data).to_bytes(4, "little") + data

    def decode(self, page: int, encoded: bytes) -> None:
        """Fill a page with bytes that `encode` made on a rank of the same shard.

        Raises:
            PageCorrupt: Size or checksum do not match; the page is unchanged.
        """
        expected = 4 + self._pool.group.page_bytes
        if len(encoded) != expected:
            raise PageCorrupt(f"a page of this group has {expected} bytes, not {len(encoded)}")
        data = encoded[4:]
        if zlib.crc32(data) != int.from_bytes(encoded[:4], "little"):
            raise PageCorrupt("the checksum of a page does not match its bytes")
        self._pool.write(page, data)
