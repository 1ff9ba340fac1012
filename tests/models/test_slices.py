"""MiniCPM-V's images, cut to slices, against transformers: sizes, pixels, marks, tower, merger."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.support.image_families import (
    card_of,
    changed,
    check_low_detail,
    check_refused,
    drawn_sizes,
    processed,
    reference,
    written,
)
from tests.support.llava import picture
from tests.support.minicpm_v import (
    PLACEHOLDER,
    PROCESSOR,
    slices_in_a_row,
    write_minicpm_v,
)
from tests.support.towers import check_every_tensor, check_rows, embedding, opened
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import (
    MiniCPMV4_6ImageProcessorPil,
)
from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor

from antiphon.config.settings import EncoderConfig
from antiphon.encoder.cache import DecodeJob
from antiphon.encoder.decode_process import DecodeProcesses, DecodeSettings
from antiphon.encoder.preprocess import Preprocessor
from antiphon.model_card.vision.slices import SlicedImages, SliceTiling
from antiphon.tokenizer.encoding import EncodedPrompt, TextEncoder
from antiphon.tokenizer.model_tokenizer import read_model_tokenizer
from antiphon.wire.codec import unpack_ids
from antiphon.wire.errors import InvalidRequest
from antiphon.wire.ids import ModelName, RequestId
from antiphon.wire.media import MediumHeader
from antiphon.wire.namespaces import PageOrigin
from antiphon.wire.tokenize import EncodeRequest

if TYPE_CHECKING:
    from pathlib import Path

SIZES = [(40, 33), (200, 31), (9, 70), (32, 32), (1, 90), (300, 299), (5, 3), (60, 64)]
WORDS: Any = SimpleNamespace(
    image_token=PLACEHOLDER,
    image_start_token="<image>",
    image_end_token="</image>",
    slice_start_token="<slice>",
    slice_end_token="</slice>",
    image_id_start_token="<image_id>",
    image_id_end_token="</image_id>",
    slice_mode=True,
)
"""What transformers' processor reads of itself when it writes marks."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_minicpm_v(tmp_path_factory.mktemp("minicpm"))


def marks(expected: Any, divisor: int = 16) -> str:
    return MiniCPMV4_6Processor.replace_image_token(WORDS, expected, 0, image_token_divisor=divisor)


def compare(folder: Path, mode: str) -> None:
    """Embeddings are those of images in one batch, where ours are alone."""
    theirs: Any = MiniCPMV4_6ImageProcessorPil(**PROCESSOR, downsample_mode=mode)
    model, card = opened(folder), card_of(folder, SlicedImages)
    parts, counts = list[torch.Tensor](), list[int]()
    for size in SIZES:
        data = picture(1, *size)
        expected = processed(theirs, data)
        made = [
            torch.as_tensor(part)
            for part in model.preprocess.frames(model.preprocess.decoded(data))
        ]
        found = slices_in_a_row(made)
        np.testing.assert_array_equal(found["target_sizes"], expected["target_sizes"])
        np.testing.assert_allclose(
            found["pixel_values"], expected["pixel_values"], rtol=0, atol=4e-6
        )
        counts.append(len(expected["target_sizes"]))
        assert counts[-1] <= model.preprocess.recipe.frames_max
        divisor = 16 if mode == "16x" else 4
        assert written(card.pieces(*size), PLACEHOLDER) == marks(expected, divisor)
        parts += made
    with torch.inference_mode():
        features = reference(folder).model.get_image_features(**slices_in_a_row(parts))
    assert max(counts) > 1
    frames = iter(features.pooler_output)
    for size, count in zip(SIZES, counts, strict=True):
        right = torch.cat([next(frames) for _ in range(count)])
        check_rows(embedding(model, picture(1, *size)), right)


def test_pixels_marks_and_embeddings_are_those_of_transformers(folder: Path) -> None:
    compare(folder, "16x")


@pytest.mark.parametrize(
    ("mode", "fields"), [("4x", {"downsample_mode": "4x"}), ("16x", {"insert_layer_id": 1})]
)
def test_other_mergers_are_those_of_transformers(
    mode: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    """Without windows, and with windows that are merged behind the last layer."""
    write_minicpm_v(tmp_path, **fields)
    recipe = {**PROCESSOR, "downsample_mode": mode}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(recipe))
    compare(tmp_path, mode)


