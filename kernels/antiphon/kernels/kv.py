"""The paged KV cache of a layer: how pages are laid out, and writing into them.

Only the functions here translate between pages and tokens. Axes: P pages, S tokens that a page has
room for, H kv heads, D head size, W numbers of a 32-bit word in the dtype of the model, T tokens.

Pages of words are laid out as the CPU kernels multiply them (`csrc/kv_layout.h`). Of each head of a
page,

* keys are words of the head by tokens, (P, H, D / W, S, W);
* values are words of tokens by the head, (P, H, S / W, D, W);
* latents, which are both, are stored once, as keys.

The values of a head lie behind its keys, then come the next head's: a decode row reads a page from
its beginning to its end.

Pages of rows are laid out as a GPU reads them: keys and values of a head of a page are the vectors
of its tokens, (P, H, S, D), so that neighbouring threads read 128 neighbouring bits each.

The slot of a token is page * S + its offset in the page.

An 8-bit cache has torch's float8 dtypes, which define the format; torch gathers and copies them as
bytes only. A scale belongs to each tensor: what is stored is the value divided by it.
Source: Micikevicius et al. 2022, arXiv:2209.05433.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


PageLayout = Literal["words", "rows"]
"""How the pages of a device are laid out."""


class KvScales(NamedTuple):
    """Scales of a layer's keys and values in an 8-bit KV cache."""

    key: float = 1.0
    value: float = 1.0


