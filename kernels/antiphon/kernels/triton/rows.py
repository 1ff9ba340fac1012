"""Rows of a pass as Triton's attention reads them: cut into tiles, and copied to the device.

Axes: R rows, N tiles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from antiphon.kernels.upload import Upload

    Ints = NDArray[np.int32]

SPLIT_TOKENS = 512
"""Keys of a part of a row that is decoded, or a multiple of it where there would be too many."""
SPLITS_MAX, PROGRAMS = 32, 4096
"""Parts of a row, and programs of a launch, at most: more of them would not run at a time."""
EXTEND_ROWS = 64
"""Queries of a tile times query heads a kv head, of rows of several queries."""
TEXT_QUERIES = 64
"""Queries of a tile of a text whose tokens attend in both directions."""
ALIGNED_INTS = 4


class Tiles(NamedTuple):
    """Tiles of one kind of a pass."""

    tiles: Tensor  # (N, 2) int32, the row and its first query
    queries: int  # of a tile, at most
    splits: int


class DeviceRows(NamedTuple):
    """What the kernels read of the rows of a pass."""

    table: Tensor  # (*, pages) int32
    rows: Tensor  # (4, R) int32: first token, queries, keys, and which row of the table is its own
    decoding: Tiles | None
    extending: Tiles | None


def splits_of(keys: int, rows: int, heads: int) -> int:
    """Parts of rows that are decoded together, the longest of so many keys."""
    most = max(1, min(SPLITS_MAX, PROGRAMS // (rows * heads)))
    return min(-(-keys // SPLIT_TOKENS), most)


def queries_of_tile(queries_per_head: int) -> int:
    """Queries of a tile of rows of several queries."""
    return max(1, EXTEND_ROWS // queries_per_head)


def device_rows(
    page_table: Ints,
    query_len: Ints,
    kv_len: Ints,
    heads: tuple[int, int],
    upload: Upload,
) -> DeviceRows:
    """Copy the rows of a pass to the device, in one piece. heads: of keys, and queries of each."""
    kv_heads, queries_per_head = heads
    starts = np.cumsum(query_len, dtype=np.int32) - query_len
    alone = np.flatnonzero(query_len == 1).astype(np.int32)
    several = np.flatnonzero(query_len > 1).astype(np.int32)
    queries = queries_of_tile(queries_per_head)
    counts = -(-query_len[several] // queries)
    row = np.repeat(several, counts)
    index = np.arange(len(row), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts)
    tiles = (
        np.stack([alone, np.zeros_like(alone)], axis=1),
        np.stack([row, (index * queries).astype(np.int32)], axis=1),
    )
    own = np.arange(len(query_len), dtype=np.int32)
    parts = (page_table, np.stack([starts, query_len, kv_len, own]), *tiles)
    # Each part is aligned: kernels are compiled for how their pointers are.
    sizes = [-(-part.size // ALIGNED_INTS) * ALIGNED_INTS for part in parts]
    places = (np.cumsum(sizes) - sizes).tolist()
    packed = np.zeros(sum(sizes), np.int32)
    for place, part in zip(places, parts, strict=True):
        packed[place : place + part.size] = part.ravel()
    flat = upload(packed)
    table, lengths, decoded, extended = (
        flat[place : place + part.size].view(part.shape)
        for place, part in zip(places, parts, strict=True)
    )
    splits = splits_of(int(kv_len[alone].max(initial=1)), max(1, len(alone)), kv_heads)
    return DeviceRows(
        table,
        lengths,
        Tiles(decoded, 1, splits) if len(alone) else None,
        Tiles(extended, queries, 1) if len(several) else None,
    )


def text_tiles(lengths: Sequence[int], upload: Upload) -> Tensor:
    """Tiles of texts that follow each other, (N, 3) int32: first token, its length, first query."""
    length = np.array(lengths, np.int32)
    start = np.cumsum(length, dtype=np.int32) - length
    counts = -(-length // TEXT_QUERIES)
    text = np.repeat(np.arange(len(length)), counts)
    index = np.arange(len(text), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts)
    queries = (index * TEXT_QUERIES).astype(np.int32)
    return upload(np.stack([start[text], length[text], queries], axis=1))


def check_pages(
    page_table: Ints, query_len: Ints, kv_len: Ints, page_tokens: int, window: int | None
) -> None:
    """Check that the kernels find a page for each token.

    Raises:
        RuntimeError: A row reads or writes a token that has no page.
    """
    first = np.zeros_like(kv_len)
    if window is not None:
        first = np.maximum(kv_len - query_len + 1 - window, 0)
    page = np.arange(page_table.shape[1], dtype=np.int32)
    starts, ends = first // page_tokens, (kv_len - 1) // page_tokens
    read: NDArray[np.bool_] = (page >= starts[:, None]) & (page <= ends[:, None])
    reach = int(kv_len.max(initial=0)) <= page_table.shape[1] * page_tokens
    if not reach or np.count_nonzero(page_table[read] < 0):
        raise RuntimeError("a row reads or writes a token that has no page")
