"""Draft models beside tiny models, and a drafter of n-grams."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from tests.models.tiny import write_llama
from tests.support.models import load, take_tensors

from antiphon.config.speculation import SpeculationConfig
from antiphon.model_worker.batching.slot_tables import SlotTables
from antiphon.model_worker.runner.draft_model import DraftModel
from antiphon.model_worker.speculation.ngram import NgramDrafter
from antiphon.model_worker.speculation.request_texts import RequestTexts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

    from antiphon.model_worker.runner.opening import OpenModel
    from antiphon.model_worker.speculation.policy import Drafter


def noisy(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same model with errors, so that some of its drafts are right."""
    dice = torch.Generator().manual_seed(3)
    return {
        name: tensor + 0.1 * tensor.std() * torch.randn(tensor.shape, generator=dice)
        for name, tensor in tensors.items()
    }


def same(folder: Path) -> Path:
    return write_llama(folder)


def with_noise(folder: Path) -> Path:
    tensors = take_tensors(write_llama(folder))
    save_file(noisy(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def stubborn(folder: Path) -> Path:
    """It drafts nothing but the first token."""
    tensors = take_tensors(write_llama(folder))
    tensors["model.norm.weight"] = torch.zeros_like(tensors["model.norm.weight"])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def other(folder: Path) -> Path:
    return write_llama(folder, seed=9)


DRAFT_MODELS: Mapping[str, Callable[[Path], Path]] = {
    "the model itself": same,
    "with noise": with_noise,
    "another": other,
}


def with_draft(opened: OpenModel, draft: DraftModel) -> OpenModel:
    groups = (*opened.groups, draft.group)
    opened.runner.draft = draft
    opened.runner._tables = SlotTables(groups)
    return replace(opened, groups=groups, draft=draft)


def open_draft(
    folder: Path, pages: int = 4096, dtype: str = "float32", linear: str = "plain"
) -> DraftModel:
    model = load(folder, dtype=dtype, linear=linear)
    return DraftModel(model, page_tokens=4, pages=pages)


def by_ngrams(_: object = None) -> Drafter:
    return RequestTexts(NgramDrafter(SpeculationConfig(algorithm="ngram", verify_tokens=5)))
