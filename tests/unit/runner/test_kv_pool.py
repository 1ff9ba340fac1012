from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tests.support.models import open_model

from antiphon.model_worker.runner.pools import KvPool, PageCodec, PageCorrupt

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(params=["float32", "bfloat16"])
def pool(llama: Path, request: pytest.FixtureRequest) -> KvPool:
    model = open_model(llama, pages=6, dtype=request.param)
    pool = model.runner.pools[0]
    for layer in range(4):
        for half in pool.layer(layer):
            half.copy_(torch.randn(half.shape))
    return pool


def page(pool: KvPool, index: int) -> list[torch.Tensor]:
    return [half[index].clone() for layer in range(4) for half in pool.layer(layer)]


def test_a_page_comes_back_as_it_went_and_touches_no_other(pool: KvPool) -> None:
    codec = PageCodec(pool)
    others = [page(pool, index) for index in (0, 1, 2, 3, 5)]
    source = page(pool, 1)
    codec.decode(4, codec.encode(1))
    assert all(map(torch.equal, page(pool, 4), source))
    for index, before in zip((0, 1, 2, 3, 5), others, strict=True):
        assert all(map(torch.equal, page(pool, index), before))


@pytest.mark.parametrize("damage", ["a bit", "cut", "longer"])
def test_damaged_bytes_are_refused_and_change_nothing(pool: KvPool, damage: str) -> None:
    codec = PageCodec(pool)
    encoded = bytearray(codec.encode(1))
    if damage == "a bit":
        encoded[int(np.random.default_rng(0).integers(len(encoded)))] ^= 1
    before = page(pool, 4)
    data = {"cut": encoded[:-1], "longer": encoded + b"\0"}.get(damage, encoded)
    with pytest.raises(PageCorrupt):
        codec.decode(4, bytes(data))
    assert all(map(torch.equal, page(pool, 4), before))


def test_zeroing_forgets_the_named_tokens_only(pool: KvPool) -> None:
    before = page(pool, 2)
    pool.zero(torch.tensor([2 * 4 + 1, 2 * 4 + 3]))
    for half, old in zip(page(pool, 2), before, strict=True):
        assert torch.equal(half[[0, 2]], old[[0, 2]])
        assert not half[[1, 3]].any()
