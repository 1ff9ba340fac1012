"""The vision transformer of CLIP and SigLIP, in torch.

Axes: B images, T tokens (patches, and CLIP's class token), C hidden, N heads, D of each head.

Source: Dosovitskiy et al. 2020, arXiv:2010.11929; Radford et al. 2021, arXiv:2103.00020 (CLIP);
Zhai et al. 2023, arXiv:2303.15343 (SigLIP).
"""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from torch import Tensor

from antiphon.encoder.activations import ACTIVATIONS
from antiphon.encoder.cache import CachedEmbedding
from antiphon.encoder.connectors import Connector, read_connector
from antiphon.encoder.grid_tower import (
    GridTower,
    GridTowerSpec,
    read_grid_spec,
    read_grid_weights,
)
from antiphon.encoder.preprocess import (
    Preprocessor,
    VisionFamily,
    VisionTowerSpec,
    read_grid_config,
    read_preprocessor_config,
    read_spec,
)
from antiphon.encoder.tensor_files import Affine, TensorFiles, weight_files
from antiphon.model_card.vision import GridImages, read_vision
from antiphon.resolve.device import detect_device

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from antiphon.config.settings import Settings


PATCH = "embeddings.patch_embedding.weight"
"""The tensor that shows the prefix of the tower's names in models that have more than it."""


@dataclass(frozen=True, slots=True)
class VisionLayerWeights:
    """The weights of one layer. Query, key and value are fused, (3 C, C)."""

    norm1: Affine
    qkv: Affine
    out: Affine
    norm2: Affine
    up: Affine
    down: Affine


@dataclass(frozen=True, slots=True)
class VisionTowerWeights:
    """All weights. The optional ones differ between CLIP and SigLIP.

    Attributes:
        patch: (C, 3, patch, patch).
        patch_bias: (C,), SigLIP only.
        positions: (T, C).
        class_token: (C,), CLIP only.
        norm_before: Before the first layer, CLIP only.
        layers: Those that are computed: the last one may be left out.
        norm_after: After the last layer, SigLIP only: CLIP applies it only to its pooled output.
    """

    patch: Tensor
    patch_bias: Tensor | None
    class_token: Tensor | None
    positions: Tensor
    norm_before: Affine | None
    layers: tuple[VisionLayerWeights, ...]
    norm_after: Affine | None


class VisionTower:
    """Computes one embedding per token, the `last_hidden_state` of the original models."""

    def __init__(self, spec: VisionTowerSpec, weights: VisionTowerWeights) -> None:
        self.spec = spec
        self._weights = weights
        self._activation = ACTIVATIONS[spec.activation]

    @torch.inference_mode()
    def __call__(self, pixels: Tensor) -> Tensor:
        """Embed: pixels (B, 3, image_size, image_size)  ->  (B, T, C)."""
        weights = self._weights
        patches = F.conv2d(pixels, weights.patch, weights.patch_bias, stride=self.spec.patch_size)
        x = patches.flatten(2).transpose(1, 2)  # (B, patches, C)
        if weights.class_token is not None:
            x = torch.cat((weights.class_token.expand(len(x), 1, -1), x), dim=1)  # (B, T, C)
        x = x + weights.positions
        if weights.norm_before is not None:
            x = self._norm(x, weights.norm_before)
        for layer in weights.layers:
            x = x + self._attend(self._norm(x, layer.norm1), layer)
            x = x + self._mlp(self._norm(x, layer.norm2), layer)
        return x if weights.norm_after is None else self._norm(x, weights.norm_after)

    def _norm(self, x: Tensor, norm: Affine) -> Tensor:
        return F.layer_norm(x, (self.spec.hidden,), norm.weight, norm.bias, self.spec.norm_eps)

    def _attend(self, x: Tensor, layer: VisionLayerWeights) -> Tensor:
        """Bidirectional attention: (B, T, C)  ->  (B, T, C)."""
        qkv = F.linear(x, layer.qkv.weight, layer.qkv.bias)
        split = qkv.view(len(x), self.spec.tokens, 3, self.spec.heads, -1)  # (B, T, 3, N, D)
        q, k, v = split.transpose(1, 3).unbind(2)  # each (B, N, T, D)
        out = F.scaled_dot_product_attention(q, k, v)
        return F.linear(out.transpose(1, 2).flatten(2), layer.out.weight, layer.out.bias)

    def _mlp(self, x: Tensor, layer: VisionLayerWeights) -> Tensor:
        wide = self._activation(F.linear(x, layer.up.weight, layer.up.bias))
        return F.linear(wide, layer.down.weight, layer.down.bias)


