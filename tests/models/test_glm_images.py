"""Images of GLM-4V against transformers: sizes, pixels, tower and merger."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tests.models.test_position_axes import places
from tests.support.llava import picture
from tests.support.models import change_config
from tests.support.qwen_vl import GLM_PROCESSOR, patches, write_glm4v
from tests.support.towers import check_every_tensor, check_rows, embedding, opened
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

from antiphon.config.errors import ConfigError
from antiphon.model_card.vision.grid_sizes import GridSizes
from antiphon.model_card.vision.grids import GridImages
from antiphon.model_card.vision.vision_card import read_vision
from antiphon.model_worker.batching.positions import media_positions
from antiphon.wire.media import MediumSpan

if TYPE_CHECKING:
    from pathlib import Path

SIZES = [(40, 33), (200, 31), (9, 70), (84, 84), (1, 90), (8, 8), (300, 299), (13, 12), (60, 4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_glm4v(tmp_path_factory.mktemp("glm4v"))


def test_pixels_tokens_and_embeddings_are_those_of_transformers(folder: Path) -> None:
    """Embeddings are those of images in one batch, where ours are alone."""
    theirs: Any = Glm4vImageProcessorPil(**GLM_PROCESSOR)
    model, card, pixels = opened(folder), read_vision(folder), list[torch.Tensor]()
    assert isinstance(card, GridImages)
    for size in SIZES:
        with Image.open(io.BytesIO(picture(1, *size))) as image:
            expected = theirs([image], return_tensors="np")
        pixels.append(torch.as_tensor(model.preprocess(picture(1, *size))))
        found = patches([pixels[-1]])
        np.testing.assert_allclose(
            found["pixel_values"], expected["pixel_values"], rtol=0, atol=4e-6
        )
        grid = expected["image_grid_thw"][0].tolist()
        assert card.pieces(*size) == (grid[1] * grid[2] // 4,)
        assert card.columns(*size) == grid[2] // 2
    made = transformers.Glm4vForConditionalGeneration.from_pretrained(folder)
    reference: Any = made.eval()
    with torch.inference_mode():
        features = reference.model.get_image_features(**patches(pixels)).pooler_output
    for size, right in zip(SIZES, features, strict=True):
        check_rows(embedding(model, picture(1, *size)), right)


def test_positions_are_those_of_transformers(folder: Path) -> None:
    """Of two images, and text before, between and behind them."""
    made = transformers.Glm4vForConditionalGeneration.from_pretrained(folder)
    model: Any = made.model
    types = torch.tensor([[0, 0, *[1] * 15, 0, 0, 0, *[1] * 8, 0, 0]])
    grids = torch.tensor([[1, 6, 10], [1, 8, 4]])
    expected, _ = model.get_rope_index(types, types, image_grid_thw=grids)
    spans = [
        MediumSpan(start=2, tokens=15, key=bytes(32), columns=5),
        MediumSpan(start=20, tokens=8, key=bytes(32), columns=2),
    ]
    positions, offset = media_positions((span, places(span)) for span in spans)
    rest = np.tile(np.arange(positions.shape[1], 30) + offset, (3, 1))
    np.testing.assert_array_equal(np.concatenate([positions, rest], axis=1), expected[:, 0])


def test_every_tensor_matters(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_every_tensor(folder, picture(5, 35, 30), monkeypatch)


def test_published_sizes_are_those_of_transformers() -> None:
    processor: Any = Glm4vImageProcessorPil()
    sizes = GridSizes(patch=14, merge=2, pixels_min=6272, pixels_max=5880000, grows=True)
    drawn = np.random.default_rng(3).integers(1, 4000, (40, 2)).tolist()
    for width, height in [*drawn, (28, 28), (27, 40), (5000, 30), (3, 200)]:
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
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    config = json.loads((folder / "config.json").read_text())
    change_config(tmp_path, vision_config=config["vision_config"] | tower)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**GLM_PROCESSOR, **recipe}))
    with pytest.raises(ConfigError, match=complaint):
        opened(tmp_path)
