"""Our vision tower against transformers: same weights, same pixels, float32."""

from __future__ import annotations

import io
import json
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from PIL import Image
from safetensors.torch import load_file, save_file
from tests.kernels.rows import ISAS
from tests.support.models import change_config, change_tensors
from torch import Tensor
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
    PreTrainedModel,
    SiglipConfig,
    SiglipModel,
    SiglipVisionConfig,
    SiglipVisionModel,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from antiphon.config.errors import ConfigError
from antiphon.config.model import Dtype
from antiphon.encoder.activations import VisionActivation
from antiphon.encoder.model import VisionTower, read_weights
from antiphon.encoder.preprocess import Preprocessor, PreprocessorConfig
from antiphon.encoder.preprocessor_files import read_preprocessor_config
from antiphon.encoder.tower_spec import SiglipSpec, VisionFamily, VisionTowerSpec, read_spec
from antiphon.gateway.media.header import read_header
from antiphon.wire.errors import InvalidRequest, RequestTooLarge

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 32,  # no multiple of the patch: the last two rows and columns are left out
    "patch_size": 6,
}
TEXT: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 40,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 1,
}


def clip_vision(**changes: Any) -> PreTrainedModel:
    return CLIPVisionModel(CLIPVisionConfig(**SHAPE, **changes))


def siglip_vision(**changes: Any) -> PreTrainedModel:
    return SiglipVisionModel(SiglipVisionConfig(**SHAPE, **changes))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "clip vision": clip_vision,
    "clip vision with projection": lambda: CLIPVisionModelWithProjection(CLIPVisionConfig(**SHAPE)),
    "clip": lambda: CLIPModel(CLIPConfig(vision_config=SHAPE, text_config=TEXT)),
    "clip with exact gelu": lambda: clip_vision(hidden_act="gelu"),
    "clip with another eps": lambda: clip_vision(layer_norm_eps=1e-2),
    "siglip vision": siglip_vision,
    "siglip": lambda: SiglipModel(SiglipConfig(vision_config=SHAPE, text_config=TEXT)),
}


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Make no parameter trivial: norms and biases neither 1 nor 0."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        # Wide rows are scaled as at birth, so that three layers neither explode nor vanish.
        scale = 0.2 if parameter.ndim < 2 else max(0.1, parameter[0].numel() ** -0.5)
        parameter.data.copy_(noise * scale + (parameter.ndim < 2) * parameter.data)


def saved(model: PreTrainedModel, folder: Path, seed: int = 3) -> Path:
    randomise(model, seed)
    model.eval().save_pretrained(folder)
    return folder


def pixels(images: int = 2) -> Tensor:
    return torch.randn(images, 3, 32, 32, generator=torch.Generator().manual_seed(11))


@torch.inference_mode()
def expected(model: PreTrainedModel) -> Tensor:
    vision = getattr(model, "vision_model", model)
    return vision(pixel_values=pixels()).last_hidden_state


def ours(folder: Path) -> VisionTower:
    spec = read_spec(folder)
    return VisionTower(spec, read_weights(folder, spec))


def error(tower: VisionTower, reference: Tensor) -> float:
    """The largest difference, in standard deviations of what is right."""
    found = tower(pixels())
    assert found.shape == reference.shape
    return ((found - reference).abs().max() / reference.std()).item()


@pytest.mark.parametrize("name", MODELS)
def test_last_hidden_state_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    tower = ours(saved(model, tmp_path))
    assert error(tower, expected(model)) < 2e-5


@pytest.mark.parametrize("name", ["clip vision", "siglip vision"])
@pytest.mark.parametrize("activation", VisionActivation)
def test_another_activation_is_seen(
    name: str, activation: VisionActivation, tmp_path: Path
) -> None:
    model = MODELS[name]()
    tower = ours(saved(model, tmp_path))
    mutant = VisionTower(replace(tower.spec, activation=activation), tower._weights)
    if activation is tower.spec.activation:
        assert error(mutant, expected(model)) < 2e-5
    else:
        assert error(mutant, expected(model)) > 2e-4


@pytest.mark.parametrize("name", ["clip vision", "siglip vision"])
def test_every_tensor_of_the_tower_matters(name: str, tmp_path: Path) -> None:
    """A weight that was read and not used, or read twice, would go unnoticed above."""
    model = MODELS[name]()
    folder = saved(model, tmp_path)
    right = ours(folder)(pixels())
    file = folder / "model.safetensors"
    tensors = load_file(file)
    unread = ("head.", "post_layernorm.") if name.startswith("clip") else ("head.",)
    for tensor_name, tensor in tensors.items():
        if tensor_name.startswith(unread) or tensor_name.endswith("k_proj.bias"):
            continue  # a bias of the keys adds the same to each score of a query
        changed = tensors | {
            tensor_name: tensor + torch.linspace(0, 1, tensor.numel()).view_as(tensor)
        }
        save_file(changed, file, metadata={"format": "pt"})
        assert (ours(folder)(pixels()) - right).abs().max() > 1e-3, tensor_name


