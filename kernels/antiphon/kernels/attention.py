"""Attention over a paged KV cache, for any mix of prefill, decode and verify rows.

Also bidirectional attention, with all tokens of a row in the same forward pass: no KV cache.

Axes: R rows, T tokens of all rows, P pages, S tokens a page, H kv heads, G query heads a kv head,
D head size; in a block: B rows, Q queries a row, K keys a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (its name in every torch program)
from numpy.typing import NDArray
from torch import Tensor

from antiphon.kernels.cpu import extension
from antiphon.kernels.cpu.extension import CompiledMetadata, cpu
from antiphon.kernels.flashinfer.backend import flashinfer
from antiphon.kernels.kv import UNSCALED, KvScales, is_fp8, page_slots, read_keys, read_values
from antiphon.kernels.op import kernel
from antiphon.kernels.triton.backend import triton
from antiphon.kernels.triton.rows import check_pages, device_rows, text_tiles

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from antiphon.kernels.triton.rows import DeviceRows
    from antiphon.kernels.upload import Upload

    Planner = Callable[["AttentionMetadata", "AttentionMetadata"], None]

QUERIES_MAX = 256
"""Queries of one row in a block: longer chunks are split; their first pieces gather fewer keys."""
BATCHED_QUERIES_MAX = 8
"""Rows with more queries run alone: padding them to one length would cost more than it saves."""
KEYS_MIN = 64
"""Rows with fewer keys than this share a block; above it, rows within a factor of two do."""

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]

_SEEN, _UNSEEN = np.float32(0), np.float32(-np.inf)


@dataclass(frozen=True, slots=True)
class KvShape:
    """The attention parameters of a cache group, the same in every forward pass."""

    page_tokens: int  # S
    heads: int  # H, kv heads on this rank
    queries_per_head: int  # G
    head_size: int  # D
    dtype: torch.dtype  # of queries, and of keys and values unless the KV cache is 8-bit
    # A query attends to itself and the window - 1 tokens before it; None: to all before it.
    window: int | None = None
    # Chunked attention: texts are split into chunks of so many tokens, whole pages, and a query
    # attends only within its chunk; None: no chunks.
    chunk: int | None = None
    # A query also attends to the tokens of its row after it, window - 1 or all.
    bidirectional: bool = False
    # Of latents, which are keys and values: the elements that are values, before those that RoPE
    # rotates.
    latent: int | None = None


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Rows with the same number of queries and a similar number of keys, run as one batch."""

    rows: int
    queries_per_row: int
    keys_per_row: int
    # (B * Q,) indices into the pass's tokens; None when they are all of them, in order.
    queries: Tensor | None
    # (B * K,) slots of the keys. The tail of a short row repeats its own last
    # key, masked: nothing beyond a row's kv_len is ever read.
    places: Tensor
    # (B, 1, G * Q or 1, K), 0 or -inf; None when every query attends to every key.
    mask: Tensor | None


