"""Our vision tower against transformers: same weights, same pixels, float32."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
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

from antiphon.config.errors import ConfigError
from antiphon.encoder.model import VisionTower, read_weights
from antiphon.encoder.preprocess import VisionActivation, read_spec

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


def clip_projecting() -> PreTrainedModel:
    return CLIPVisionModelWithProjection(CLIPVisionConfig(**SHAPE))


def clip_whole() -> PreTrainedModel:
    return CLIPModel(CLIPConfig(vision_config=SHAPE, text_config=TEXT))


def siglip_vision(**changes: Any) -> PreTrainedModel:
    return SiglipVisionModel(SiglipVisionConfig(**SHAPE, **changes))


def siglip_whole() -> PreTrainedModel:
    return SiglipModel(SiglipConfig(vision_config=SHAPE, text_config=TEXT))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "clip vision": clip_vision,
    "clip vision with projection": clip_projecting,
    "clip": clip_whole,
    "clip with exact gelu": lambda: clip_vision(hidden_act="gelu"),
    "clip with another eps": lambda: clip_vision(layer_norm_eps=1e-2),
    "siglip vision": siglip_vision,
    "siglip": siglip_whole,
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


def edit(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "dinov2"}, "model_type = 'dinov2': must be one of clip_vision_model"),
        ({"hidden_act": "relu"}, "Invalid enum value 'relu'"),
        ({"num_channels": 4}, "num_channels"),
        ({"num_attention_heads": 5}, "hidden_size = 48 is not a multiple"),
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
    edit(folder, **changes)
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
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({name: tensor.to(torch.int8) for name, tensor in tensors.items()}, file)
    with pytest.raises(ConfigError, match="only floats are read"):
        ours(folder)
