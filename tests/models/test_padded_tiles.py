"""LLaVA-NeXT's and OneVision's images, padded to a grid of tiles, against transformers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers
from tests.support.image_families import (
    card_of,
    check_low_detail,
    check_refused,
    drawn_sizes,
    processed,
    reference,
)
from tests.support.llava import picture
from tests.support.llava_next import (
    NEXT_PROCESSOR,
    ONEVISION_PROCESSOR,
    padded,
    write_llava_next,
    write_llava_onevision,
)
from tests.support.models import change_config
from tests.support.towers import check_every_tensor, check_rows, embedding, opened
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)

from antiphon.config.errors import ConfigError
from antiphon.model_card.vision.padded_tiles import PaddedTiles
from antiphon.model_card.vision.vision_card import read_vision

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SIZES = [(40, 33), (200, 31), (9, 70), (28, 28), (300, 299), (5, 3), (60, 29), (29, 83), (85, 27)]
CASES: Mapping[str, tuple[Any, Any, Mapping[str, Any]]] = {
    "next": (write_llava_next, LlavaNextImageProcessorPil, NEXT_PROCESSOR),
    "onevision": (write_llava_onevision, LlavaOnevisionImageProcessorPil, ONEVISION_PROCESSOR),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(case: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return CASES[case][0](tmp_path_factory.mktemp(case))


def test_pixels_tokens_and_embeddings_are_those_of_transformers(case: str, folder: Path) -> None:
    """The card comes to as many rows by an image's size as the model packs of it."""
    _, processor, recipe = CASES[case]
    pil, theirs = processor(**recipe), reference(folder)
    model, card, counts = opened(folder), card_of(folder, PaddedTiles), set[Any]()
    for size in SIZES:
        data = picture(1, *size)
        expected = np.asarray(processed(pil, data)["pixel_values"])
        found = model.preprocess(data)
        assert len(found) <= model.preprocess.recipe.frames_max
        np.testing.assert_allclose(found, expected[0], rtol=0, atol=2e-6)
        with torch.inference_mode():
            inputs = padded([torch.as_tensor(found)], [size])
            (right,) = theirs.model.get_image_features(**inputs).pooler_output
        assert card.pieces(*size) == (len(right),)
        counts.add(len(right))
        check_rows(embedding(model, data), right)
    assert len(counts) > 4


def test_every_tensor_matters(case: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    idle = ("post_layernorm", "layers.2.") if case == "next" else ("post_layernorm",)
    check_every_tensor(folder, picture(5, 60, 29), monkeypatch, idle, ("k_proj.bias",))


@pytest.mark.parametrize("kind", ["next", "onevision"])
def test_published_sizes_are_packed_as_transformers_packs_them(kind: str, tmp_path: Path) -> None:
    """As published: 24 or 27 patches an edge, and the sizes that their classes have."""
    onevision = kind == "onevision"
    edge = 384 if onevision else 336
    config = {
        "model_type": f"llava_{kind}",
        "vision_config": {
            "model_type": "siglip_vision_model" if onevision else "clip_vision_model",
            "image_size": edge,
            "patch_size": 14,
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    card = card_of(tmp_path, PaddedTiles)
    processor: Any = (
        transformers.LlavaOnevisionProcessor if onevision else transformers.LlavaNextProcessor
    )
    theirs = object.__new__(processor)
    theirs.image_processor = CASES[kind][1]()
    theirs.patch_size, theirs.num_additional_image_tokens = 14, 0
    theirs.num_image_tokens, theirs.vision_aspect_ratio = 729, "anyres_max_9"
    known = ((336, 336), (1024, 768), (5000, 9), (800, 600))
    for width, height in drawn_sizes(3000, 60, *known):
        assert card.pieces(width, height) == (
            theirs._get_number_of_features(height, width, edge, edge),
        )


def test_low_detail_is_one_tile(folder: Path) -> None:
    model = opened(folder)
    decoded = check_low_detail(model, card_of(folder, PaddedTiles), (17,))
    assert decoded.pixels.shape == (1, 28, 28, 3)
    assert model.embed(decoded).tokens == 17


@pytest.mark.parametrize(
    ("changes", "recipe", "complaint"),
    [
        ({"image_grid_pinpoints": [[28, 28]]}, {}, "image_grid_pinpoints: must be those of"),
        (
            {"image_grid_pinpoints": [[28, 30]]},
            {"image_grid_pinpoints": [[28, 30]]},
            "multiples of image_size = 28",
        ),
        ({"vision_feature_select_strategy": ""}, {}, "must be default or full"),
        ({"vision_feature_layer": [-2, -1]}, {}, "only a single layer"),
        ({"vision_feature_layer": 9}, {}, "must be one of 3 layers"),
        ({"vision_aspect_ratio": "pad"}, {}, "must be anyres_max_N"),
        ({}, {"size": {"shortest_edge": 29}}, "shortest_edge must|makes images of"),
    ],
)
def test_what_does_not_fit_is_named(
    changes: dict[str, Any],
    recipe: dict[str, Any],
    complaint: str,
    case: str,
    folder: Path,
    tmp_path: Path,
) -> None:
    if "vision_aspect_ratio" in changes and case == "next":
        return  # it has none
    check_refused(folder, tmp_path, complaint, {**CASES[case][2], **recipe}, **changes)


def test_features_that_are_no_grid_are_refused(case: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    other = "full" if case == "next" else "default"
    change_config(tmp_path, vision_feature_select_strategy=other)
    with pytest.raises(ConfigError, match="must leave only the patches"):
        read_vision(tmp_path)
