from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from tests.support.models import open_model

if TYPE_CHECKING:
    from pathlib import Path

    from antiphon.model_worker.runner.pools import KvPool


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


def test_zeroing_forgets_the_named_tokens_only(pool: KvPool) -> None:
    before = page(pool, 2)
    pool.zero(torch.tensor([2 * 4 + 1, 2 * 4 + 3]))
    for half, old in zip(page(pool, 2), before, strict=True):
        assert torch.equal(half[[0, 2]], old[[0, 2]])
        assert not half[[1, 3]].any()
