"""Images of Kimi K2.5 against transformers: sizes, tower and projector, published names.

Its processor needs torchvision, which is not there: of it the function for sizes is called, and
pixels are those of Pillow's filter on them.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.image_families import (
    LOW,
    card_of,
    check_batch,
    check_refused,
    drawn_sizes,
    reference,
    shown,
)
from tests.support.kimi_k25 import PROCESSOR, write_kimi_k25
from tests.support.llava import picture
from tests.support.models import load
from tests.support.qwen_vl import rows_of_patches
from tests.support.torchvision_names import image_processing
from tests.support.towers import check_every_tensor, embedding, opened

from antiphon.model_card.card import read_card
from antiphon.model_card.vision.padded_grids import PaddedImages, PaddedSizes
from antiphon.model_card.vision.vision_card import videos_of
from antiphon.wire.claim import PixelLimits
from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SIZES = [(40, 33), (200, 31), (9, 70), (48, 48), (1, 90), (300, 299), (5, 3), (8, 8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_kimi_k25(tmp_path_factory.mktemp("kimi"))


@pytest.fixture(scope="module")
def processing() -> Any:
    return image_processing("kimi_k25")


def pixels(theirs: Any, data: bytes) -> torch.Tensor:
    """Those of an image (1, 3, H, W)."""
    image = shown(data)
    (height, width), padded = theirs.navit_resize(image.height, image.width, 4, 2, 100, 12)
    canvas = np.zeros((*padded, 3), np.float32)
    canvas[:height, :width] = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))
    return torch.as_tensor((canvas / 255 - 0.5) / 0.5).permute(2, 0, 1)[None].contiguous()


def test_pixels_tokens_and_embeddings_are_those_of_transformers(
    folder: Path, processing: Any
) -> None:
    """Embeddings are those of images in one batch, where ours are alone."""
    model, card, images = opened(folder), card_of(folder, PaddedImages), list[torch.Tensor]()
    assert videos_of(card) is model.videos is None
    for size in SIZES:
        images.append(pixels(processing, picture(1, *size)))
        found = model.preprocess(picture(1, *size))
        np.testing.assert_allclose(found, images[-1].numpy(), rtol=0, atol=2e-6)
        rows, columns = (edge // 8 for edge in found.shape[-2:])
        assert card.pieces(*size) == (rows * columns,)
        assert card.columns(*size) == 0
    check_batch(folder, model, SIZES, rows_of_patches(images))


def test_every_tensor_matters(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_every_tensor(folder, picture(5, 35, 30), monkeypatch)


def test_names_may_be_those_of_transformers(folder: Path, tmp_path: Path) -> None:
    reference(folder).save_pretrained(tmp_path, save_original_format=False)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    data = picture(1, 40, 33)
    np.testing.assert_array_equal(
        embedding(opened(tmp_path), data), embedding(opened(folder), data)
    )


@pytest.mark.parametrize(("side", "most"), [(512, 16384), (12, 100), (64, 20)])
def test_sizes_are_those_of_transformers(processing: Any, side: int, most: int) -> None:
    sizes = PaddedSizes(patch=14, merge=2, patches_max=most, side_max=side)
    known = ((28, 28), (27, 40), (7168, 14), (1, 20_000), (1792, 1792))
    for width, height in drawn_sizes(9000, 100, *known):
        scaled, padded = processing.navit_resize(height, width, 14, 2, most, side)
        assert sizes.content(width, height) == scaled[::-1], (width, height)
        assert sizes.scaled(width, height) == padded[::-1], (width, height)


def test_low_detail_is_512_pixels(folder: Path) -> None:
    card = card_of(folder, PaddedImages)
    large = PaddedSizes(patch=14, merge=2, patches_max=16384, side_max=512)
    assert large.scaled(2000, 1000) == (2016, 1008)
    assert large.within(LOW).scaled(2000, 1000) == (728, 364)
    assert card.within(LOW) == card, "its images have fewer pixels"
    with pytest.raises(InvalidRequest, match="no min_pixels"):
        card.within(PixelLimits(most=500))


@pytest.mark.parametrize("tied", [True, False])
def test_the_config_of_kimi_k25_is_read(folder: Path, tmp_path: Path, tied: bool) -> None:
    """As published: another name of the architecture and of its text, and no fields of the tower.

    The head is that of the text model unless a config says that it is not, as in transformers.
    """
    config = json.loads((folder / "config.json").read_text())
    text = {**config["text_config"], "model_type": "kimi_k2"}
    text.pop("tie_word_embeddings", None)
    config |= {"text_config": text, "architectures": ["KimiK25ForConditionalGeneration"]}
    for name in ("vision_config", "image_token_id", "tie_word_embeddings"):
        config.pop(name, None)
    if not tied:
        config["tie_word_embeddings"] = False
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    card, vision = read_card(tmp_path), card_of(tmp_path, PaddedImages)
    assert (card.architecture, card.tied) == ("Kimi_K25ForConditionalGeneration", tied)
    assert card.latent == read_card(folder).latent
    assert (vision.placeholder, vision.pieces(448, 448)) == (163605, (256,))
    if not tied:
        assert load(tmp_path).spec == load(folder).spec


@pytest.mark.parametrize(
    ("tower", "recipe", "complaint"),
    [
        ({"num_attention_heads": 16}, {}, "not a multiple of four times"),
        ({"pos_emb_width": 4}, {}, "pos_emb_height and pos_emb_width must be equal"),
        ({"pos_emb_width": 4, "pos_emb_height": 4}, {}, "pos_emb.weight is"),
        ({"merge_kernel_size": [2, 1]}, {}, "the tower takes 4 and 2 x 1"),
        ({}, {"patch_size": 14}, "makes patches of 14 pixels"),
        ({}, {"do_resize": False}, "do_resize = false"),
        ({}, {"size": {"max_height": 3, "max_width": 4}}, "must be equal"),
    ],
)
def test_what_does_not_fit_is_named(
    tower: Mapping[str, Any],
    recipe: Mapping[str, Any],
    complaint: str,
    folder: Path,
    tmp_path: Path,
) -> None:
    recipe = {**PROCESSOR, **recipe}
    check_refused(folder, tmp_path, complaint, recipe, vision_config=dict(tower))
