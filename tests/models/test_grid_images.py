"""Images of Qwen2-VL to Qwen3-VL and of Qwen3.5 against transformers: sizes, pixels and rows."""

from __future__ import annotations

import io
import json
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tests.support.llava import picture
from tests.support.models import change_config
from tests.support.qwen_vl import (
    PROCESSOR,
    patches,
    write_qwen2_vl,
    write_qwen3_vl,
    write_qwen25_vl,
    write_qwen35,
)
from tests.support.towers import check_every_tensor, check_rows, embedding, opened
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from antiphon.config.errors import ConfigError
from antiphon.model_card.vision.grid_sizes import GridSizes
from antiphon.model_card.vision.grids import GridImages
from antiphon.model_card.vision.vision_card import read_vision
from antiphon.wire.claim import PixelLimits
from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


SIZES = [(40, 33), (200, 31), (9, 70), (84, 84), (1, 90), (8, 8), (300, 299), (13, 12), (60, 4)]
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "": PROCESSOR,
    "size": {
        "size": {"shortest_edge": 500, "longest_edge": 2000},
        "patch_size": 4,
        "resample": 2,
        "image_mean": [0.1, 0.2, 0.3],
    },
    "raw": {**PROCESSOR, "do_normalize": False, "rescale_factor": 0.5},
}
WRITERS = {
    "qwen2.5-vl": write_qwen25_vl,
    "qwen2-vl": write_qwen2_vl,
    "qwen3-vl": write_qwen3_vl,
    "qwen3.5": write_qwen35,
}


@pytest.fixture(scope="module", params=WRITERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WRITERS[request.param](tmp_path_factory.mktemp("grid"))


def card_of(folder: Path) -> GridImages:
    card = read_vision(folder)
    assert isinstance(card, GridImages)
    return card


def with_recipe(folder: Path, place: Path, recipe: Mapping[str, Any]) -> Path:
    """The model with another preprocessor."""
    for file in folder.iterdir():
        if file.name != "preprocessor_config.json":
            (place / file.name).symlink_to(file)
    (place / "preprocessor_config.json").write_text(json.dumps(recipe))
    return place


@pytest.mark.parametrize("recipe", RECIPES)
def test_pixels_and_tokens_are_those_of_transformers(
    recipe: str, folder: Path, tmp_path: Path
) -> None:
    """The card comes to as many tokens by an image's size as its patches are merged to."""
    place = with_recipe(folder, tmp_path, RECIPES[recipe])
    model, card = opened(place), card_of(place)
    theirs = Qwen2VLImageProcessorPil(**RECIPES[recipe])
    for size in SIZES:
        data = picture(1, *size)
        with Image.open(io.BytesIO(data)) as image:
            expected = cast("Mapping[str, Any]", theirs([image], return_tensors="np"))
        found = patches([torch.as_tensor(model.preprocess(data))])
        np.testing.assert_allclose(
            found["pixel_values"], expected["pixel_values"], rtol=0, atol=4e-6
        )
        grid = expected["image_grid_thw"][0].tolist()
        assert found["image_grid_thw"][0].tolist() == grid
        assert card.pieces(*size) == (grid[1] * grid[2] // 4,)
        assert card.columns(*size) == grid[2] // 2


def test_embeddings_are_those_of_transformers(folder: Path) -> None:
    """Of images in one batch, where ours are alone."""
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    reference = getattr(transformers, architecture).from_pretrained(folder).eval()
    model, images = opened(folder), [picture(number, *size) for number, size in enumerate(SIZES)]
    pixels = [torch.as_tensor(model.preprocess(data)) for data in images]
    with torch.inference_mode():
        features = reference.model.get_image_features(**patches(pixels))
    stacked = getattr(features, "deepstack_features", ())
    assert card_of(folder).deepstack == len(stacked)
    for data, *parts in zip(images, features.pooler_output, *stacked, strict=True):
        check_rows(embedding(model, data), torch.cat(parts, dim=-1))


def test_every_tensor_of_the_tower_matters(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_every_tensor(folder, picture(5, 35, 30), monkeypatch)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("qwen2.5-vl", {"fullatt_block_indexes": [0]}),
        ("qwen2.5-vl", {"window_size": 32}),
        ("qwen2.5-vl", {"rope_parameters": {"rope_theta": 9.0}}),
        ("qwen3-vl", {"deepstack_visual_indexes": [1, 2]}),
    ],
    ids=str,
)
def test_a_field_of_the_tower_that_differs_is_seen(
    name: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    folder, data = WRITERS[name](tmp_path), picture(5, 70, 60)
    right = embedding(opened(folder), data)
    tower = json.loads((folder / "config.json").read_text())["vision_config"]
    change_config(folder, vision_config=tower | fields)
    assert np.abs(embedding(opened(folder), data) - right).max() > 1e-3


def test_an_image_that_is_too_narrow_is_refused(folder: Path) -> None:
    card = card_of(folder)
    assert card.pieces(1, 200)
    with pytest.raises(InvalidRequest, match="201 x 1 pixels is too narrow"):
        card.pieces(201, 1)


def test_keys_cover_what_changes_the_embedding_as_it_is_resolved(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    def key(**fields: Any) -> bytes:
        place = tmp_path_factory.mktemp("key")
        return card_of(with_recipe(folder, place, PROCESSOR | fields)).processing

    right = key()
    sizes = {"shortest_edge": PROCESSOR["min_pixels"], "longest_edge": PROCESSOR["max_pixels"]}
    assert key(min_pixels=None, max_pixels=None, size=sizes) == right
    assert key(size={"shortest_edge": 1, "longest_edge": 9999}) == right, "the older names win"
    assert key(resample=3, do_rescale=True, a_name_of_no_meaning=1) == right
    others = [
        key(max_pixels=31 * 64),
        key(min_pixels=5 * 64),
        key(image_mean=[0.5, 0.5, 0.5]),
        key(resample=2),
        key(do_normalize=False),
        key(rescale_factor=0.5),
    ]
    assert len({right, *others}) == 7


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"patch_size": 14}, "makes patches of 14 pixels, 2 an edge of a token; the tower takes 4"),
        ({"min_pixels": 4000}, "min_pixels = 4000 exceeds max_pixels = 1920"),
        ({"do_resize": False}, "the tower takes whole tokens only"),
    ],
)
def test_a_recipe_that_the_tower_does_not_take_is_named(
    fields: dict[str, Any], complaint: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read_vision(with_recipe(folder, tmp_path, {**PROCESSOR, **fields}))


def test_a_tower_that_is_not_supported_is_named(tmp_path: Path) -> None:
    folder = write_qwen25_vl(tmp_path)
    tower = json.loads((folder / "config.json").read_text())["vision_config"]
    for fields, complaint in (
        ({"num_heads": 3}, "is not a multiple of four times the 3 heads"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"window_size": 4}, "window_size is less than a token"),
        ({"depth": 4}, "the weights lack visual.blocks.3"),
    ):
        change_config(folder, vision_config=tower | fields)
        with pytest.raises(ConfigError, match=complaint):
            opened(folder)


