"""Attention over latents in both of its forms, against float64 written out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tests.kernels.rows import Row, each_row, rows_of

from antiphon.kernels import latent
from antiphon.kernels.attention import AttentionMetadata, KvShape, paged_attention
from antiphon.kernels.kv import (
    KvScales,
    LayerKvCache,
    key_pages_shape,
    quantize_fp8,
    store_keys,
)
from antiphon.kernels.latent import LatentMetadata, LatentSizes, latent_attention
from antiphon.kernels.linear_tiled import linear_heads

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.kernels.latent import LatentOps

PAGES, PAGE_TOKENS = 400, 4
BACKENDS = rows_of(paged_attention)
SMALL = LatentSizes(heads=3, latent=16, content=6, position=4, value=10)
NARROW_VALUES = LatentSizes(heads=2, latent=24, content=12, position=4, value=8)
DEEPSEEK = LatentSizes(heads=4, latent=512, content=128, position=64, value=128)

every_backend = each_row(paged_attention, "attend")


class Calls:
    """The operations of a pass, of which attention is a row of the selection table."""

    def __init__(self, attend: Row) -> None:
        self.paged_attention, self.linear_heads = attend, linear_heads.reference


class Weights:
    """A latent-up weight (Q, C + V, R), multiplied in the dtype of what it meets."""

    def __init__(self, sizes: LatentSizes, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        size = (sizes.heads, sizes.content + sizes.value, sizes.latent)
        weight = torch.randn(size, generator=generator) * sizes.latent**-0.5
        self.weight, self._content = weight.bfloat16().float(), sizes.content
        self.expanded = self.absorbed = 0

    def expand(self, latents: Tensor) -> Tensor:
        self.expanded += 1
        return torch.einsum("nr,hor->nho", latents, self.weight.to(latents.dtype))

    def absorb(self, _: LatentOps, content: Tensor) -> Tensor:
        self.absorbed += 1
        keys = self.weight[:, : self._content].to(content.dtype)
        return torch.einsum("thc,hcr->thr", content, keys)

    def restore(self, _: LatentOps, mixed: Tensor) -> Tensor:
        values = self.weight[:, self._content :].to(mixed.dtype)
        return torch.einsum("thr,hvr->thv", mixed, values)


class Case:
    """Rows over a paged cache of latents; what no row may read is NaN."""

    def __init__(
        self,
        sizes: LatentSizes,
        query_len: list[int],
        prefix: list[int],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        generator = torch.Generator().manual_seed(5)
        self.sizes, self.weights = sizes, Weights(sizes)
        query = np.array(query_len, np.int32)
        kv = query + np.array(prefix, np.int32)
        table = np.full((len(kv), -(-int(kv.max()) // PAGE_TOKENS) + 1), -1, np.int32)
        free = np.random.default_rng(5).permutation(PAGES).astype(np.int32)
        pages = key_pages_shape(PAGES, PAGE_TOKENS, 1, sizes.head_size, dtype)
        self.cache = torch.full(pages, torch.nan, dtype=dtype)
        self.latents: list[Tensor] = []
        for row, length in enumerate(kv):
            pages = -(-int(length) // PAGE_TOKENS)
            table[row, :pages], free = free[:pages], free[pages:]
            kept = torch.randn(int(length), sizes.head_size, generator=generator).to(dtype)
            seen = np.arange(length)
            slots = table[row, seen // PAGE_TOKENS] * PAGE_TOKENS + seen % PAGE_TOKENS
            store_keys(kept[:, None], self.cache, torch.as_tensor(slots), 1.0)
            self.latents.append(kept)
        shape = KvShape(PAGE_TOKENS, 1, sizes.heads, sizes.head_size, dtype)
        self.rows = AttentionMetadata(shape, table, query, kv)
        width = sizes.content + sizes.position
        size = (int(query.sum()), sizes.heads, width)
        self.q = torch.randn(size, generator=generator).to(dtype)
        self.scale = width**-0.5

    def run(self, attend: Row, *, absorbed: bool = False) -> Tensor:
        rows = LatentMetadata(self.rows, self.sizes, absorbed=absorbed)
        cache = LayerKvCache(0, self.cache, self.cache)
        return latent_attention(self.q, cache, rows, self.weights, self.scale, Calls(attend))

    def textbook(self) -> Tensor:
        """In float64, each query by itself."""
        sizes, token, out = self.sizes, 0, []
        for row, kept in enumerate(latents.double() for latents in self.latents):
            made = self.weights.expand(kept[:, : sizes.latent])
            shared = kept[:, None, sizes.latent :].expand(-1, sizes.heads, -1)
            keys = torch.cat((made[..., : sizes.content], shared), dim=-1)
            for i in range(self.rows.query_len[row]):
                seen = int(self.rows.kv_len[row] - self.rows.query_len[row]) + i + 1
                scores = torch.einsum("hd,nhd->hn", self.q[token].double(), keys[:seen])
                weights = (scores * self.scale).softmax(dim=-1)
                out.append(torch.einsum("hn,nhv->hv", weights, made[:seen, :, sizes.content :]))
                token += 1
        return torch.stack(out)


ROWS = {
    "one decode": ([1], [30]),
    "decodes": ([1] * 4, [0, 1, 63, 130]),
    "a prompt": ([40], [0]),
    "prompts": ([9, 30, 17], [0, 0, 0]),
    "a chunk": ([30], [7]),
    "a short chunk after much": ([2], [200]),
    "all at once": ([1, 40, 1, 3, 25, 2], [40, 0, 100, 9, 5, 0]),
}


@every_backend
@pytest.mark.parametrize("absorbed", [False, True], ids=["as cheaper", "absorbed"])
@pytest.mark.parametrize("format_", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_latents_may_be_kept_in_eight_bits(
    rows, format_: torch.dtype, absorbed: bool, attend: Row
) -> None:
    case, scale = Case(SMALL, *rows), 0.3
    case.latents = [
        quantize_fp8(latents, format_, scale).float() * scale for latents in case.latents
    ]
    expected = case.textbook().float()
    kept = quantize_fp8(case.cache, format_, scale)
    cache = LayerKvCache(0, kept, kept, KvScales(scale))
    latent_rows = LatentMetadata(case.rows, case.sizes, absorbed=absorbed)
    found = latent_attention(case.q, cache, latent_rows, case.weights, case.scale, Calls(attend))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@every_backend
@pytest.mark.parametrize("absorbed", [False, True], ids=["as cheaper", "absorbed"])
@pytest.mark.parametrize("sizes", [SMALL, NARROW_VALUES], ids=["wide values", "narrow values"])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_both_forms_equal_the_textbook(rows, sizes: LatentSizes, absorbed: bool, attend: Row):
    case = Case(sizes, *rows)
    torch.testing.assert_close(
        case.run(attend, absorbed=absorbed), case.textbook().float(), atol=1e-5, rtol=1e-5
    )


def test_prompts_are_expanded_and_decodes_absorbed() -> None:
    for rows, expanded, absorbed in (
        (([1, 1], [30, 5]), 0, 1),
        (([40, 9], [0, 0]), 1, 0),
        (([40, 1], [0, 30]), 1, 1),
        (([2], [200]), 0, 1),
    ):
        case = Case(DEEPSEEK, *rows)
        case.run(BACKENDS[0])
        assert (case.weights.expanded, case.weights.absorbed) == (expanded, absorbed), rows


def test_no_more_is_expanded_at_once_than_there_is_room_for(monkeypatch) -> None:
    per_key = 2 * SMALL.heads * SMALL.wide * 4
    monkeypatch.setattr(latent, "EXPANDED_BYTES_MAX", 30 * per_key)
    case = Case(SMALL, [14, 14, 20, 31, 5], [0] * 5)
    got = case.run(BACKENDS[0])
    assert (case.weights.expanded, case.weights.absorbed) == (2, 1), "28, then 25; 31 is too much"
    torch.testing.assert_close(got, case.textbook().float(), atol=1e-5, rtol=1e-5)


@each_row(paged_attention, "attend", invariant=True)
def test_in_bfloat16_absorbing_is_about_as_exact_as_expanding(attend: Row) -> None:
    case = Case(DEEPSEEK, [300, 40], [0, 0], torch.bfloat16)
    exact = case.textbook()
    expanded, absorbed = (
        float((case.run(attend, absorbed=form).double() - exact).std()) for form in (False, True)
    )
    assert (case.weights.absorbed, case.weights.expanded) == (1, 3), "two are of the textbook"
    assert 0 < absorbed <= 2 * expanded
