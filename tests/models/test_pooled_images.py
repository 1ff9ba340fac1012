"""Gemma 3's images against transformers: pixels, tower and connector; and what stands for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.support.gemma_vision import IMAGE_TOKENS, write_gemma_vision
from tests.support.image_families import changed, check_refused, processed, reference
from tests.support.llava import picture
from tests.support.towers import check_rows, embedding, opened
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from antiphon.config.errors import ConfigError
from antiphon.config.model import ModelConfig
from antiphon.config.settings import Settings
from antiphon.config.worker import BatchingConfig
from antiphon.model_card.vision.vision_card import read_vision
from antiphon.model_worker.startup.engine import open_engine
from antiphon.service.startup import CannotStart

if TYPE_CHECKING:
    from pathlib import Path

SIZES = [(40, 33), (200, 31), (9, 70), (56, 56)]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gemma_vision(tmp_path_factory.mktemp("gemma"))


def test_pixels_and_embeddings_are_those_of_transformers(gemma: Path) -> None:
    model, theirs = opened(gemma), reference(gemma)
    processor: Any = Gemma3ImageProcessorPil(size={"height": 56, "width": 56})
    for size in SIZES:
        data = picture(2, *size)
        pixels = np.asarray(processed(processor, data)["pixel_values"])
        np.testing.assert_allclose(model.preprocess(data), pixels, rtol=0, atol=2e-6)
        with torch.inference_mode():
            made = theirs.model.get_image_features(torch.as_tensor(pixels)).pooler_output[0]
        check_rows(embedding(model, data), made)


def test_an_image_stands_between_the_texts_of_gemmas_processor(gemma: Path) -> None:
    card = read_vision(gemma)
    assert card is not None
    before, tokens, after = card.pieces(640, 480)
    assert (before, after) == ("\n\n<start_of_image>", "<end_of_image>\n\n")
    assert tokens == card.span_tokens == IMAGE_TOKENS


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"mm_tokens_per_image": 15}, "must be a square whose edge divides 8"),
        ({"mm_tokens_per_image": 9}, "must be a square whose edge divides 8"),
        ({"mm_tokens_per_image": 64}, "sliding_window = 20: must be at least"),
    ],
)
def test_what_does_not_fit_is_named(
    changes: dict[str, Any], complaint: str, gemma: Path, tmp_path: Path
) -> None:
    check_refused(gemma, tmp_path, complaint, **changes)


def test_pan_and_scan_is_refused(gemma: Path, tmp_path: Path) -> None:
    changed(gemma, tmp_path, {"do_pan_and_scan": True})
    with pytest.raises(ConfigError, match="do_pan_and_scan"):
        read_vision(tmp_path)


def test_a_chunk_below_an_image_is_refused_at_start(gemma: Path) -> None:
    settings = Settings(
        model=ModelConfig(path=str(gemma)), batching=BatchingConfig(chunk_tokens=IMAGE_TOKENS - 1)
    )
    with pytest.raises(CannotStart, match="at most 15 tokens, and an image 16, which attend"):
        open_engine(settings)