def test_half_precision_weights_are_computed_in_float32(tmp_path: Path) -> None:
    model = siglip_vision()
    folder = saved(model, tmp_path)
    model.half().save_pretrained(folder)
    assert error(ours(folder), expected(model.float())) < 2e-5


@pytest.mark.skipif(not ISAS, reason="without kernels all is float32")
def test_bfloat16_weights_are_computed_in_bfloat16_unless_the_dtype_is_another(
    tmp_path: Path,
) -> None:
    model = siglip_vision()
    folder = saved(model, tmp_path)
    model.bfloat16().save_pretrained(folder)
    right, spec = expected(model.float()), read_spec(folder)

    def error_in(dtype: Dtype) -> float:
        return error(VisionTower(spec, read_weights(folder, spec, dtype)), right)

    assert error_in(Dtype.FLOAT32) < 2e-5
    assert error_in(Dtype.FLOAT16) < 2e-5, "the kernels do not compute in it"
    assert 1e-3 < error_in(Dtype.AUTO) == error_in(Dtype.BFLOAT16) < 0.1


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"model_type": "dinov2"},
            "model_type = 'dinov2': must be one of clip_vision_model, .*, qwen2_vl",
        ),
        (
            {"model_type": "gemma3n", "architectures": ["Gemma3nForConditionalGeneration"]},
            "model_type = 'gemma3n': its towers, MobileNet-v5 .* are not supported",
        ),
        ({"hidden_act": "relu"}, "Invalid enum value 'relu'"),
        ({"num_channels": 4}, "num_channels"),
        ({"num_attention_heads": 5}, "hidden_size = 48 is not a multiple"),
        ({"num_attention_heads": 16}, "not a multiple of twice num_attention_heads = 16"),
        ({"patch_size": 64}, "patch_size = 64 exceeds image_size = 32"),
        ({"intermediate_size": 81}, r"mlp.fc1.weight is \(80, 48\), not \(81, 48\)"),
        ({"num_hidden_layers": 4}, "lack encoder.layers.3.self_attn.q_proj.weight"),
        ({"image_size": 36}, "position_embedding.weight is"),
    ],
)
def test_a_config_that_does_not_fit_is_named(
    changes: dict[str, object], complaint: str, tmp_path: Path
) -> None:
    folder = saved(siglip_vision(), tmp_path)
    change_config(folder, **changes)
    with pytest.raises(ConfigError, match=complaint):
        ours(folder)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: No such file"):
        ours(tmp_path)
    folder = saved(clip_vision(), tmp_path)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"model\.safetensors: not a safetensors file"):
        ours(folder)
    file.unlink()
    with pytest.raises(ConfigError, match=r"there is no \.safetensors file"):
        ours(folder)


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    folder = saved(clip_vision(), tmp_path)
    change_tensors(folder, lambda tensors: {n: t.to(torch.int8) for n, t in tensors.items()})
    with pytest.raises(ConfigError, match="only floats are read"):
        ours(folder)


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
        expected = processor(image, return_tensors="np")["pixel_values"]
    found = ours(data)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("family", [VisionFamily.CLIP, VisionFamily.SIGLIP])
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


def test_an_orientation_that_the_header_does_not_show_turns_nothing() -> None:
    """Pillow reads one in XMP data, too, of which the gateway knows nothing."""
    image = noise(30, 60)
    data = encoded(image, "JPEG", xmp=b'<rdf:Description tiff:Orientation="6"/>', quality=100)
    header = read_header(data)
    assert header is not None
    assert (header.width, header.height) == image.size
    found = OURS.decoded(data, *image.size)
    assert (found.width, found.height) == image.size
    plain = OURS.decoded(encoded(image, "JPEG", quality=100))
    np.testing.assert_array_equal(found.pixels, plain.pixels)
    with pytest.raises(InvalidRequest, match="61 x 30 by its header"):
        OURS.decoded(data, 61, 30)


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
    assert pixels.shape == (1, 3, 24, 24)
    assert np.isfinite(pixels).all()


def test_an_endless_gif_is_its_first_frame() -> None:
    """Frames that never end, and blocks that put the first one off."""
    plain = encoded(noise(30, 30), "GIF")
    head = 13 + 3 * 2 ** ((plain[10] & 7) + 1)  # and the palette
    pause, comment = b"!\xf9\x04" + bytes(5), b"!\xfe\x01a\0"
    for data in (
        plain[:-1] + 20_000 * (pause + plain[head:-1]),
        plain[:head] + 20_000 * (comment + pause) + plain[head:-1],
    ):
        np.testing.assert_array_equal(OURS(data), OURS(plain))
