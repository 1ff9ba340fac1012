"""Idefics3's images, cut into tiles, against transformers: prompts, pixels, tower and connector."""

from __future__ import annotations

import json
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers
from tests.support.image_families import (
    LOW,
    card_of,
    changed,
    check_refused,
    processed,
    reference,
    written,
)
from tests.support.llava import picture, write_random
from tests.support.smolvlm import PROCESSOR, write_smolvlm
from tests.support.towers import check_rows, embedding, opened
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from antiphon.model_card.vision.tiles import TiledImages, Tiling

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SIZES = [(40, 33), (200, 31), (9, 70), (84, 84), (1, 90), (28, 28), (300, 299), (85, 28), (5, 3)]
FOLDED = {"size": {"longest_edge": 28}, "max_image_size": {"longest_edge": 28}}
WHOLE = {**PROCESSOR, "do_image_splitting": False}
ODD = {"size": {"longest_edge": 75}, "max_image_size": {"longest_edge": 28}, "resample": 3}


@pytest.fixture(scope="module")
def smolvlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_smolvlm(tmp_path_factory.mktemp("smolvlm"))


def theirs(recipe: Mapping[str, Any], data: bytes) -> Mapping[str, Any]:
    processor: Any = Idefics3ImageProcessorPil(**recipe)
    return processed(partial(processor, return_row_col_info=True), data)


@pytest.mark.parametrize("recipe", [PROCESSOR, FOLDED, WHOLE, ODD], ids=["", "1", "whole", "odd"])
def test_pixels_and_prompts_are_those_of_transformers(
    recipe: Mapping[str, Any], smolvlm: Path, tmp_path: Path
) -> None:
    """The card comes to as many tiles by an image's size as the preprocessor cuts out of it."""
    changed(smolvlm, tmp_path, recipe)
    model, card = opened(tmp_path), card_of(tmp_path, TiledImages)
    for size in SIZES:
        data = picture(1, *size)
        expected = theirs(recipe, data)
        found = model.preprocess(data)
        assert len(found) <= model.preprocess.recipe.frames_max
        np.testing.assert_allclose(found, expected["pixel_values"][0], rtol=0, atol=2e-6)
        pieces = card.pieces(*size)
        assert sum(isinstance(piece, int) for piece in pieces) == len(found), size
        assert all(isinstance(a, int) != isinstance(b, int) for a, b in pairwise(pieces))
        assert written(pieces, "<image>") == get_image_prompt_string(
            expected["rows"][0][0],
            expected["cols"][0][0],
            card.tile_tokens,
            fake_token_around_image="<fake_token_around_image>",
            image_token="<image>",
            global_image_token="<global-img>",
        )


def test_low_detail_is_an_image_that_is_not_cut(smolvlm: Path) -> None:
    model, card = opened(smolvlm), card_of(smolvlm, TiledImages)
    low = card.within(LOW)
    assert low.processing != card.processing
    assert low.within(LOW) == low, "it changes no key where it changes nothing"
    data = picture(1, *SIZES[-1])
    assert len(model.preprocess.decoded(data).pixels) > 1
    found = model.preprocess.decoded(data, limits=LOW).pixels
    whole = theirs({**PROCESSOR, "do_image_splitting": False}, data)["pixel_values"][0]
    np.testing.assert_allclose(model.preprocess.normalized(found), whole, rtol=0, atol=2e-6)
    pieces = [piece for piece in low.pieces(*SIZES[-1]) if isinstance(piece, int)]
    assert pieces == [card.tile_tokens]


@pytest.mark.parametrize(("longest", "tile"), [(2048, 512), (1456, 364), (5000, 364)])
def test_grids_are_those_of_transformers(longest: int, tile: int) -> None:
    """As published. What transformers counts by sizes alone is not always what it cuts."""
    processor: Any = Idefics3ImageProcessorPil(
        size={"longest_edge": longest}, max_image_size={"longest_edge": tile}
    )
    tiling = Tiling(longest_edge=longest, tile=tile, splits=True)
    for width, height in [(640, 480), (480, 641), (3000, 101), (17, 2000), (1000, 1000)]:
        pixels = np.zeros((3, height, width), np.uint8)
        image = processor.resize(pixels, processor.size)
        assert image.shape[:0:-1] == tiling.scaled(width, height)
        cut = processor.resize_for_vision_encoder(image, tile)
        columns, rows = tiling.grid(width, height)
        assert cut.shape[:0:-1] == (columns * tile, rows * tile)


@pytest.mark.parametrize("side", [4, 19])
def test_embeddings_are_those_of_transformers(side: int, smolvlm: Path, tmp_path: Path) -> None:
    """With nineteen patches an edge two of them have one position, by rounding."""
    folder = smolvlm
    if side != 4:
        sizes = {"image_size": side, "patch_size": 1}
        vision: Any = transformers.SmolVLMConfig.from_pretrained(folder).vision_config
        config = transformers.SmolVLMConfig.from_pretrained(
            folder, vision_config=vision.to_dict() | sizes, scale_factor=side
        )
        recipe = {"size": {"longest_edge": 2 * side}, "max_image_size": {"longest_edge": side}}
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(recipe))
        folder = write_random(tmp_path, transformers.SmolVLMForConditionalGeneration(config))
    model = opened(folder)
    made = reference(folder)
    for size in SIZES[:3]:
        data = picture(2, *size)
        frames = torch.as_tensor(model.preprocess(data))
        with torch.inference_mode():
            right = made.model.get_image_features(frames[None]).pooler_output[0]
        check_rows(embedding(model, data), right)


@pytest.mark.parametrize(
    ("changes", "recipe", "complaint"),
    [
        ({"scale_factor": 3}, PROCESSOR, "scale_factor = 3: must divide"),
        ({}, FOLDED | {"max_image_size": {"longest_edge": 30}}, "makes tiles of 30 pixels"),
        ({}, {"size": {"height": 3, "width": 3}}, "longest_edge"),
    ],
)
def test_what_does_not_fit_is_named(
    changes: dict[str, Any],
    recipe: dict[str, Any],
    complaint: str,
    smolvlm: Path,
    tmp_path: Path,
) -> None:
    check_refused(smolvlm, tmp_path, complaint, recipe, **changes)
