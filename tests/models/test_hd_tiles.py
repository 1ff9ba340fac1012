"""Phi-4-multimodal's images against transformers: sizes, masks, pixels, tokens, tower and rows.

Pixels of its processor are those of Pillow's filter on the grid, as its published code has it.
"""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from tests.support.llava import picture
from tests.support.models import change_config
from tests.support.phi4 import (
    MOST,
    PATCH,
    PLACEHOLDER,
    PROCESSOR,
    TILE,
    TOWER,
    Phi4Reference,
    batched,
    grid_of,
    processed,
    write_phi4,
)
from tests.support.towers import check_every_tensor, check_rows, embedding, opened

from antiphon.config.errors import ConfigError
from antiphon.encoder.grid_tower import GridTower
from antiphon.encoder.preprocess import BILINEAR, Preprocessor, PreprocessorConfig
from antiphon.encoder.tower_layers import TowerLayers
from antiphon.model_card.vision.hd_tiles import HdImages, HdTiling
from antiphon.model_card.vision.vision_card import read_vision, videos_of
from antiphon.tokenizer.encoding import EncodedPrompt, TextEncoder
from antiphon.tokenizer.model_tokenizer import read_model_tokenizer
from antiphon.wire.claim import AudioWindow, PixelLimits
from antiphon.wire.codec import unpack_ids
from antiphon.wire.errors import InvalidRequest, Unsupported
from antiphon.wire.ids import ModelName, RequestId
from antiphon.wire.media import MediumHeader
from antiphon.wire.namespaces import PageOrigin
from antiphon.wire.tokenize import EncodeRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

