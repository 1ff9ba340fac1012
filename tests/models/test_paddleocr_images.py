"""Images of PaddleOCR-VL against transformers: sizes, pixels, tower and projector."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
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
from tests.support.models import load
from tests.support.qwen_vl import OCR_PROCESSOR, rows_of_patches, write_paddleocr_vl
from tests.support.towers import check_every_tensor, embedding, opened
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
    PaddleOCRVLImageProcessorPil,
    smart_resize,
)

from antiphon.model_card.card import read_card
from antiphon.model_card.vision.grid_sizes import GridSizes
from antiphon.model_card.vision.grids import GridImages
from antiphon.model_card.vision.vision_card import videos_of
from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from pathlib import Path

SIZES = [(40, 33), (200, 31), (9, 70), (84, 84), (1, 90), (8, 8), (300, 299), (13, 12), (60, 4)]
PUBLISHED = (
    ("model.projector.", "mlp_AR."),
    ("model.visual.", "visual."),
    ("model.language_model.", "model."),
)
"""Names of tensors, as transformers has them and as they were published."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_paddleocr_vl(tmp_path_factory.mktemp("paddleocr-vl"))


def test_pixels_tokens_and_embeddings_are_those_of_transformers(folder: Path) -> None:
    """Embeddings are those of images in one batch, where ours are alone."""
    theirs: Any = PaddleOCRVLImageProcessorPil(**OCR_PROCESSOR)
    model, card, pixels = opened(folder), card_of(folder, GridImages), list[torch.Tensor]()
    assert videos_of(card) is model.videos is None
    for size in SIZES:
        expected = processed(theirs, picture(1, *size))
        pixels.append(torch.as_tensor(model.preprocess(picture(1, *size))))
        found = rows_of_patches([pixels[-1]])["pixel_values"]
        np.testing.assert_allclose(found, expected["pixel_values"], rtol=0, atol=4e-6)
        grid = expected["image_grid_thw"][0].tolist()
        assert card.pieces(*size) == (grid[1] * grid[2] // 4,)
        assert card.columns(*size) == grid[2] // 2
    check_batch(folder, model, SIZES, rows_of_patches(pixels))


def test_positions_are_those_of_transformers(folder: Path) -> None:
    check_image_positions(reference(folder).model)


def test_every_tensor_matters(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_every_tensor(folder, picture(5, 35, 30), monkeypatch)


def test_published_sizes_are_those_of_transformers() -> None:
    sizes = GridSizes(patch=14, merge=2, pixels_min=147384, pixels_max=2822400, fills=True)
    known = ((28, 28), (27, 40), (5000, 30), (3, 200), (5600, 28), (1, 1))
    for width, height in drawn_sizes(4000, 60, *known):
        try:
            expected = smart_resize(height, width, 28, 147384, 2822400)
        except ValueError:
            with pytest.raises(InvalidRequest, match="is too narrow"):
                sizes.scaled(width, height)
            continue
        assert sizes.scaled(width, height) == expected[::-1], (width, height)


@pytest.mark.parametrize("published", [True, False])
def test_models_as_they_were_published(folder: Path, tmp_path: Path, published: bool) -> None:
    """Fields of the text model are beside all others, and tensors have other names."""
    tensors = load_file(folder / "model.safetensors")
    for theirs, old in PUBLISHED:  # as transformers has them, whatever it has written
        named = any(name.startswith(theirs) for name in tensors)
        if not named:
            tensors = {
                theirs + name.removeprefix(old) if name.startswith(old) else name: tensor
                for name, tensor in tensors.items()
            }
    for theirs, old in PUBLISHED if published else ():
        tensors = {
            old + name.removeprefix(theirs) if name.startswith(theirs) else name: tensor
            for name, tensor in tensors.items()
        }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    if published:
        config = config.pop("text_config") | config
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(OCR_PROCESSOR))
    data = picture(1, 40, 33)
    np.testing.assert_array_equal(
        embedding(opened(tmp_path), data), embedding(opened(folder), data)
    )
    assert load(tmp_path).spec == load(folder).spec


def test_the_config_of_paddleocr_vl_is_read(tmp_path: Path) -> None:
    config = {
        "architectures": ["PaddleOCRVLForConditionalGeneration"],
        "hidden_size": 1024,
        "image_token_id": 100295,
        "intermediate_size": 3072,
        "max_position_embeddings": 131072,
        "model_type": "paddleocr_vl",
        "num_attention_heads": 16,
        "num_hidden_layers": 18,
        "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
        "tie_word_embeddings": False,
        "vision_config": {"image_size": 384, "patch_size": 14, "spatial_merge_size": 2},
        "vocab_size": 103424,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    card, vision = read_card(tmp_path), card_of(tmp_path, GridImages)
    assert (card.hidden_size, card.layers, card.kv_heads) == (1024, 18, 2)
    assert (vision.placeholder, vision.pieces(448, 448)) == (100295, (256,))


@pytest.mark.parametrize(
    ("tower", "recipe", "complaint"),
    [
        ({"num_attention_heads": 16}, {}, "not a multiple of four times"),
        ({"image_size": 24}, {}, "position_embedding.weight is"),
        ({}, {"patch_size": 14}, "makes patches of 14 pixels"),
        ({}, {"do_resize": False}, "do_resize = false"),
    ],
)
def test_what_does_not_fit_is_named(
    tower: dict[str, Any], recipe: dict[str, Any], complaint: str, folder: Path, tmp_path: Path
) -> None:
    recipe = {**OCR_PROCESSOR, **recipe}
    check_refused(folder, tmp_path, complaint, recipe, vision_config=tower)
