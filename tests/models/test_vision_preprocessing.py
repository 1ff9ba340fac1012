"""Our preprocessing against transformers' processors on Pillow, and against broken images."""

from __future__ import annotations

import io
import json
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from antiphon.config.errors import ConfigError
from antiphon.encoder.preprocess import (
    Preprocessor,
    PreprocessorConfig,
    SiglipSpec,
    VisionActivation,
    VisionFamily,
    VisionTowerSpec,
    read_preprocessor_config,
)
from antiphon.wire.errors import InvalidRequest, RequestTooLarge

if TYPE_CHECKING:
    from pathlib import Path

PIXELS_MAX = 1_000_000
SIZES = [(31, 47), (47, 31), (24, 24), (5, 3), (200, 60), (24, 25), (1, 90)]


def spec(family: VisionFamily, size: int = 24) -> VisionTowerSpec:
    kind = SiglipSpec if family is VisionFamily.SIGLIP else VisionTowerSpec
    return kind(
        hidden=8,
        intermediate=8,
        layers=1,
        heads=1,
        image_size=size,
        patch_size=4,
        activation=VisionActivation.GELU,
        norm_eps=1e-5,
    )


def noise(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Random pixels, smooth enough that a filter has something to choose from."""
    bands = len(mode)
    values = np.random.default_rng(seed).integers(0, 256, (height, width, bands), dtype=np.uint8)
    return Image.fromarray(values.squeeze(-1) if bands == 1 else values, mode)


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def preprocessor(folder: Path, family: VisionFamily) -> Preprocessor:
    return Preprocessor(read_preprocessor_config(folder, spec(family)), pixels_max=PIXELS_MAX)


def theirs(family: VisionFamily, **changes: Any) -> CLIPImageProcessorPil | SiglipImageProcessorPil:
    if family is VisionFamily.CLIP:
        sizes: dict[str, Any] = {
            "size": {"shortest_edge": 24},
            "crop_size": {"height": 24, "width": 24},
        }
        return CLIPImageProcessorPil(**sizes | changes)
    whole: dict[str, Any] = {"size": {"height": 24, "width": 24}}
    return SiglipImageProcessorPil(**whole | changes)


def assert_same(
    processor: CLIPImageProcessorPil | SiglipImageProcessorPil, ours: Preprocessor, data: bytes
) -> None:
    with Image.open(io.BytesIO(data)) as image:
        expected = processor(image, return_tensors="np")["pixel_values"][0]
    found = ours(data)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("family", VisionFamily)
def test_pixels_are_those_of_transformers(
    family: VisionFamily, size: tuple[int, int], tmp_path: Path
) -> None:
    """With what the authors chose, as no recipe is written."""
    assert_same(theirs(family), preprocessor(tmp_path, family), encoded(noise(*size)))


@pytest.mark.parametrize("mode", ["RGBA", "L", "CMYK"])
@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "BMP"])
def test_formats_and_modes_are_read_as_transformers_reads_them(
    mode: str, form: str, tmp_path: Path
) -> None:
    image = noise(40, 33, mode)
    try:
        data = encoded(image, form)
    except OSError:
        pytest.skip(f"{form} has no {mode}")
    assert_same(theirs(VisionFamily.CLIP), preprocessor(tmp_path, VisionFamily.CLIP), data)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        (VisionFamily.CLIP, {"size": {"shortest_edge": 31}}),
        (
            VisionFamily.CLIP,
            {"resample": 2, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.6, 0.7]},
        ),
        (VisionFamily.CLIP, {"do_normalize": False}),
        (
            VisionFamily.CLIP,
            {"do_center_crop": False, "size": {"height": 24, "width": 24}, "rescale_factor": 0.5},
        ),
        (VisionFamily.SIGLIP, {"resample": 0, "do_rescale": False}),
        (
            VisionFamily.SIGLIP,
            {
                "do_center_crop": True,
                "size": {"shortest_edge": 30},
                "crop_size": {"height": 24, "width": 24},
            },
        ),
    ],
)
def test_a_written_recipe_is_followed(
    family: VisionFamily, changes: dict[str, Any], tmp_path: Path
) -> None:
    processor = theirs(family, **changes)
    processor.save_pretrained(tmp_path)
    assert_same(processor, preprocessor(tmp_path, family), encoded(noise(57, 40)))


def test_sizes_may_be_bare_numbers_as_older_files_write_them(tmp_path: Path) -> None:
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({"size": 24, "crop_size": 24, "feature_extractor_type": "CLIP"}))
    assert read_preprocessor_config(tmp_path, spec(VisionFamily.CLIP)).short_edge == 24
    file.write_text(json.dumps({"size": 24}))
    assert read_preprocessor_config(tmp_path, spec(VisionFamily.SIGLIP)).short_edge is None


@pytest.mark.parametrize(
    ("family", "card", "complaint"),
    [
        (
            VisionFamily.CLIP,
            {"crop_size": 32},
            "makes images of 32 x 32 pixels; the tower takes 24 x 24",
        ),
        (VisionFamily.CLIP, {"size": 20}, "size.shortest_edge must be 24 or more"),
        (
            VisionFamily.SIGLIP,
            {"size": {"height": 24, "width": 30}},
            "makes images of 24 x 30 pixels",
        ),
        (VisionFamily.SIGLIP, {"do_resize": False}, "do_resize = false"),
        (VisionFamily.SIGLIP, {"image_mean": [0.5]}, "image_mean"),
        (VisionFamily.SIGLIP, {"resample": 9}, "resample"),
    ],
)
def test_a_recipe_that_the_tower_does_not_take_is_named(
    family: VisionFamily, card: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(card))
    with pytest.raises(ConfigError, match=complaint):
        read_preprocessor_config(tmp_path, spec(family))


RECIPE = PreprocessorConfig(
    size=24, short_edge=24, resample=3, scale=1 / 255, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)
)
OURS = Preprocessor(RECIPE, pixels_max=PIXELS_MAX)


def test_a_photo_is_turned_as_the_camera_was_held() -> None:
    image = noise(30, 60)
    exif = Image.Exif()
    exif[0x0112] = 6  # shown after a quarter turn to the right
    turned = image.transpose(Image.Transpose.ROTATE_270)
    np.testing.assert_array_equal(OURS(encoded(image, exif=exif)), OURS(encoded(turned)))


def test_too_many_pixels_are_refused_by_the_header() -> None:
    """A few kilobytes would decode to 192 megabytes."""
    data = encoded(Image.new("1", (8_000, 8_000)))
    with pytest.raises(RequestTooLarge, match="64000000 pixels; the limit is 1000000") as caught:
        OURS(data)
    assert caught.value.details == {"pixels": "64000000", "pixels_max": "1000000"}


def test_a_hair_is_not_scaled_up_to_billions_of_pixels() -> None:
    with pytest.raises(InvalidRequest, match="1 x 900000 pixels is too narrow"):
        OURS(encoded(Image.new("L", (1, 900_000))))


@pytest.mark.parametrize("data", [b"", b"GIF89a", b"%PDF-1.7", b"\x89PNG\r\n\x1a\n", bytes(500)])
def test_what_is_no_image_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        OURS(data)
    assert caught.value.param == "image"


def test_formats_off_the_web_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="known format"):
        OURS(encoded(noise(30, 30), "TIFF"))


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
@pytest.mark.parametrize("seed", range(30))
@pytest.mark.filterwarnings("ignore")  # Pillow warns of what it repairs
def test_damaged_images_are_decoded_or_refused(form: str, seed: int) -> None:
    """Cut short, or with bytes changed: never any other error."""
    chance = random.Random(seed)
    data = bytearray(encoded(noise(40, 30, seed=seed), form))
    if seed % 3 == 0:
        del data[chance.randrange(len(data)) :]
    for _ in range(seed % 3 * 4):
        # Mostly in the head, where the structure is.
        data[chance.randrange(min(len(data), chance.choice((60, 10**6))))] = chance.randrange(256)
    try:
        pixels = OURS(data)
    except InvalidRequest:
        return
    assert pixels.shape == (3, 24, 24)
    assert np.isfinite(pixels).all()
