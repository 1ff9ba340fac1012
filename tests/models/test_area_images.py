"""Images of Gemma 4 against transformers: sizes, pixels, tower, and texts with them."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.models.model_loop import LINEAR
from tests.models.seeing_loop import SeeingLoop, check_greedy, embedding, prompt, seeing_request
from tests.support.gemma_vision import (
    AREA_AFTER,
    AREA_BEFORE,
    AREA_PROCESSOR,
    area_patches,
    write_gemma4,
)
from tests.support.image_families import (
    LOW,
    card_of,
    changed,
    check_batch,
    check_refused,
    drawn_sizes,
    processed,
    reference,
)
from tests.support.llava import TEXT, picture
from tests.support.models import change_config, open_model
from tests.support.towers import check_every_tensor, opened
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    get_aspect_ratio_preserving_size,
)

from antiphon.layers.per_layer_embedding import PerLayerEmbedding
from antiphon.model_card.vision.areas import TOKENS, AreaImages, AreaSizes
from antiphon.model_card.vision.vision_card import read_vision, videos_of
from antiphon.model_worker.model.families import gemma
from antiphon.wire.claim import PixelLimits
from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.models.seeing_loop import Part

SIZES = [(40, 33), (200, 31), (9, 70), (96, 96), (1, 90), (8, 8), (300, 299), (13, 12), (2000, 3)]
TOWERS = {"plain": {}, "bounded": {"use_clipped_linears": True, "standardize": True}}
NEW = 8
"""Tokens of an answer."""
PROMPTS: Sequence[tuple[Part, ...]] = (
    (3, (15, 0, 1), 4),
    ((24, 0, 2), 9, (2, 0, 3), 30),
    (40, (20, 0, 4), 1, (9, 0, 5), 2),
    (13,),
)


@pytest.fixture(scope="module", params=TOWERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gemma4(tmp_path_factory.mktemp("gemma4"), TOWERS[request.param])


def test_pixels_tokens_and_embeddings_are_those_of_transformers(folder: Path) -> None:
    """Embeddings are those of images in one batch, where ours are alone."""
    theirs: Any = Gemma4ImageProcessorPil(**AREA_PROCESSOR)
    model, card, pixels = opened(folder), card_of(folder, AreaImages), list[torch.Tensor]()
    assert videos_of(card) is model.videos is None
    for size in SIZES:
        expected = processed(theirs, picture(1, *size))
        pixels.append(torch.as_tensor(model.preprocess(picture(1, *size))))
        found = area_patches([pixels[-1]])
        np.testing.assert_allclose(found["pixel_values"], expected["pixel_values"], atol=4e-6)
        np.testing.assert_array_equal(found["image_position_ids"], expected["image_position_ids"])
        tokens = int(expected["num_soft_tokens_per_image"][0])
        assert card.pieces(*size) == (AREA_BEFORE, tokens, AREA_AFTER)
        assert card.columns(*size) == 0
    check_batch(folder, model, SIZES, area_patches(pixels))


def test_every_tensor_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the bounds, which are one number each, the comparison above shows it."""
    folder = write_gemma4(tmp_path, {**TOWERS["bounded"], "num_hidden_layers": 1})
    check_every_tensor(folder, picture(5, 35, 30), monkeypatch, unfelt=("_min", "_max"))


def test_sizes_are_those_of_transformers() -> None:
    known = ((48, 48), (1, 100_000), (9000, 2), (1, 1), (3360, 48))
    for tokens in TOKENS:
        sizes = AreaSizes(patch=16, merge=3, tokens_max=tokens)
        for width, height in drawn_sizes(4000, 60, *known):
            expected = get_aspect_ratio_preserving_size(height, width, 16, 9 * tokens, 3)
            assert sizes.scaled(width, height) == expected[::-1], (width, height)


def test_low_detail_has_the_fewest_tokens() -> None:
    sizes = AreaSizes(patch=16, merge=3, tokens_max=280)
    assert sizes.within(LOW).tokens_max == 70
    assert sizes.within(PixelLimits()) == sizes
    with pytest.raises(InvalidRequest, match="no min_pixels and max_pixels"):
        sizes.within(PixelLimits(most=1000))