@dataclass(frozen=True)
class AttentionMetadata:
    """The rows of a forward pass for one cache group. Made once a pass, used by each layer.

    Row r's tokens follow those of row r - 1. Token p of row r is in page
    `page_table[r, p // S]` at `p % S`.
    """

    shape: KvShape
    page_table: Ints  # (R, N), -1 where a row has no page
    query_len: Ints  # (R,) tokens of a row in this pass
    kv_len: Ints  # (R,) tokens that the row's last query may attend to, including itself
    upload: Upload = torch.as_tensor
    # Of rows in whose place a captured step is replayed for others, pages of each; else None.
    pages_max: int | None = None

    @classmethod
    def of(
        cls,
        shape: KvShape,
        page_table: Ints,
        query_len: Ints,
        kv_len: Ints,
        upload: Upload = torch.as_tensor,
    ) -> AttentionMetadata:
        """The rows of a pass. With chunked attention, a row's tokens in each chunk become a row."""
        # Kernels need no support for chunks that way: a query attends to all of its row before it.
        if shape.chunk is None:
            return cls(shape, page_table, query_len, kv_len, upload)
        start, chunk = kv_len - query_len, shape.chunk
        first = start // chunk
        runs = (kv_len - 1) // chunk - first + 1
        row = np.repeat(np.arange(len(runs)), runs)
        run = first[row] + np.arange(len(row)) - (np.cumsum(runs) - runs)[row]
        begin = np.maximum(start[row], run * chunk)
        end = np.minimum(kv_len[row], (run + 1) * chunk)
        pages, width = chunk // shape.page_tokens, page_table.shape[1]
        page = (run * pages)[:, None] + np.arange(min(pages, width))
        table = page_table[row[:, None], np.minimum(page, width - 1)]
        table = np.where(page < width, table, -1)
        query_len, kv_len = end - begin, end - run * chunk
        parts = (part.astype(np.int32) for part in (table, query_len, kv_len))
        return cls(shape, *parts, upload=upload)

    @classmethod
    def of_texts(cls, shape: KvShape, lengths: Ints) -> AttentionMetadata:
        """Rows (R,) that are whole texts, in pages of their own: what a pass alone needs."""
        pages = -(-lengths // shape.page_tokens)
        index = np.arange(pages.max(initial=0), dtype=np.int32)
        first = (np.cumsum(pages) - pages)[:, None]
        table = np.where(index < pages[:, None], first + index, -1).astype(np.int32)
        return cls(shape, table, lengths, lengths)

    def resolved(self, on_device: DeviceRows, slot_mapping: Tensor) -> AttentionMetadata:
        """These rows, which are on the device already; what is planned of them is shared."""
        rows, known = replace(self), {"on_device": on_device, "slot_mapping": slot_mapping}
        vars(rows).update(known, plans=self.plans, planners=self.planners)  # what is cached
        return rows

    @cached_property
    def plans(self) -> dict[Hashable, object]:
        """What a backend has planned of these rows, which lives as long as they do."""
        return {}

    @cached_property
    def planners(self) -> list[Planner]:
        """What plans the captured step of these rows for others, before it is replayed.

        Each is called with these, and with the rows that own what it plans: the same without rows
        of padding.
        """
        return []

    @cached_property
    def compiled(self) -> CompiledMetadata:
        return self.compile()

    def compile(self) -> CompiledMetadata:
        """Make `compiled` without caching it: cached_property costs a lock and cold code.

        Raises:
            RuntimeError: A row reads or writes a token that has no page.
        """
        return extension.load().AttentionMetadata(
            page_tokens=self.shape.page_tokens,
            heads=self.shape.heads,
            queries_per_head=self.shape.queries_per_head,
            head_size=self.shape.head_size,
            window=self.shape.window or 0,
            bidirectional=self.shape.bidirectional,
            tables=self.page_table,
            query_len=self.query_len,
            kv_len=self.kv_len,
        )

    @cached_property
    def on_device(self) -> DeviceRows:
        """What Triton kernels read of the rows.

        Raises:
            RuntimeError: A row reads or writes a token that has no page.
        """
        shape, rows = self.shape, (self.page_table, self.query_len, self.kv_len)
        check_pages(*rows, shape.page_tokens, shape.window)
        return device_rows(*rows, (shape.heads, shape.queries_per_head), self.upload)

    @cached_property
    def slot_mapping(self) -> Tensor:
        """The slots of the pass's own keys, (T,) int64, as in `antiphon.kernels.kv`."""
        row = np.repeat(np.arange(len(self.query_len)), self.query_len)
        ends = np.cumsum(self.query_len, dtype=np.int64)
        position = np.arange(len(row)) + (self.kv_len - ends)[row]
        return self.upload(self._places(row, position))

    @cached_property
    def blocks(self) -> tuple[AttentionBlock, ...]:
        """The pass split into batches for SDPA."""
        pieces = _cut(self.query_len.astype(np.int64), self.kv_len.astype(np.int64))
        return tuple(self._block(pieces, chosen) for chosen in _batches(pieces))

    @cached_property
    def scratch(self) -> Tensor:
        """Scratch memory for the gathered keys and values of any block, (2, max B * K, H, D)."""
        # One a pass, not one a layer: fresh pages from the kernel cost several times the copy.
        keys = max(block.rows * block.keys_per_row for block in self.blocks)
        size = (2, keys, self.shape.heads, self.shape.head_size)
        return torch.empty(size, dtype=self.shape.dtype, device=self.blocks[0].places.device)

    def _places(self, row: Longs, position: Longs) -> Longs:
        size = self.shape.page_tokens
        page = self.page_table[row, position // size].astype(np.int64)
        assert (page >= 0).all(), "a row reads or writes a token that has no page"
        return page * page_slots(size) + position % size

    def _block(self, pieces: _Pieces, chosen: Longs) -> AttentionBlock:
        queries_per_row = int(pieces.queries[chosen[0]])
        end = pieces.end[chosen]  # (B,) keys that the last query may attend to
        if self.shape.bidirectional:
            end = self.kv_len[pieces.row[chosen]].astype(np.int64)
        query = pieces.start[chosen][:, None] + np.arange(queries_per_row)  # (B, Q)
        position = pieces.end[chosen][:, None] - queries_per_row + np.arange(queries_per_row)
        first = np.zeros_like(end)
        if self.shape.window is not None:
            first = np.maximum(first, position[:, 0] + 1 - self.shape.window)
        keys_per_row = int((end - first).max())
        key = first[:, None] + np.arange(keys_per_row)  # (B, K) positions
        row = np.broadcast_to(pieces.row[chosen][:, None], key.shape)
        places = self._places(row, np.minimum(key, end[:, None] - 1))
        return AttentionBlock(
            rows=len(chosen),
            queries_per_row=queries_per_row,
            keys_per_row=keys_per_row,
            queries=None if len(chosen) == len(pieces.row) else self.upload(query.ravel()),
            places=self.upload(places.ravel()),
            mask=self._mask(key, position, end),
        )

    def _mask(self, key: Longs, position: Longs, end: Longs) -> Tensor | None:
        queries_per_row = position.shape[1]
        last = position if not self.shape.bidirectional else end[:, None] - 1
        seen = key[:, None, :] <= last[:, :, None]  # (B, Q or 1, K)
        seen = np.broadcast_to(seen, (len(key), queries_per_row, key.shape[1]))
        if self.shape.window is not None:
            distance = position[:, :, None] - key[:, None, :]
            seen = seen & (distance < self.shape.window) & (distance > -self.shape.window)
        if seen.all():
            return None
        mask = self.upload(np.where(seen, _SEEN, _UNSEEN)).to(self.shape.dtype)
        copies = 1 if queries_per_row == 1 else self.shape.queries_per_head
        return mask.repeat(1, copies, 1).unsqueeze(1)  # (B, 1, G * Q, K)


class ImageRows:
    """The tokens of images in a pass that attend to each other, beside causal rows.

    Each image's part in the pass is a row of its own, which ends with the image: the same pages,
    bidirectional. What its tokens see before them is theirs as in a causal row.

    Attributes:
        tokens: (E,) indices into the pass's tokens.
        rows: As a cache group sees them.
    """

    def __init__(self, causal: AttentionMetadata, ahead: Ints) -> None:
        follows = np.concatenate(([-1], ahead[:-1])) != ahead + 1
        start = np.flatnonzero((ahead > 0) & follows)
        count: Longs = ahead[start].astype(np.int64) + 1
        row_end = np.cumsum(causal.query_len, dtype=np.int64)
        row = np.searchsorted(row_end, start, side="right")
        kv_len = causal.kv_len[row] - row_end[row] + start + count
        parts = zip(start.tolist(), count.tolist(), strict=True)
        tokens: list[Longs] = [np.arange(first, first + tokens) for first, tokens in parts]
        self.tokens = causal.upload(np.concatenate(tokens))
        self.rows = AttentionMetadata(
            replace(causal.shape, bidirectional=True),
            causal.page_table[row],
            count.astype(np.int32),
            kv_len.astype(np.int32),
            causal.upload,
        )


@kernel(
    "attention.paged",
    cpu("paged_attention"),
    flashinfer("attention:paged_attention"),
    triton("attention:paged_attention", caches=True, fixed="paged_attention_fixed"),
)
def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: AttentionMetadata,
    scale: float,
    scales: KvScales = UNSCALED,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax attention of each query over its row's cached keys, causal and within the window.

    Rows of a bidirectional shape are not causal: their tokens of this pass attend to each other.

    q (T, G * H, D); pages of keys and values, which already contain those of this pass, or of
    latents as both; their scales  ->  (T, G * H, D)

    With a soft cap, scores become softcap * tanh(score / softcap). sinks (G * H,) are a score in
    the softmax of every query of a head that takes probability and has no value. With either,
    scores and softmax are float32. Of latents a backend may leave out what is not a value.

    Source: Agarwal et al. 2025, arXiv:2508.10925, 2.2 (sinks).

    A block is one SDPA call with the query heads of a kv head as its query axis, (B, H, G * Q, D):
    on CPU, SDPA with `enable_gqa` or repeated keys is 9 to 19 times slower in bfloat16.
    """

    def attend(block: AttentionBlock, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if softcap is None and sinks is None:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=block.mask, scale=scale * scales.key
            )
        scores = (q @ k.transpose(-1, -2)).float() * (scale * scales.key)  # (B, H, G * Q, K)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if block.mask is not None:
            scores = scores + block.mask
        return _softmax(scores, sinks, block).to(v.dtype) @ v

    return _by_block(q, keys, values, rows, attend, scales.value)


def _by_block(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: AttentionMetadata,
    attend: Callable[[AttentionBlock, Tensor, Tensor, Tensor], Tensor],
    value_scale: float,
) -> Tensor:
    """Attend block by block: queries (B, H, G * Q, D) over keys and values (B, H, K, D)."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for block in rows.blocks:
        k, v = _gather(keys, values, rows, block)
        picked = q if block.queries is None else q.index_select(0, block.queries)
        mixed = attend(block, _heads_first(picked, block, rows.shape), k, v)
        if value_scale != 1.0:
            mixed = mixed * value_scale
        result = _tokens_first(mixed, block, rows.shape)  # (B * Q, G * H, D)
        if block.queries is None:
            return result
        out.index_copy_(0, block.queries, result)
    return out


def _softmax(scores: Tensor, sinks: Tensor | None, block: AttentionBlock) -> Tensor:
    """Softmax of scores (B, H, G * Q, K), with each head's sink, if any, in the denominator."""
    if sinks is None:
        return scores.softmax(dim=-1)
    heads = scores.shape[1]
    each = sinks.float().view(heads, -1).repeat_interleave(block.queries_per_row, dim=1)
    column = each[None, :, :, None].expand(len(scores), -1, -1, 1)  # (B, H, G * Q, 1)
    return torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]


def _gather(
    keys: Tensor, values: Tensor, rows: AttentionMetadata, block: AttentionBlock
) -> tuple[Tensor, Tensor]:
    shape = (block.rows, block.keys_per_row, rows.shape.heads, rows.shape.head_size)
    k, v = (part[: len(block.places)] for part in rows.scratch)
    if is_fp8(keys.dtype):
        k.copy_(read_keys(keys, block.places))
    else:
        read_keys(keys, block.places, out=k)
    if values is keys:
        v = k
    elif is_fp8(values.dtype):
        v.copy_(read_values(values, block.places))
    else:
        read_values(values, block.places, out=v)
    return k.view(shape).transpose(1, 2), v.view(shape).transpose(1, 2)


def _heads_first(q: Tensor, block: AttentionBlock, shape: KvShape) -> Tensor:
    axes = (block.rows, block.queries_per_row, shape.heads, shape.queries_per_head, shape.head_size)
    return q.reshape(axes).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _tokens_first(mixed: Tensor, block: AttentionBlock, shape: KvShape) -> Tensor:
    axes = (block.rows, shape.heads, shape.queries_per_head, block.queries_per_row, shape.head_size)
    return mixed.reshape(axes).permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Rows split into pieces of at most QUERIES_MAX queries; arrays have one entry a piece."""

    row: Longs
    start: Longs
    """Index of the first query in the pass's tokens."""
    queries: Longs
    end: Longs
    """Keys that the last query of the piece may attend to."""


def _cut(query_len: Longs, kv_len: Longs) -> _Pieces:
    pieces = -(-query_len // QUERIES_MAX)
    row = np.repeat(np.arange(len(query_len)), pieces)
    index = np.arange(len(row)) - (np.cumsum(pieces) - pieces)[row]
    queries = np.minimum(QUERIES_MAX, query_len[row] - index * QUERIES_MAX)
    start = (np.cumsum(query_len) - query_len)[row] + index * QUERIES_MAX
    end = kv_len[row] - query_len[row] + index * QUERIES_MAX + queries
    return _Pieces(row, start, queries, end)


def _batches(pieces: _Pieces) -> Iterator[Longs]:
    """Pieces that share a block: those with as many queries and a similar number of keys."""
    width = np.ceil(np.log2(np.maximum(pieces.end, KEYS_MIN))).astype(np.int64)
    key = pieces.queries * 64 + width
    alone = pieces.queries > BATCHED_QUERIES_MAX
    key[alone] = -1 - np.flatnonzero(alone)
    if (key == key[0]).all():
        yield np.arange(len(key))
        return
    for value in np.unique(key):
        yield np.flatnonzero(key == value)


@dataclass(frozen=True, slots=True)
class NoCache:
    """The cache spec of a layer with bidirectional attention, which caches nothing."""


@dataclass(frozen=True)
class TextRows:
    """Rows that are whole texts and follow each other. Made once a pass, used by each layer."""

    lengths: Sequence[int]  # (R,) tokens of each row
    upload: Upload = torch.as_tensor

    @cached_property
    def tiles(self) -> Tensor:
        """What Triton kernels read of the rows."""
        return text_tiles(self.lengths, self.upload)


@kernel("attention.whole", cpu("bidirectional_attention"), triton("whole:bidirectional_attention"))
def bidirectional_attention(
    q: Tensor, k: Tensor, v: Tensor, rows: TextRows, scale: float, window: int | None
) -> Tensor:
    """Softmax attention of each token over all tokens of its row, or those in its window.

    q (T, Q, D); k, v (T, H, D); window: a token attends to itself and window - 1 tokens on each
    side  ->  (T, Q, D)

    Each row runs alone: padding short ones to long ones would cost more than calls.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    start = 0
    for length in rows.lengths:
        row = slice(start, start + length)
        for queries, keys, mask in _pieces(length, window):
            mixed = _attend(q[row][queries], k[row][keys], v[row][keys], mask, scale)
            out[row][queries] = mixed
        start += length
    return out


def _pieces(length: int, window: int | None) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Queries of a row, the keys in their windows, and the mask, (N, M) bool; None: no mask."""
    if window is None or window >= length:
        yield slice(0, length), slice(0, length), None
        return
    for first in range(0, length, QUERIES_MAX):
        last = min(first + QUERIES_MAX, length)
        begin, end = max(0, first - window + 1), min(length, last + window - 1)
        distance = torch.arange(first, last)[:, None] - torch.arange(begin, end)
        yield slice(first, last), slice(begin, end), distance.abs() < window


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    count, heads, size = len(q), k.shape[1], q.shape[2]
    shared = q.shape[1] // heads
    grouped = q.view(count, heads, shared, size).permute(1, 2, 0, 3).reshape(1, heads, -1, size)
    seen = None if mask is None else mask.to(q.device).repeat(shared, 1)
    mixed = F.scaled_dot_product_attention(
        grouped, k.transpose(0, 1)[None], v.transpose(0, 1)[None], attn_mask=seen, scale=scale
    )
    return mixed.view(heads, shared, count, size).permute(2, 0, 1, 3).reshape(q.shape)
