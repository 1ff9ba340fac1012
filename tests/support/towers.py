"""Comparisons that all towers share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import safe_open

from antiphon.config.settings import Settings
from antiphon.encoder.model import VisionModel, open_model
from antiphon.encoder.tensor_files import TensorFiles
from antiphon.model_card.vision.grid_sizes import GridSizes
from antiphon.model_card.vision.slices import SliceTiling

if TYPE_CHECKING:
    from pathlib import Path

    import pytest
    from numpy.typing import NDArray
    from torch import Tensor

PARTS = (
    *("visual.", "vision_tower.", "vision_model.", "multi_modal_projector.", "image_newline"),
    *("visual_projection.", "projector.", "mlp_AR.", "embed_vision.", "model.merger."),
    "image_embed.",
)
"""Names of what encoders read, or where they begin."""


def opened(folder: Path) -> VisionModel:
    return open_model(Settings(), folder)


def embedding(model: VisionModel, data: bytes) -> NDArray[np.float32]:
    """The rows of an image, (T, C)."""
    made = model.embed(model.preprocess.decoded(data))
    recipe = model.preprocess.recipe
    if not isinstance(recipe.grid or recipe.tiling, GridSizes | SliceTiling):
        # Of these a narrow one may have more.
        assert len(made.data) <= model.embedding_bytes
    return np.frombuffer(made.data, "<f4").reshape(made.tokens, made.hidden)


def check_rows(found: NDArray[np.float32], right: Tensor) -> None:
    assert found.shape == right.shape
    assert np.abs(found - right.numpy()).max() / right.std().item() < 2e-5


def check_every_tensor(
    folder: Path,
    data: bytes,
    monkeypatch: pytest.MonkeyPatch,
    idle: tuple[str, ...] = (),
    unfelt: tuple[str, ...] = (),
) -> None:
    """Every tensor of the tower and of what is behind it is read, once, and matters.

    `idle` are parts of the names of those that the model has and does not use, `unfelt` endings of
    those that change nothing: a bias of keys adds the same to all scores of a query.
    """
    read, names = TensorFiles.read, list[str]()

    def listing(files: TensorFiles, name: str, *shape: int) -> Tensor:
        names.append(name)
        return read(files, name, *shape)

    monkeypatch.setattr(TensorFiles, "read", listing)
    model = opened(folder)
    pixels = model.preprocess.decoded(data)
    right = np.frombuffer(model.embed(pixels).data, "<f4")
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        stored = [name for name in file.keys() if any(part in name for part in PARTS)]  # noqa: SIM118
    used = [name for name in stored if not any(part in name for part in idle)]
    assert sorted(names) == sorted(_own(name) for name in used)
    for name in names:
        if name.endswith(unfelt):
            continue

        def changed(files: TensorFiles, each: str, *shape: int, name: str = name) -> Tensor:
            tensor = read(files, each, *shape)
            ramp = torch.linspace(0, 1, tensor.numel()).view_as(tensor)
            return tensor + ramp if each == name else tensor

        monkeypatch.setattr(TensorFiles, "read", changed)
        found = np.frombuffer(opened(folder).embed(pixels).data, "<f4")
        assert np.abs(found - right).max() > 1e-3, name
    monkeypatch.setattr(TensorFiles, "read", read)


def _own(name: str) -> str:
    """What a tensor is called where it is read."""
    for part in ("model.", "projector.", "mm_projector.", "mlp_AR.", "merger."):
        name = name.removeprefix(part)
    for part in ("visual.", "vision_tower.", "vision_model.", "image_embed.", "img_processor."):
        name = name.rpartition(part)[2]
    return name