@torch.inference_mode()
def check_answers(folder: Path, model: Any, **changes: Any) -> None:
    """Greedy tokens of all prompts side by side are those of transformers."""
    image, hidden = model.config.image_token_id, TEXT["hidden_size"]
    assert isinstance(hidden, int)
    values = {"media_grids": False, "span_tokens": 70, "chunk_tokens": 26, "step_tokens_max": 40}
    opened = open_model(folder, page_tokens=4, pages=160, dtype="float32", linear=LINEAR)
    loop = SeeingLoop(opened, media_width=hidden, **{**values, **changes})
    requests = [
        seeing_request(parts, image, str(number), max_new_tokens=NEW)
        for number, parts in enumerate(PROMPTS)
    ]
    for parts, output in zip(PROMPTS, loop.run(requests), strict=True):
        before, media = prompt(parts, image)
        ids = torch.tensor([[*before, *output.ids]])
        rows = [torch.as_tensor(embedding(each.width, each.span.rows, hidden)) for each in media]
        seen = {"image": SimpleNamespace(pooler_output=rows)} if rows else None
        types = (ids == image).int()
        logits = model(input_ids=ids, mm_token_type_ids=types, mm_encoder_outputs=seen).logits[0]
        assert len(output.ids) == NEW
        check_greedy(logits, output.ids, len(before), parts)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gemma4(tmp_path_factory.mktemp("gemma4-texts"))


def test_answers_are_those_of_transformers(texts: Path) -> None:
    """Text before, between and behind images, in chunks that end with one."""
    model = reference(texts)
    check_answers(texts, model)
    check_answers(texts, model, overlap=True, tree=True)


def _everywhere(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    plain = gemma._gemma4_attention
    monkeypatch.setattr(
        gemma, "_gemma4_attention", lambda *said: replace(plain(*said), image_ahead=True)
    )
    return {}


def _by_placeholder(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    plain = PerLayerEmbedding.__call__

    def call(self: PerLayerEmbedding, ctx: Any, tokens: Any, entering: Any, _: object) -> Any:
        return plain(self, ctx, tokens, entering, None)

    monkeypatch.setattr(PerLayerEmbedding, "__call__", call)
    return {}


@pytest.mark.parametrize(
    "mutant",
    [lambda _: {"span_tokens": None}, _everywhere, _by_placeholder],
    ids=["causal", "global layers, too", "inputs of placeholders"],
)
def test_other_answers_would_be_noticed(
    texts: Path, monkeypatch: pytest.MonkeyPatch, mutant: Callable[..., dict[str, Any]]
) -> None:
    changes = mutant(monkeypatch)
    with pytest.raises(AssertionError, match="token"):
        check_answers(texts, reference(texts), **changes)


def test_images_are_causal_where_the_config_says_so(texts: Path, tmp_path: Path) -> None:
    assert card_of(changed(texts, tmp_path), AreaImages).span_tokens == 70
    config = json.loads((texts / "config.json").read_text())
    text = {k: v for k, v in config["text_config"].items() if k != "use_bidirectional_attention"}
    change_config(tmp_path, text_config=text)
    assert card_of(tmp_path, AreaImages).span_tokens is None
    change_config(tmp_path, vision_config=None)
    assert read_vision(tmp_path) is None


@pytest.mark.parametrize(
    ("part", "changes", "recipe", "complaint"),
    [
        ("vision_config", {"num_key_value_heads": 1}, {}, "num_key_value_heads = 1: must be num_a"),
        ("vision_config", {"head_dim": 14}, {}, "head_dim = 14: must be a multiple of four"),
        ("vision_config", {"position_embedding_size": 200}, {}, "positions of 200 patches"),
        ("vision_config", {"hidden_activation": "tanh"}, {}, "tanh"),
        ("vision_config", {"rope_parameters": {"rope_type": "yarn"}}, {}, "yarn"),
        ("vision_config", {"use_clipped_linears": True}, {}, "lack .*input_min"),
        ("text_config", {"sliding_window": 60}, {}, "sliding_window = 60: must be at least"),
        ("text_config", {}, {"patch_size": 8}, "makes patches of 8 pixels, 3 an edge"),
        ("text_config", {}, {"max_soft_tokens": 71}, "max_soft_tokens = 71: must be one of 70"),
        ("text_config", {}, {"do_resize": False}, "do_resize = false"),
    ],
)
def test_what_does_not_fit_is_named(
    part: str,
    changes: dict[str, Any],
    recipe: dict[str, Any],
    complaint: str,
    texts: Path,
    tmp_path: Path,
) -> None:
    check_refused(texts, tmp_path, complaint, {**AREA_PROCESSOR, **recipe}, **{part: changes})
