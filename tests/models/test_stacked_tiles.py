"""InternVL's images, cut into tiles, against transformers: pixels, tokens, tower and projector."""

from __future__ import annotations

import io
import json
import re
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tests.support.internvl import PROCESSOR, write_internvl
from tests.support.llava import picture
from tests.support.models import change_config
from tests.support.towers import check_every_tensor, check_rows, embedding, opened
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from antiphon.config.errors import ConfigError
from antiphon.model_card.vision.stacked_tiles import AspectTiling, StackedTiles
from antiphon.model_card.vision.vision_card import read_vision
from antiphon.model_worker.model.config_file import read_config
from antiphon.model_worker.model.errors import UnsupportedVariant
from antiphon.model_worker.model.families.multimodal import declare_internvl
from antiphon.wire.claim import PixelLimits

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SIZES = [(40, 33), (200, 31), (9, 70), (28, 28), (300, 299), (5, 3), (60, 29)]
WITH_RMS = {"norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": True}
"""The tower of the largest models, and biases."""


@pytest.fixture(scope="module", params=[{}, WITH_RMS], ids=["layer", "rms"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_internvl(tmp_path_factory.mktemp("internvl"), **request.param)


def card_of(folder: Path) -> StackedTiles:
    card = read_vision(folder)
    assert isinstance(card, StackedTiles)
    return card


def test_pixels_tokens_and_embeddings_are_those_of_transformers(folder: Path) -> None:
    """The card comes to as many rows by an image's size as the model makes of it."""
    made = transformers.InternVLForConditionalGeneration.from_pretrained(folder)
    model, card, reference = opened(folder), card_of(folder), cast("Any", made.eval())
    processor: Any = GotOcr2ImageProcessorPil(**PROCESSOR, crop_to_patches=True)
    for size in SIZES:
        data = picture(1, *size)
        with Image.open(io.BytesIO(data)) as image:
            expected = np.asarray(processor([image], return_tensors="np")["pixel_values"])
        found = model.preprocess(data)
        assert len(found) <= model.preprocess.recipe.frames_max
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)
        assert card.pieces(*size) == ("<img>", 4 * len(expected), "</img>")
        with torch.inference_mode():
            right = reference.model.get_image_features(torch.as_tensor(expected)).pooler_output
        check_rows(embedding(model, data), right.flatten(0, 1))


def test_every_tensor_matters(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_every_tensor(folder, picture(5, 60, 29), monkeypatch)


@pytest.mark.parametrize(
    "changes", [{"vision_feature_layer": -2}, {"vision_config": {"use_mean_pooling": False}}]
)
def test_another_layer_and_a_norm_at_the_end(changes: Mapping[str, Any], tmp_path: Path) -> None:
    write_internvl(tmp_path, **changes.get("vision_config", {}))
    change_config(tmp_path, **{k: v for k, v in changes.items() if k != "vision_config"})
    made = transformers.InternVLForConditionalGeneration.from_pretrained(tmp_path)
    model, data = opened(tmp_path), picture(3, 60, 29)
    with torch.inference_mode():
        right = cast("Any", made.eval()).model.get_image_features(
            torch.as_tensor(model.preprocess(data))
        )
    check_rows(embedding(model, data), right.pooler_output.flatten(0, 1))


@pytest.mark.parametrize(("least", "most"), [(1, 12), (4, 6), (1, 1)])
def test_grids_are_those_of_transformers(least: int, most: int) -> None:
    """As published, and with a minimum."""
    recipe = {"size": {"height": 448, "width": 448}, "min_patches": least, "max_patches": most}
    processor: Any = GotOcr2ImageProcessorPil(**recipe, crop_to_patches=True)
    tiling = AspectTiling(tile=448, least=least, most=most)
    sizes = np.random.default_rng(2).integers(1, 3000, (60, 2)).tolist()
    for width, height in [*sizes, (448, 448), (896, 448), (800, 600), (1344, 896), (2000, 10)]:
        frames = processor.get_number_of_image_patches(height, width)
        assert tiling.frames(width, height) == frames <= tiling.frames_max


def test_low_detail_is_one_tile(folder: Path) -> None:
    card, model, limits = card_of(folder), opened(folder), PixelLimits(low=True)
    low = card.within(limits)
    assert low.pieces(200, 31) == ("<img>", 4, "</img>")
    assert low.processing != card.processing
    assert model.preprocess.decoded(picture(1, 200, 31), 0, 0, limits).pixels.shape == (
        1,
        28,
        28,
        3,
    )


@pytest.mark.parametrize(
    ("changes", "recipe", "complaint"),
    [
        ({"downsample_ratio": 0.4}, PROCESSOR, "downsample_ratio = 0.4: must be 1 by a whole"),
        ({"downsample_ratio": 1 / 3}, PROCESSOR, "3 patches must divide 4"),
        ({"vision_feature_select_strategy": "full"}, PROCESSOR, "must be default"),
        ({}, {"size": {"height": 30, "width": 30}}, "makes tiles of 30 pixels"),
        ({}, {"size": {"height": 30, "width": 28}}, "size must be a square"),
        ({"vision_config": {"image_size": [28, 14]}}, PROCESSOR, "image_size .* must be a square"),
    ],
)
def test_what_does_not_fit_is_named(
    changes: Mapping[str, Any],
    recipe: Mapping[str, Any],
    complaint: str,
    folder: Path,
    tmp_path: Path,
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    change_config(tmp_path, **changes)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(recipe))
    with pytest.raises(ConfigError, match=complaint):
        opened(tmp_path)


def test_another_text_model_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    text = json.loads((folder / "config.json").read_text())["text_config"]
    change_config(tmp_path, text_config=text | {"model_type": "phi3"})
    reason = "model_type 'phi3' is not supported in InternVL: there are qwen2, qwen3, qwen3_moe"
    with pytest.raises(UnsupportedVariant, match=re.escape(reason)):
        declare_internvl(read_config(tmp_path))
