"""Llama 4's images, cut into tiles on a canvas, against transformers: tokens, tower and projector.

Its processor needs torchvision, which is not there: of it the functions for sizes are called, and
pixels are those of Pillow's filters on them.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.image_families import (
    card_of,
    changed,
    check_low_detail,
    check_refused,
    drawn_sizes,
    reference,
    shown,
    written,
)
from tests.support.llama4 import PROCESSOR, TILE_TOKENS, write_llama4
from tests.support.llava import picture
from tests.support.models import change_config
from tests.support.torchvision_names import image_processing
from tests.support.towers import check_every_tensor, check_rows, embedding, opened
from transformers.image_utils import SizeDict
from transformers.models.llama4.processing_llama4 import Llama4Processor

from antiphon.model_card.vision.canvas_tiles import CanvasTiling, SeparatedTiles

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

SIZES = [(40, 33), (200, 31), (9, 70), (28, 28), (300, 299), (5, 3), (60, 29)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama4(tmp_path_factory.mktemp("llama4"))


@pytest.fixture(scope="module")
def processing() -> Any:
    return image_processing("llama4")


def sizes(
    theirs: Any, size: tuple[int, int], tile: int, most: int, *, largest: bool
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Columns and rows of the canvas, and width and height on it, as transformers has them."""
    square = SizeDict(height=tile, width=tile)
    theirs.find_supported_resolutions.cache_clear()
    all_sizes = torch.tensor(theirs.find_supported_resolutions(most, square))
    image = size[1], size[0]
    target = theirs.get_best_fit(image, all_sizes, resize_to_max_canvas=largest)
    within = target
    if not largest:
        within = tuple(min(max(image[i], tile), target[i]) for i in range(2))
    height, width = (
        max(int(edge), 1) for edge in theirs.get_max_res_without_distortion(image, within)
    )
    rows, columns = (int(edge) // tile for edge in target)
    return (columns, rows), (width, height)


@pytest.mark.parametrize("largest", [False, True])
def test_sizes_are_those_of_transformers(processing: Any, largest: bool) -> None:
    known = ((336, 336), (672, 336), (337, 336), (1344, 1344), (1, 5000), (5000, 3), (1008, 672))
    for tile, most in ((336, 16), (28, 6), (336, 1)):
        tiling = CanvasTiling(tile=tile, most=most, largest=largest)
        for width, height in drawn_sizes(6000, 120, *known):
            found = tiling.grid(width, height), tiling.scaled(width, height)
            found = tiling.grid(width, height), tiling.scaled(width, height)
            right = sizes(processing, (width, height), tile, most, largest=largest)
            assert found == right, (width, height, tile, most)


def normalized(image: Image.Image) -> Tensor:
    """As transformers' processor does, in bfloat16: (3, height, width)."""
    values = torch.from_numpy(np.array(image)).to(torch.bfloat16) * (1 / 255)
    half = torch.tensor(0.5, dtype=torch.bfloat16)
    return values.sub(half).div(half).float().permute(2, 0, 1)


def tiles(theirs: Any, data: bytes) -> tuple[Tensor, tuple[int, int]]:
    """The pixels of an image (F, 3, H, W), and its rows and columns of tiles."""
    image, edge = shown(data), 28
    (columns, rows), size = sizes(theirs, image.size, edge, 6, largest=False)
    canvas = np.zeros((rows * edge, columns * edge, 3), np.uint8)
    canvas[: size[1], : size[0]] = np.asarray(image.resize(size, Image.Resampling.BILINEAR))
    cut = [
        normalized(Image.fromarray(canvas[y : y + edge, x : x + edge]))
        for y in range(0, rows * edge, edge)
        for x in range(0, columns * edge, edge)
    ]
    if len(cut) > 1:
        cut.append(normalized(image.resize((edge, edge), Image.Resampling.BILINEAR)))
    return torch.stack(cut), (rows, columns)


def test_pixels_tokens_and_embeddings_are_those_of_transformers(
    folder: Path, processing: Any
) -> None:
    theirs, model, card = reference(folder), opened(folder), card_of(folder, SeparatedTiles)
    for size in SIZES:
        data = picture(1, *size)
        expected, shape = tiles(processing, data)
        found = model.preprocess(data)
        assert len(found) <= model.preprocess.recipe.frames_max
        np.testing.assert_array_equal(found, expected.numpy())
        text = Llama4Processor._prompt_split_image(None, shape, TILE_TOKENS)  # type: ignore[arg-type]
        assert written(card.pieces(*size), "<|patch|>") == text
        with torch.inference_mode():
            seen = theirs.get_image_features(expected).last_hidden_state
            right = theirs.multi_modal_projector(seen)
        check_rows(embedding(model, data), right.flatten(0, 1))


def test_every_tensor_matters(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_every_tensor(folder, picture(5, 60, 29), monkeypatch)


def test_another_base_of_angles(folder: Path, tmp_path: Path) -> None:
    """As published it is beside the sizes of the tower."""
    changed(folder, tmp_path)
    data = picture(1, 60, 29)
    tower = json.loads((folder / "config.json").read_text())["vision_config"]
    del tower["rope_parameters"]
    change_config(tmp_path, vision_config=tower | {"rope_theta": 10_000.0})
    np.testing.assert_array_equal(
        embedding(opened(tmp_path), data), embedding(opened(folder), data)
    )
    change_config(tmp_path, vision_config=tower | {"rope_theta": 50.0})
    other = embedding(opened(tmp_path), data)
    assert np.abs(other - embedding(opened(folder), data)).max() > 1e-3


def test_low_detail_is_one_tile(folder: Path) -> None:
    pieces = ("<|image_start|><|image|>", TILE_TOKENS, "<|image_end|>")
    decoded = check_low_detail(opened(folder), card_of(folder, SeparatedTiles), pieces)
    assert len(decoded.pixels) == 1


@pytest.mark.parametrize(
    ("tower", "recipe", "complaint"),
    [
        ({"pixel_shuffle_ratio": 0.4}, {}, "pixel_shuffle_ratio = 0.4: must be 1 by a whole"),
        ({"pixel_shuffle_ratio": 1 / 3}, {}, "3 patches must divide 4"),
        ({"num_attention_heads": 16}, {}, "not a multiple of four times"),
        ({}, {"size": {"height": 30, "width": 30}}, "makes tiles of 30 pixels"),
        ({}, {"size": {"height": 30, "width": 28}}, "size must be a square"),
        ({}, {"max_patches": 0}, "max_patches"),
        ({"hidden_size": 64}, {}, "positional_embedding_vlm is"),
    ],
)
def test_what_does_not_fit_is_named(
    tower: dict[str, Any],
    recipe: dict[str, Any],
    complaint: str,
    folder: Path,
    tmp_path: Path,
) -> None:
    recipe = {**PROCESSOR, **recipe}
    check_refused(folder, tmp_path, complaint, recipe, vision_config=tower)
