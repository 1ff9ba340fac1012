"""A latent cache: its pages, its group, and the bits of what is computed over it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from tests.kernels.rows import ISAS
from tests.models.parity import Saved, save, texts
from tests.models.specs import BY_NAME
from tests.models.stepper import Stepper, spy_on_logits
from tests.support.models import load, open_model

from antiphon.kernels.op import KernelUnavailable
from antiphon.model_worker.cache.groups import GroupKind
from antiphon.model_worker.runner.model_runner import ModelRunner
from antiphon.model_worker.runner.pools import cache_groups

if TYPE_CHECKING:
    from pathlib import Path

needs_kernels = pytest.mark.skipif(not ISAS, reason="the CPU's own kernels are not built")


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save(BY_NAME["deepseek-v3"], tmp_path_factory.mktemp("deepseek"))


def test_all_layers_share_a_group_of_one_vector_a_token(deepseek: Saved) -> None:
    model = open_model(deepseek.folder, pages=8, dtype="bfloat16")
    (group,) = model.groups
    assert (group.kind, group.layers) == (GroupKind.LATENT, (0, 1, 2))
    latent, position, item = 16, 8, 2
    assert group.page_bytes == 4 * 3 * (latent + position) * item


def bits(folder: Path, dtype: str, chunks: list[int], others: int) -> torch.Tensor:
    """Logits of a prompt in such chunks, beside so many others, by a deterministic runner."""
    model = load(folder, dtype=dtype, linear="packed")
    groups = cache_groups(model.spec, model.build, page_tokens=4, pages=256)
    runner = ModelRunner(model, groups, deterministic=True)
    batch = Stepper(runner, groups)
    seen = spy_on_logits(runner)
    batch.add(texts()[-1])
    for other in range(others):
        batch.add(texts()[other % 2])
    parts: list[torch.Tensor] = []
    for index, chunk in enumerate(chunks):
        beside = dict.fromkeys(range(1, others + 1), 3) if index < 3 else {}
        batch.step({0: chunk, **beside}, all_logits=True)
        parts.append(seen[-1][:chunk])
    return torch.cat(parts)


@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "glm4-moe", "deepseek-v2", "deepseek-v3"])
def test_deterministic_bits_do_not_depend_on_chunks_and_neighbours(
    tmp_path: Path, name: str, dtype: str
) -> None:
    folder, length = save(BY_NAME[name], tmp_path).folder, len(texts()[-1])
    alone = bits(folder, dtype, [1] * length, others=0)
    for chunks, others in (([length], 0), ([length], 5), ([7, 20, length - 27], 2)):
        assert torch.equal(bits(folder, dtype, chunks, others), alone), (chunks, others)


@needs_kernels
def test_sinks_cannot_be_deterministic_yet(tmp_path: Path) -> None:
    folder = save(BY_NAME["gpt-oss"], tmp_path).folder
    with pytest.raises(KernelUnavailable, match=r"attention\.shaped runs on torch"):
        bits(folder, "float32", [1], others=0)
