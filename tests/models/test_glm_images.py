"""Images of GLM-4V against transformers: sizes, pixels, tower and merger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.models.test_position_axes import check_image_positions
from tests.support.image_families import (
    card_of,
    check_batch,
    check_refused,
    drawn_sizes,
    processed,
    reference,
)
from tests.support.llava import picture
from tests.support.qwen_vl import GLM_PROCESSOR, patches, write_glm4v
from tests.support.towers import check_every_tensor, opened
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

from antiphon.model_card.vision.grid_sizes import GridSizes
from antiphon.model_card.vision.grids import GridImages

if TYPE_CHECKING:
    from pathlib import Path

SIZES = [(40, 33), (200, 31), (9, 70), (84, 84), (1, 90), (8, 8), (300, 299), (13, 12), (60, 4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_glm4v(tmp_path_factory.mktemp("glm4v"))


def test_pixels_tokens_and_embeddings_are_those_of_transformers(folder: Path) -> None:
    """Embeddings are those of images in one batch, where ours are alone."""
    theirs: Any = Glm4vImageProcessorPil(**GLM_PROCESSOR)
    model, card, pixels = opened(folder), card_of(folder, GridImages), list[torch.Tensor]()
    for size in SIZES:
        expected = processed(theirs, picture(1, *size))
        pixels.append(torch.as_tensor(model.preprocess(picture(1, *size))))
        found = patches([pixels[-1]])["pixel_values"]
        np.testing.assert_allclose(found, expected["pixel_values"], rtol=0, atol=4e-6)
        grid = expected["image_grid_thw"][0].tolist()
        assert card.pieces(*size) == (grid[1] * grid[2] // 4,)
        assert card.columns(*size) == grid[2] // 2
    check_batch(folder, model, SIZES, patches(pixels))


def test_positions_are_those_of_transformers(folder: Path) -> None:
    check_image_positions(reference(folder).model)


def test_every_tensor_matters(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_every_tensor(folder, picture(5, 35, 30), monkeypatch)


def test_published_sizes_are_those_of_transformers() -> None:
    processor: Any = Glm4vImageProcessorPil()
    sizes = GridSizes(patch=14, merge=2, pixels_min=6272, pixels_max=5880000, grows=True)
    for width, height in drawn_sizes(4000, 40, (28, 28), (27, 40), (5000, 30), (3, 200)):
        if max(width, height) > 200 * min(width, height):
            continue
        across, down = sizes.scaled(width, height)
        assert across * down // 196 == processor.get_number_of_image_patches(height, width, {})


@pytest.mark.parametrize(
    ("tower", "recipe", "complaint"),
    [
        ({"attention_bias": True}, {}, "attention_bias = true is not supported"),
        ({}, {"size": {"shortest_edge": 3, "longest_edge": 8}}, "multiples of temporal_patch"),
        ({}, {"patch_size": 14}, "makes patches of 14 pixels"),
    ],
)
def test_what_does_not_fit_is_named(
    tower: dict[str, Any], recipe: dict[str, Any], complaint: str, folder: Path, tmp_path: Path
) -> None:
    recipe = {**GLM_PROCESSOR, **recipe}
    check_refused(folder, tmp_path, complaint, recipe, vision_config=tower)
