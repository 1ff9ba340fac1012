"""Images of Pixtral and Mistral 3 against transformers: sizes, pixels, marks, tower, projector."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.support.image_families import (
    LOW,
    card_of,
    changed,
    check_batch,
    check_refused,
    processed,
    reference,
    written,
)
from tests.support.llava import picture
from tests.support.pixtral import PROCESSOR, batched, write_mistral3, write_pixtral
from tests.support.towers import check_every_tensor, check_rows, embedding, opened
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from antiphon.model_card.vision.rows import RowImages, RowSizes
from antiphon.wire.claim import PixelLimits
from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from pathlib import Path

SIZES = [(40, 33), (200, 31), (9, 70), (60, 60), (300, 299), (5, 3), (1, 50), (11, 10)]
WRITERS = {"pixtral": (write_pixtral, 1), "mistral3": (write_mistral3, 2)}


@pytest.fixture(scope="module", params=WRITERS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WRITERS[name][0](tmp_path_factory.mktemp(name))


def marks(height: int, width: int, edge: int) -> str:
    """As `PixtralProcessor` writes them, which needs torchvision."""
    row = ["[IMG]"] * (width // edge) + ["[IMG_BREAK]"]
    return "".join([*(row * (height // edge))[:-1], "[IMG_END]"])


def test_pixels_marks_and_embeddings_are_those_of_transformers(name: str, folder: Path) -> None:
    """Embeddings are those of images in one batch, where ours are alone."""
    merge = WRITERS[name][1]
    recipe: dict[str, Any] = {**PROCESSOR, "patch_size": 5 * merge}
    pil: Any = PixtralImageProcessorPil(**recipe)
    model, card, images = opened(folder), card_of(folder, RowImages), list[torch.Tensor]()
    for size in SIZES:
        expected = processed(pil, picture(1, *size))
        found = model.preprocess(picture(1, *size))
        np.testing.assert_allclose(found, expected["pixel_values"], rtol=0, atol=2e-6)
        height, width = expected["image_sizes"][0]
        assert written(card.pieces(*size), "[IMG]") == marks(height, width, 5 * merge)
        images.append(torch.as_tensor(found))
    check_batch(folder, model, SIZES, batched(images))


def test_every_tensor_matters(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_every_tensor(folder, picture(5, 35, 30), monkeypatch)


def test_an_earlier_layer_is_that_of_transformers(folder: Path, tmp_path: Path) -> None:
    changed(folder, tmp_path, vision_feature_layer=1)
    model, data = opened(tmp_path), picture(2, 33, 40)
    inputs = batched([torch.as_tensor(model.preprocess(data))])
    with torch.inference_mode():
        (right,) = reference(tmp_path).model.get_image_features(**inputs).pooler_output
    check_rows(embedding(model, data), right)


def test_low_detail_is_512_pixels() -> None:
    sizes = RowSizes(edge=28, longest=1540)
    assert sizes.scaled(2000, 1000) == (1540, 784)
    assert sizes.within(LOW).scaled(2000, 1000) == (532, 280)
    assert sizes.within(PixelLimits()) == sizes
    with pytest.raises(InvalidRequest, match="too narrow"):
        sizes.scaled(5000, 3)
    with pytest.raises(InvalidRequest, match="no min_pixels"):
        sizes.within(PixelLimits(least=4))


@pytest.mark.parametrize(
    ("changes", "recipe", "complaint"),
    [
        ({"vision_feature_layer": 3}, {}, "must be one of 2 layers"),
        ({"vision_feature_layer": [1, 2]}, {}, "one layer is supported"),
        ({"projector_hidden_act": "relu"}, {}, "projector_hidden_act"),
        ({}, {"do_resize": False}, "the tower takes whole tokens only"),
        ({}, {"size": {"longest_edge": 0}}, "longest_edge"),
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
