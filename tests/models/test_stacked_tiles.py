"""InternVL's images, cut into tiles, against transformers: pixels, tokens, tower and projector."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.support.image_families import (
    card_of,
    check_low_detail,
    check_refused,
    drawn_sizes,
    processed,
    reference,
)
from tests.support.internvl import PROCESSOR, write_internvl
from tests.support.llava import picture
from tests.support.models import change_config
from tests.support.towers import check_every_tensor, check_rows, embedding, opened
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from antiphon.model_card.vision.stacked_tiles import AspectTiling, StackedTiles
from antiphon.model_worker.model.config_file import read_config
from antiphon.model_worker.model.errors import UnsupportedVariant
from antiphon.model_worker.model.families.multimodal import declare_internvl

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SIZES = [(40, 33), (200, 31), (9, 70), (28, 28), (300, 299), (5, 3), (60, 29)]
WITH_RMS = {"norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": True}
"""The tower of the largest models, and biases."""


@pytest.fixture(scope="module", params=[{}, WITH_RMS], ids=["layer", "rms"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_internvl(tmp_path_factory.mktemp("internvl"), **request.param)


def test_pixels_tokens_and_embeddings_are_those_of_transformers(folder: Path) -> None:
    """The card comes to as many rows by an image's size as the model makes of it."""
    model, card, theirs = opened(folder), card_of(folder, StackedTiles), reference(folder)
    processor: Any = GotOcr2ImageProcessorPil(**PROCESSOR, crop_to_patches=True)
    for size in SIZES:
        data = picture(1, *size)
        expected = np.asarray(processed(processor, data)["pixel_values"])
        found = model.preprocess(data)
        assert len(found) <= model.preprocess.recipe.frames_max
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)
        assert card.pieces(*size) == ("<img>", 4 * len(expected), "</img>")
        with torch.inference_mode():
            right = theirs.model.get_image_features(torch.as_tensor(expected)).pooler_output
        check_rows(embedding(model, data), right.flatten(0, 1))


def test_every_tensor_matters(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_every_tensor(folder, picture(5, 60, 29), monkeypatch)


@pytest.mark.parametrize(
    "changes", [{"vision_feature_layer": -2}, {"vision_config": {"use_mean_pooling": False}}]
)
def test_another_layer_and_a_norm_at_the_end(changes: Mapping[str, Any], tmp_path: Path) -> None:
    write_internvl(tmp_path, **changes.get("vision_config", {}))
    change_config(tmp_path, **{k: v for k, v in changes.items() if k != "vision_config"})
    model, data = opened(tmp_path), picture(3, 60, 29)
    pixels = torch.as_tensor(model.preprocess(data))
    with torch.inference_mode():
        right = reference(tmp_path).model.get_image_features(pixels)
    check_rows(embedding(model, data), right.pooler_output.flatten(0, 1))


@pytest.mark.parametrize(("least", "most"), [(1, 12), (4, 6), (1, 1)])
def test_grids_are_those_of_transformers(least: int, most: int) -> None:
    """As published, and with a minimum."""
    recipe = {"size": {"height": 448, "width": 448}, "min_patches": least, "max_patches": most}
    processor: Any = GotOcr2ImageProcessorPil(**recipe, crop_to_patches=True)
    tiling = AspectTiling(tile=448, least=least, most=most)
    known = ((448, 448), (896, 448), (800, 600), (1344, 896), (2000, 10))
    for width, height in drawn_sizes(3000, 60, *known, seed=2):
        frames = processor.get_number_of_image_patches(height, width)
        assert tiling.frames(width, height) == frames <= tiling.frames_max


def test_grids_of_many_tiles_are_found_at_once() -> None:
    """Of all pairs of edges, 400 million, few are grids of no more tiles."""
    assert AspectTiling(tile=448, most=20_000).grid(3000, 1000) == (9, 3)


def test_low_detail_is_one_tile(folder: Path) -> None:
    card = card_of(folder, StackedTiles)
    decoded = check_low_detail(opened(folder), card, ("<img>", 4, "</img>"))
    assert decoded.pixels.shape == (1, 28, 28, 3)


@pytest.mark.parametrize(
    ("changes", "recipe", "complaint"),
    [
        ({"downsample_ratio": 0.4}, {}, "downsample_ratio = 0.4: must be 1 by a whole"),
        ({"downsample_ratio": 1 / 3}, {}, "3 patches must divide 4"),
        ({"vision_feature_select_strategy": "full"}, {}, "must be default"),
        ({}, {"size": {"height": 30, "width": 30}}, "makes tiles of 30 pixels"),
        ({}, {"size": {"height": 30, "width": 28}}, "size must be a square"),
        ({"vision_config": {"image_size": [28, 14]}}, {}, "image_size .* must be a square"),
    ],
)
def test_what_does_not_fit_is_named(
    changes: dict[str, Any],
    recipe: dict[str, Any],
    complaint: str,
    folder: Path,
    tmp_path: Path,
) -> None:
    check_refused(folder, tmp_path, complaint, {**PROCESSOR, **recipe}, **changes)


def test_another_text_model_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    text = json.loads((folder / "config.json").read_text())["text_config"]
    change_config(tmp_path, text_config=text | {"model_type": "phi3"})
    reason = "model_type 'phi3' is not supported in InternVL: there are qwen2, qwen3, qwen3_moe"
    with pytest.raises(UnsupportedVariant, match=re.escape(reason)):
        declare_internvl(read_config(tmp_path))
