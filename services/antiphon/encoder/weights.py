"""Reads a tower's weights from safetensors and checks their shapes."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol, cast

import torch
from safetensors import SafetensorError, safe_open

from antiphon.config.errors import ConfigError
from antiphon.encoder.spec import VisionFamily, VisionTowerSpec
from antiphon.encoder.tower import Affine, VisionLayerWeights, VisionTowerWeights

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

INNER = "vision_model."
"""Prefix of the tower's tensor names in models that have more than the tower."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def read_weights(folder: Path, spec: VisionTowerSpec) -> VisionTowerWeights:
    """Read a tower as float32; other tensors (text tower, projections, heads) are ignored.

    Raises:
        ConfigError: There are no files, one is broken, or a tensor is missing, has another shape or
            an unsupported dtype.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder}: there is no .safetensors file")
    with ExitStack() as open_files:
        return _read(_Checkpoint(files, open_files), spec)


class _OpenSafetensors(Protocol):
    """An open safetensors file; the package has no type hints for it."""

    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str) -> Tensor: ...


class _Checkpoint:
    """Tensors of all files, by name."""

    def __init__(self, files: list[Path], open_files: ExitStack) -> None:
        self._homes: dict[str, tuple[Path, _OpenSafetensors]] = {}
        for file in files:
            try:
                opened = cast(
                    "_OpenSafetensors", open_files.enter_context(safe_open(file, framework="pt"))
                )
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{file}: not a safetensors file: {error}") from error
            self._homes |= dict.fromkeys(opened.keys(), (file, opened))
        self._folder = files[0].parent
        self._prefix = INNER if any(name.startswith(INNER) for name in self._homes) else ""

    def read(self, name: str, *shape: int) -> Tensor:
        """Read one tensor of the tower."""
        name = self._prefix + name
        if name not in self._homes:
            raise ConfigError(f"{self._folder}: the weights lack {name}")
        file, opened = self._homes[name]
        tensor = opened.get_tensor(name)
        if tensor.shape != shape:
            raise ConfigError(f"{file}: {name} is {tuple(tensor.shape)}, not {shape}")
        if tensor.dtype not in DTYPES:
            raise ConfigError(f"{file}: {name} is {tensor.dtype}: only floats are read")
        return tensor.float()

    def affine(self, name: str, *shape: int) -> Affine:
        """Read a weight and its bias, whose length is the weight's first dimension."""
        return Affine(self.read(f"{name}.weight", *shape), self.read(f"{name}.bias", shape[0]))


def _read(checkpoint: _Checkpoint, spec: VisionTowerSpec) -> VisionTowerWeights:
    clip = spec.family is VisionFamily.CLIP
    hidden, patch = spec.hidden, spec.patch_size
    take, affine = checkpoint.read, checkpoint.affine
    return VisionTowerWeights(
        patch=take("embeddings.patch_embedding.weight", hidden, 3, patch, patch),
        patch_bias=None if clip else take("embeddings.patch_embedding.bias", hidden),
        class_token=take("embeddings.class_embedding", hidden) if clip else None,
        positions=take("embeddings.position_embedding.weight", spec.tokens, hidden),
        # The misspelling is in every CLIP checkpoint.
        norm_before=affine("pre_layrnorm", hidden) if clip else None,
        layers=tuple(_layer(checkpoint, f"encoder.layers.{i}", spec) for i in range(spec.layers)),
        norm_after=None if clip else affine("post_layernorm", hidden),
    )


def _layer(checkpoint: _Checkpoint, name: str, spec: VisionTowerSpec) -> VisionLayerWeights:
    hidden, wide, affine = spec.hidden, spec.intermediate, checkpoint.affine
    q, k, v = (affine(f"{name}.self_attn.{part}_proj", hidden, hidden) for part in "qkv")
    return VisionLayerWeights(
        norm1=affine(f"{name}.layer_norm1", hidden),
        qkv=Affine(torch.cat((q.weight, k.weight, v.weight)), torch.cat((q.bias, k.bias, v.bias))),
        out=affine(f"{name}.self_attn.out_proj", hidden, hidden),
        norm2=affine(f"{name}.layer_norm2", hidden),
        up=affine(f"{name}.mlp.fc1", wide, hidden),
        down=affine(f"{name}.mlp.fc2", hidden, wide),
    )