SIZES = (
    *((40, 33), (200, 31), (31, 200), (80, 80), (300, 299)),
    *((900, 600), (161, 81), (12, 13), (640, 110), (110, 640)),
)
"""Grids of one tile and of several, cut off within a token and between two, in both directions."""
INPUTS = ("image_pixel_values", "image_sizes", "image_attention_mask")
"""What transformers' model takes of what its processor makes, by the same names."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_phi4(tmp_path_factory.mktemp("phi4"))


def card_of(folder: Path) -> HdImages:
    card = read_vision(folder)
    assert isinstance(card, HdImages)
    return card


def shown(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


@torch.inference_mode()
def rows(reference: Any, inputs: Mapping[str, Tensor], counts: Sequence[int]) -> list[Tensor]:
    """What transformers makes of a batch of images that have so many tokens: (rows, hidden)."""
    config = reference.config
    ids = torch.full((1, sum(counts)), config.vision_config.image_token_id)
    made = reference.model.embed_tokens_extend.image_embed(
        ids, torch.zeros(1, sum(counts), config.hidden_size), **inputs
    )
    return list(made[0].split(list(counts)))


def compare(folder: Path) -> None:
    """All images are one batch in transformers, where ours are alone."""
    model, card = opened(folder), card_of(folder)
    assert videos_of(card) is None
    files = [picture(1, *size) for size in SIZES]
    expected = processed(*map(shown, files))
    counts = [card.tiling.tokens(*size) for size in SIZES]
    assert [card.pieces(*size) for size in SIZES] == [(count,) for count in counts]
    for index, data in enumerate(files):
        found = model.preprocess(data)
        assert 2 <= len(found) <= model.preprocess.recipe.frames_max
        right = expected["image_pixel_values"][index]
        np.testing.assert_allclose(found, right[: len(found)].numpy(), rtol=0, atol=4e-6)
        assert not right[len(found) :].any()
    whole = (TILE // PATCH // 2) * (TILE // PATCH // 2 + 1)
    # It counts the tokens of all of an image as those of a tile of 448 pixels.
    assert counts == [count - 272 + whole for count in expected["num_img_tokens"]]
    inputs = {name: expected[name] for name in INPUTS}
    reference = Phi4Reference.from_pretrained(folder).eval()
    for data, right in zip(files, rows(reference, inputs, counts), strict=True):
        check_rows(embedding(model, data), right)


def test_pixels_tokens_and_embeddings_are_those_of_transformers(folder: Path) -> None:
    compare(folder)


@pytest.mark.parametrize("layer", [-1, 1])
def test_the_output_of_another_layer_is_that_of_transformers(layer: int, tmp_path: Path) -> None:
    compare(write_phi4(tmp_path, feature_layer=layer))


def _all_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = TowerLayers.__call__

    def call(self: TowerLayers, x: Tensor, rows: Any, turns: Any, seen: Tensor | None) -> Any:
        del seen
        return plain(self, x, rows, turns)

    monkeypatch.setattr(TowerLayers, "__call__", call)


def _placed_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    plain: Any = GridTower._at_steps

    def at_steps(self: GridTower, table: Tensor, *within: Any) -> Tensor:
        return plain(self, table, *within[:-1], None)

    monkeypatch.setattr(GridTower, "_at_steps", at_steps)


def _padding_is_last(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = GridTower._at_steps

    def at_steps(self: GridTower, table: Tensor, *within: Any) -> Tensor:
        learned, seen = plain(self, table, *within), within[-1]
        return learned if seen is None else torch.where(seen[:, None], learned, table[-1])

    monkeypatch.setattr(GridTower, "_at_steps", at_steps)


@pytest.mark.parametrize("mutant", [_all_seen, _placed_by_all, _padding_is_last])
def test_other_padding_would_be_noticed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, mutant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    reference, size, data = Phi4Reference.from_pretrained(folder).eval(), (40, 33), picture(1)
    expected = processed(shown(data))
    inputs = {name: expected[name] for name in INPUTS}
    (right,) = rows(reference, inputs, [card_of(folder).tiling.tokens(*size)])
    model = opened(folder)
    check_rows(embedding(model, data), right)
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check_rows(embedding(model, data), right)


def test_every_tensor_matters(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    idle = ("layers.2.", "head.", "post_layernorm.")
    check_every_tensor(folder, picture(5, 161, 81), monkeypatch, idle, unfelt=("k_proj.bias",))


@pytest.mark.parametrize(
    ("tile", "patch", "most"), [(448, 14, 36), (448, 14, 1), (TILE, PATCH, MOST), (28, 7, 4)]
)
def test_sizes_are_those_of_transformers(tile: int, patch: int, most: int) -> None:
    tiling, side, narrow = HdTiling(tile=tile, patch=patch, most=most), tile // patch, 0
    drawn = np.random.default_rng(3).integers(1, 6000, (120, 2)).tolist()
    known = [(448, 448), (896, 448), (449, 448), (1344, 1344), (1, 5000), (5000, 3), (2688, 2689)]
    for width, height in [*drawn, *known, (300, 300), (299, 300), (560, 448), (3000, 2400)]:
        try:
            across, down, mask = grid_of(width, height, tile, patch, most)
        except ValueError:
            narrow += 1
            with pytest.raises(InvalidRequest, match="is too narrow: scaled to"):
                tiling.tokens(width, height)
            continue
        shape = width, height
        assert tiling.grid(*shape) == (across // tile, down // tile), shape
        assert tiling.patches(*shape) == (int(mask[:, 0].sum()), int(mask[0].sum())), shape
        assert mask[::side, ::side].all(), "no tile is padding alone"
        tokens = mask[::2, ::2].sum() + mask[::2, 0].sum() + 1 + side // 2 * (side // 2 + 1)
        assert tiling.tokens(*shape) == tokens, shape
        assert tokens <= tiling.tokens_max
    assert narrow


def test_an_image_of_published_sizes_is_that_of_transformers() -> None:
    data, tiling = picture(1, 1000, 700), HdTiling(tile=448, patch=14)
    half = (0.5, 0.5, 0.5)
    recipe = PreprocessorConfig(448, None, BILINEAR, 1 / 255, half, half, tiling=tiling)
    expected = processed(shown(data), tile=448, patch=14, most=36)
    found = Preprocessor(recipe, pixels_max=10**6)(data)
    np.testing.assert_allclose(found, expected["image_pixel_values"][0].numpy(), rtol=0, atol=4e-6)
    assert [tiling.tokens(1000, 700)] == expected["num_img_tokens"]
    sent = msgspec.json.encode(recipe)  # as to processes that decode
    assert msgspec.json.decode(sent, type=PreprocessorConfig) == recipe


def test_texts_around_images_are_encoded_as_they_are(folder: Path) -> None:
    card = card_of(folder)
    words = read_model_tokenizer(folder, vision=card)
    encoder = TextEncoder(words, PageOrigin(model_digest="m"), 10**6, context_tokens=10**6)
    sizes = [(200, 31), (40, 33)]
    request = EncodeRequest(
        request_id=RequestId("1"),
        model=ModelName("m"),
        prompt=f"<|user|>One {PLACEHOLDER} and {PLACEHOLDER}?<|end|>",
        media=tuple(MediumHeader(digest=bytes(32), width=x, height=y) for x, y in sizes),
        deadline_unix_ms=0,
    )
    (found,) = encoder.encode([request])
    assert isinstance(found, EncodedPrompt)
    counts = processed(*(shown(picture(1, *size)) for size in sizes))["num_img_tokens"]
    one, two = (PLACEHOLDER * (count - 272 + 30) for count in counts)
    text = f"<|user|>One {one} and {two}?<|end|>"
    assert [*unpack_ids(found.token_ids)] == words.tokenizer.encode(text).ids


def test_audio_is_refused_by_name(folder: Path) -> None:
    words = read_model_tokenizer(folder, vision=card_of(folder))
    encoder = TextEncoder(words, PageOrigin(model_digest="m"), 10**6, context_tokens=10**6)
    request = EncodeRequest(
        request_id=RequestId("1"),
        model=ModelName("m"),
        prompt="<|user|>What is said? <|audio|><|end|>",
        media=(
            MediumHeader(
                digest=bytes(32), width=0, height=0, audio=AudioWindow(format="wav", seconds=3.0)
            ),
        ),
        deadline_unix_ms=0,
    )
    (refused,) = encoder.encode([request])
    assert isinstance(refused, Unsupported)
    assert (refused.message, refused.param) == ("this model takes no audio in a prompt", "media.0")


def test_low_detail_is_one_tile_and_all_of_it(folder: Path) -> None:
    card, model, limits = card_of(folder), opened(folder), PixelLimits(low=True)
    low, data = card.within(limits), picture(1, 200, 31)
    assert low.pieces(200, 31) == (37,)
    assert low.processing != card.processing
    assert low.within(limits) == low
    image = model.preprocess.decoded(data, limits=limits)
    (frames,) = model.preprocess.frames(image)
    inputs = batched([torch.as_tensor(frames)], [(200, 31)])
    expected = processed(shown(data), most=1)
    np.testing.assert_allclose(frames, expected["image_pixel_values"][0].numpy(), atol=4e-6)
    assert torch.equal(inputs["image_attention_mask"], expected["image_attention_mask"])
    assert torch.equal(inputs["image_sizes"], expected["image_sizes"])
    (right,) = rows(Phi4Reference.from_pretrained(folder).eval(), inputs, [37])
    made = model.embed(image)
    check_rows(np.frombuffer(made.data, "<f4").reshape(made.tokens, made.hidden), right)
    with pytest.raises(InvalidRequest, match="no min_pixels and max_pixels"):
        card.within(PixelLimits(most=500))


def test_a_narrow_image_is_refused(folder: Path) -> None:
    refused = "600 x 9 pixels is too narrow: scaled to 480 x 7 pixels"
    with pytest.raises(InvalidRequest, match=refused):
        card_of(folder).pieces(600, 9)
    with pytest.raises(InvalidRequest, match=refused):
        opened(folder).preprocess.decoded(picture(1, 600, 9))


def test_what_a_config_leaves_out_is_the_default_of_its_class(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "phi4_multimodal"}))
    card = card_of(tmp_path)
    assert (card.placeholder, card.tiling) == (200_010, HdTiling(tile=448, patch=14))
    assert card.pieces(448, 448) == (2 * 272 + 1,)
    assert card.pieces(2000, 1500) == (5133,)


@pytest.mark.parametrize(
    ("config", "recipe", "complaint"),
    [
        ({"feature_layer": 0}, {}, "feature_layer = 0: must be one of 3 layers"),
        ({"feature_layer": -4}, {}, "feature_layer = -4: must be one of 3 layers"),
        ({"num_attention_heads": 16}, {}, "not a multiple of four times"),
        ({"crop_size": 40}, {}, "crop_size = 40, image_size = 80: must be equal"),
        ({"patch_size": 16}, {}, "an even number of patches of 16 pixels"),
        ({"hidden_size": 64}, {}, "img_projection_up.weight is"),
        ({"hidden_act": "tanh"}, {}, "tanh"),
        ({}, {"patch_size": 14}, "patches of 14; the tower takes 80 x 80, and 8"),
        ({}, {"size": {"height": 80, "width": 40}}, "makes tiles of 80 x 40 pixels"),
        ({}, {"resample": 2}, r"resample = 2: must be 3 \(bicubic\)"),
        ({}, {"dynamic_hd": 0}, "dynamic_hd"),
    ],
)
def test_what_does_not_fit_is_named(
    config: Mapping[str, Any],
    recipe: Mapping[str, Any],
    complaint: str,
    folder: Path,
    tmp_path: Path,
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    change_config(tmp_path, vision_config={**TOWER, **config})
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**PROCESSOR, **recipe}))
    with pytest.raises(ConfigError, match=complaint):
        opened(tmp_path)