def test_every_tensor_matters(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_every_tensor(folder, picture(5, 30, 20), monkeypatch, unfelt=("k_proj.bias",))


def test_sizes_are_those_of_transformers() -> None:
    theirs: Any = MiniCPMV4_6ImageProcessorPil()
    tiling = SliceTiling(resolution=448, edge=56, most=9)
    known = ((448, 448), (896, 448), (449, 448), (1, 4000), (1344, 1344))
    for width, height in drawn_sizes(4000, 200, *known):
        grid = theirs.get_sliced_grid((height, width), 9, 448)
        right = theirs.find_best_resize((height, width), 448, 14, "16x", allow_upscale=grid is None)
        assert tiling.whole(width, height) == right[::-1], (width, height)
        assert tiling.grid(width, height) == tuple((grid or [1, 1])[::-1]), (width, height)
        if grid is not None:
            refined = theirs.get_refine_size((height, width), grid, 448, 14, "16x", True)
            assert tiling.slices(width, height) == refined[::-1], (width, height)


@pytest.mark.parametrize("numbered", [True, False])
def test_images_are_numbered_in_a_prompt(folder: Path, tmp_path: Path, numbered: bool) -> None:
    """As transformers numbers them; what is cached of an image does not depend on it."""
    changed(folder, tmp_path, {**PROCESSOR, "use_image_id": numbered})
    words = read_model_tokenizer(tmp_path, vision=card_of(tmp_path, SlicedImages))
    encoder = TextEncoder(words, PageOrigin(model_digest="m"), 10**6, context_tokens=10**6)
    image = MediumHeader(digest=bytes(32), width=60, height=29)
    request = EncodeRequest(
        request_id=RequestId("1"),
        model=ModelName("m"),
        prompt=f"One {PLACEHOLDER} and {PLACEHOLDER}?",
        media=(image, image),
        deadline_unix_ms=0,
    )
    (found,) = encoder.encode([request])
    assert isinstance(found, EncodedPrompt)
    theirs: Any = MiniCPMV4_6ImageProcessorPil(**PROCESSOR)
    both = [marks(processed(theirs, picture(1, 60, 29)))] * 2
    if numbered:
        both = MiniCPMV4_6Processor._prepend_local_ids(WORDS, [request.prompt], both, PLACEHOLDER)
    text = f"One {both[0]} and {both[1]}?"
    assert [*unpack_ids(found.token_ids)] == words.tokenizer.encode(text).ids
    first, second = found.media
    assert first.key == second.key
    assert first.tokens == second.tokens


async def test_another_process_decodes_the_same(folder: Path) -> None:
    preprocess, data = opened(folder).preprocess, picture(1, 60, 29)
    settings = DecodeSettings(preprocess.recipe, 10**6)
    processes = DecodeProcesses(settings, EncoderConfig(decode_processes=1))
    async with processes.images:
        found = await processes.decode(data, DecodeJob(60, 29), timeout_s=60)
    right = preprocess.decoded(data)
    assert found.overview is not None
    assert right.overview is not None
    np.testing.assert_array_equal(found.overview, right.overview)
    np.testing.assert_array_equal(found.pixels, right.pixels)


def test_a_narrow_image_is_refused(folder: Path) -> None:
    preprocess = Preprocessor(opened(folder).preprocess.recipe, pixels_max=20_000)
    assert preprocess.decoded(picture(1, 900, 3)).overview is not None
    with pytest.raises(InvalidRequest, match="2500 x 3 pixels is too narrow"):
        preprocess.decoded(picture(1, 2500, 3))


def test_low_detail_is_all_of_an_image(folder: Path) -> None:
    model, card = opened(folder), card_of(folder, SlicedImages)
    assert check_low_detail(model, card, ("<image>", 5, "</image>")).overview is None


@pytest.mark.parametrize(
    ("config", "recipe", "complaint"),
    [
        ({"vision_config": {"num_attention_heads": 16}}, {}, "four times"),
        ({"vision_config": {"image_size": 24}}, {}, "position_embedding.weight is"),
        ({"insert_layer_id": 2}, {}, "must be one of 2 layers"),
        ({"merge_kernel_size": [2, 1]}, {}, r"must be \[2, 2\]"),
        ({"merger_times": 2}, {}, "merger_times = 2: must be 1"),
        ({"image_token_id": None}, {}, "image_token_id is missing"),
        ({}, {"patch_size": 14}, "patch_size = 14"),
        ({}, {"downsample_mode": "4x"}, "downsample_mode = '4x'"),
        ({}, {"do_resize": False}, "do_resize = false"),
        ({}, {"max_slice_nums": 0}, "max_slice_nums"),
    ],
)
def test_what_does_not_fit_is_named(
    config: dict[str, Any],
    recipe: dict[str, Any],
    complaint: str,
    folder: Path,
    tmp_path: Path,
) -> None:
    check_refused(folder, tmp_path, complaint, {**PROCESSOR, **recipe}, **config)