def read_weights(folder: Path, spec: VisionTowerSpec) -> VisionTowerWeights:
    """Read a tower as float32; other tensors (text tower, projections, heads) are ignored.

    Raises:
        ConfigError: There are no files, one is broken, or a tensor is missing, has another shape or
            an unsupported dtype.
    """
    with ExitStack() as open_files:
        return _read(TensorFiles(weight_files(folder), open_files, last=PATCH), spec)


def _read(checkpoint: TensorFiles, spec: VisionTowerSpec) -> VisionTowerWeights:
    clip = spec.family is VisionFamily.CLIP
    hidden, patch = spec.hidden, spec.patch_size
    take, affine = checkpoint.read, checkpoint.affine
    positions = take("embeddings.position_embedding.weight", spec.tokens, hidden)
    return VisionTowerWeights(
        patch=take("embeddings.patch_embedding.weight", hidden, 3, patch, patch),
        patch_bias=None if clip else take("embeddings.patch_embedding.bias", hidden),
        class_token=take("embeddings.class_embedding", hidden) if clip else None,
        positions=_positions(positions, spec),
        # The misspelling is in every CLIP checkpoint.
        norm_before=affine("pre_layrnorm", hidden) if clip else None,
        layers=tuple(_layer(checkpoint, f"encoder.layers.{i}", spec) for i in range(spec.computed)),
        norm_after=None if clip or spec.inner else affine("post_layernorm", hidden),
    )


def _positions(table: Tensor, spec: VisionTowerSpec) -> Tensor:
    """The position embeddings of the patches, (T, C).

    Idefics3 finds them by where a patch lies between 0 and 1, in float32: for some numbers of
    patches two of them get the same one.
    """
    if not spec.tiles:
        return table
    side = spec.image_size // spec.patch_size
    lies = (torch.arange(side) * (1 / torch.tensor(float(side)))).clamp(max=1 - 1e-6)
    at = torch.bucketize(lies, torch.arange(1 / side, 1.0, 1 / side), right=True)
    return table[(side * at[:, None] + at).flatten()]


def _layer(checkpoint: TensorFiles, name: str, spec: VisionTowerSpec) -> VisionLayerWeights:
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


@dataclass(frozen=True, eq=False)
class VisionModel:
    """Preprocessor, vision tower and connector. Blocks."""

    preprocess: Preprocessor
    tower: VisionTower | GridTower
    connector: Connector | None = None

    @property
    def embedding_bytes(self) -> int:
        """Size of an embedding, at most, or nearly so."""
        recipe, spec = self.preprocess.recipe, self.tower.spec
        if isinstance(spec, GridTowerSpec):
            assert recipe.grid is not None, "a recipe of this tower"
            return recipe.grid.tokens_max * spec.rows_width * 4
        hidden = spec.hidden if self.connector is None else self.connector.hidden
        return recipe.frames_max * spec.tokens * hidden * 4

    def embed(self, decoded: NDArray[np.uint8]) -> CachedEmbedding:
        """Embed frames (F, height, width, 3), which `preprocess` has decoded."""
        states = self.tower(torch.as_tensor(self.preprocess.normalized(decoded)))
        if self.connector is not None:
            states = self.connector(states)
        embedding = states.flatten(0, 1)  # (F * T, C)
        data = embedding.numpy().astype("<f4", copy=False).tobytes()
        tokens, hidden = embedding.shape
        return CachedEmbedding(data, tokens, hidden, checksum=hashlib.sha256(data).digest())


def open_model(settings: Settings, folder: Path) -> VisionModel:
    """Load the vision model of a folder, and set torch's threads as the worker does.

    Raises:
        ConfigError: The folder has no supported vision tower; the message names the file.
    """
    torch.set_num_threads(settings.model.threads or detect_device().cores)
    pixels_max = settings.encoder.pixels_max
    if isinstance(read_vision(folder), GridImages):
        preprocessor = Preprocessor(read_grid_config(folder), pixels_max=pixels_max)
        grids = read_grid_spec(folder)
        return VisionModel(preprocessor, GridTower(grids, read_grid_weights(folder, grids)))
    spec = read_spec(folder)
    recipe = read_preprocessor_config(folder, spec)
    tower = VisionTower(spec, read_weights(folder, spec))
    preprocessor = Preprocessor(recipe, pixels_max=pixels_max)
    return VisionModel(preprocessor, tower, read_connector(folder, spec))