def test_layers_that_make_rows_must_be_in_the_tower(tmp_path: Path) -> None:
    folder = write_qwen3_vl(tmp_path)
    tower = json.loads((folder / "config.json").read_text())["vision_config"]
    for stacked in ([2, 0], [0, 3], [1, 1]):
        change_config(folder, vision_config=tower | {"deepstack_visual_indexes": stacked})
        with pytest.raises(ConfigError, match="must be layers of 3, rising"):
            opened(folder)


def test_limits_of_a_request_are_those_of_a_preprocessor(folder: Path, tmp_path: Path) -> None:
    """Sizes, tokens and pixels are those of a model with such limits, and keys tell them apart."""
    plain, limits = card_of(folder), PixelLimits(least=6 * 64, most=12 * 64)
    recipe = {**PROCESSOR, "min_pixels": limits.least, "max_pixels": limits.most}
    theirs = opened(with_recipe(folder, tmp_path, recipe))
    card, model = plain.within(limits), opened(folder)
    for size in SIZES:
        data = picture(1, *size)
        found = model.preprocess.decoded(data, *size, limits).pixels
        np.testing.assert_array_equal(found, theirs.preprocess.decoded(data).pixels)
        assert card.pieces(*size) == card_of(tmp_path).pieces(*size)
        assert card.columns(*size) * 8 == found.shape[2]
    assert (
        len({plain.processing, card.processing, plain.within(PixelLimits(least=1)).processing}) == 3
    )
    assert plain.within(PixelLimits(most=PROCESSOR["max_pixels"])) == plain


def test_an_image_with_so_many_patches_has_them_again(folder: Path) -> None:
    card = card_of(folder)
    for size in SIZES:
        across, down = card.sizes.scaled(*size)
        patches = down // card.sizes.patch, across // card.sizes.patch
        assert card.pixels(patches) == (across, down)
        assert card.pieces(across, down) == card.pieces(*size)


def test_low_detail_is_a_maximum_of_pixels() -> None:
    sizes = GridSizes(patch=14, merge=2, pixels_min=56 * 56, pixels_max=28 * 28 * 1280)
    card = GridImages(placeholder=1, processing=b"p", sizes=sizes)
    low = card.within(PixelLimits(low=True))
    assert card.pieces(2000, 1500) == (1230,)
    assert low.pieces(2000, 1500) == (21 * 15,)
    assert low.processing == card.within(PixelLimits(most=512 * 512)).processing
    assert card.within(PixelLimits(most=9000, low=True)) == card.within(PixelLimits(most=9000))
    # A minimum that a request sets is above what low detail needs.
    least = PixelLimits(least=500_000, low=True)
    assert card.within(least).sizes.pixels_max == 500_000
    few = msgspec.structs.replace(sizes, pixels_max=28 * 28 * 300)
    small = msgspec.structs.replace(card, sizes=few)
    assert small.within(PixelLimits(low=True)) == small, (
        "it changes no key where it changes nothing"
    )


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (PixelLimits(most=31 * 64), "max_pixels = 1984: must be at most 1920, the model's"),
        (PixelLimits(least=1, most=63), "max_pixels = 63: must be at least 64, those of a token"),
        (PixelLimits(most=200), "min_pixels = 256: exceeds max_pixels = 200"),
    ],
)
def test_limits_that_no_image_can_have_are_named(
    limits: PixelLimits, reason: str, folder: Path
) -> None:
    for call in (
        card_of(folder).within,
        partial(opened(folder).preprocess.decoded, picture(1), 0, 0),
    ):
        with pytest.raises(InvalidRequest, match=reason) as caught:
            call(limits)
        assert caught.value.param == "mm_processor_kwargs"