UNSCALED = KvScales()


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSpec:
    """The KV cache of an attention layer: keys and values of each token."""

    heads: int  # key-value heads
    head_size: int  # elements of a head
    # A query attends to itself and the window - 1 tokens before it; None: to all before it.
    window: int | None = None
    # Texts are split into chunks of `window` tokens, and a query attends only to earlier tokens of
    # its own chunk.
    chunked: bool = False

    tensors = 2  # a layer: keys and values

    def heads_of(self, ranks: int) -> int:
        """Heads on one of `ranks` ranks; replicated if there are fewer heads than ranks."""
        return max(1, self.heads // ranks)

    def token_bytes(self, ranks: int, dtype: torch.dtype) -> int:
        return 2 * self.heads_of(ranks) * self.head_size * dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossKvSpec:
    """The cross-attention cache of a layer: keys and values of another sequence than the text."""

    heads: int
    head_size: int  # elements of a head
    source_tokens: int  # of the other sequence, the same in all requests

    tensors = 2  # a layer: keys and values

    def heads_of(self, ranks: int) -> int:
        """Heads on one of `ranks` ranks."""
        return self.heads // ranks


@dataclass(frozen=True, slots=True)
class LayerKvCache:
    """The KV cache of one layer: pages of keys and of values.

    A layer with a latent cache has the latents in both fields.
    """

    group: int  # index of its cache group, which selects the rows' metadata
    keys: Tensor
    values: Tensor
    scales: KvScales = UNSCALED  # both 1, unless the KV cache is 8-bit


def page_slots(page_tokens: int) -> int:
    """Tokens that a page has room for: an even number, so that words are whole."""
    return page_tokens + page_tokens % 2


def key_pages_shape(
    pages: int, page_tokens: int, heads: int, head_size: int, dtype: torch.dtype
) -> tuple[int, ...]:
    """The shape of pages of keys of a model that computes in `dtype`."""
    word = _word(dtype)
    return pages, heads, head_size // word, page_slots(page_tokens), word


def value_pages_shape(
    pages: int, page_tokens: int, heads: int, head_size: int, dtype: torch.dtype
) -> tuple[int, ...]:
    """The shape of pages of values of a model that computes in `dtype`."""
    word = _word(dtype)
    return pages, heads, page_slots(page_tokens) // word, head_size, word


def beside(pages: Tensor, keys: tuple[int, ...], values: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Pages of keys and of values, of these shapes, in memory where a head's lie side by side.

    pages: of each page, and of each head in it, the keys, and behind them the values
    """
    heads = pages.view(keys[0], keys[1], 2, -1)
    return heads[:, :, 0].view(keys), heads[:, :, 1].view(values)


def row_pages_shape(pages: int, page_tokens: int, heads: int, head_size: int) -> tuple[int, ...]:
    """The shape of pages of rows, of keys as of values: as many elements as pages of words have."""
    return pages, heads, page_slots(page_tokens), head_size


def _row_index(pages: Tensor, slots: Tensor) -> tuple[Tensor | slice, ...]:
    size = pages.shape[2]
    return slots // size, slice(None), slots % size


def _in_rows(pages: Tensor) -> bool:
    return pages.dim() == 4


def read_keys(pages: Tensor, slots: Tensor, out: Tensor | None = None) -> Tensor:
    """Read the keys at `slots` (T,) as they are stored, (T, H, D), into `out` if it is given."""
    if _in_rows(pages):
        return _read_rows(pages, slots, out)
    if out is None:
        out = pages.new_empty(len(slots), pages.shape[1], pages.shape[2] * pages.shape[4])
    words = _words(pages)
    _gather(words, _key_index(pages, slots), out.view(words.dtype))
    return out


def read_values(pages: Tensor, slots: Tensor, out: Tensor | None = None) -> Tensor:
    """Read the values at `slots` (T,) as they are stored, (T, H, D), into `out` if it is given."""
    if _in_rows(pages):
        return _read_rows(pages, slots, out)
    if out is None:
        out = pages.new_empty(len(slots), pages.shape[1], pages.shape[3])
    _gather(as_bytes(pages), _value_index(pages, slots), as_bytes(out))
    return out


def _read_rows(pages: Tensor, slots: Tensor, out: Tensor | None) -> Tensor:
    found = as_bytes(pages)[_row_index(pages, slots)].view(pages.dtype)
    return found if out is None else out.copy_(found)


def store_kv(
    k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, scales: KvScales = UNSCALED
) -> None:
    """Write this pass's keys and values (T, H, D) to `slots` (T,) of their pages, in place."""
    store_keys(k, keys, slots, scales.key)
    stored = quantize_fp8(v, values.dtype, scales.value)
    index = _row_index(values, slots) if _in_rows(values) else _value_index(values, slots)
    as_bytes(values)[index] = as_bytes(stored)


def store_keys(k: Tensor, pages: Tensor, slots: Tensor, scale: float) -> None:
    """Write keys or latents (T, H, D), divided by the scale if the cache is 8-bit, into pages."""
    stored = quantize_fp8(k, pages.dtype, scale).contiguous()
    if _in_rows(pages):
        as_bytes(pages)[_row_index(pages, slots)] = as_bytes(stored)
        return
    words = _words(pages)
    words[_key_index(pages, slots)] = stored.view(words.dtype)


def zero_slots(pages: Tensor, slots: Tensor, *, values: bool) -> None:
    """Zero what is stored at `slots` (T,)."""
    if _in_rows(pages):
        as_bytes(pages)[_row_index(pages, slots)] = 0
    elif values:
        as_bytes(pages)[_value_index(pages, slots)] = 0
    else:
        _words(pages)[_key_index(pages, slots)] = 0


def _word(dtype: torch.dtype) -> int:
    return 4 // dtype.itemsize


_INTEGERS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


def _words(pages: Tensor) -> Tensor:
    """Pages of keys as integers of one word, (P, H, D / W, S): torch gathers these much faster."""
    return pages.view(_INTEGERS[pages.shape[4] * pages.itemsize]).squeeze(4)


def _gather(source: Tensor, index: tuple[Tensor | slice, ...], out: Tensor) -> None:
    """Write source[index], where slices are whole, to `out`, which indexing itself cannot do."""
    parts = [None if isinstance(part, slice) else part for part in index]
    torch.ops.aten.index.Tensor_out(source, parts, out=out)


def _key_index(pages: Tensor, slots: Tensor) -> tuple[Tensor | slice, ...]:
    size = pages.shape[3]
    return slots // size, slice(None), slice(None), slots % size


def _value_index(pages: Tensor, slots: Tensor) -> tuple[Tensor | slice, ...]:
    word = pages.shape[4]
    size = pages.shape[2] * word
    offset = slots % size
    return slots // size, slice(None), offset // word, slice(None), offset % word


FP8_MAX: Mapping[torch.dtype, float] = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""The largest finite value of each format."""


def is_fp8(dtype: torch.dtype) -> bool:
    """Whether a dtype is one of the FP8 formats of a cache."""
    return dtype in FP8_MAX


def as_bytes(stored: Tensor) -> Tensor:
    """A view that torch can gather and write: bytes, for FP8."""
    return stored.view(torch.uint8) if is_fp8(stored.dtype) else stored


def quantize_fp8(values: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Quantize to FP8 after dividing by the scale, rounding to nearest, ties to even.

    Values beyond the largest finite value, infinities included, saturate; a NaN stays a NaN.
    """
    if not is_fp8(dtype):
        return values
    divided = values.float() / torch.tensor(scale, device=values.device)
    return divided.clamp_(-FP8_MAX[dtype], FP8_MAX[dtype]).to(dtype)
