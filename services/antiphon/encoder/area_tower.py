"""What Gemma 4's tower has of its own, beside what `grid_tower.py` computes for it.

Its blocks have norms behind them, and its heads norms of their own; patches are of pixels from -1
to 1, and a token is the mean of its patches.

Axes: C width, D of each head, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec
import torch.nn.functional as F  # noqa: N812  # the usual name

from antiphon.config.errors import ConfigError
from antiphon.encoder.activations import VisionActivation
from antiphon.encoder.grid_tower import GridNames, GridTowerSpec
from antiphon.encoder.linear import Affine
from antiphon.encoder.tower_config import BlockFields
from antiphon.encoder.tower_layers import TowerLayer
from antiphon.encoder.tower_spec import Size

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from antiphon.encoder.linear import ClippedLinear, Linear
    from antiphon.encoder.tensor_files import TensorFiles

PROJECTION = "embed_vision.embedding_projection.weight"


class AreaTowerSpec(GridTowerSpec, frozen=True, kw_only=True):
    """The shape of Gemma 4's tower.

    Attributes:
        places: Learned positions of an axis.
        clipped: Whether linears have bounds.
        standardized: Whether the rows are, before they are projected.
    """

    places: int
    clipped: bool
    standardized: bool


class _AxialRope(msgspec.Struct):
    rope_theta: float = 100.0
    rope_type: Literal["axial"] = "axial"


class _Gemma4Tower(BlockFields, frozen=True):
    hidden_size: Size = 768
    intermediate_size: Size = 3072
    num_hidden_layers: Size = 16
    num_attention_heads: Size = 12
    patch_size: Size = 16
    num_key_value_heads: Size = 12
    head_dim: Size = 64
    hidden_activation: VisionActivation = VisionActivation.GELU_TANH
    rms_norm_eps: float = 1e-6
    rope_parameters: _AxialRope | None = None
    pooling_kernel_size: Size = 3
    position_embedding_size: Size = 10 * 1024
    use_clipped_linears: bool = False
    standardize: bool = False


class _Gemma4Text(msgspec.Struct):
    hidden_size: Size = 2304


class AreaConfig(msgspec.Struct):
    """Gemma 4's config.json."""

    vision_config: _Gemma4Tower
    text_config: _Gemma4Text = msgspec.field(default_factory=_Gemma4Text)

    def spec(self, file: Path) -> AreaTowerSpec:
        """The shape of the tower.

        Raises:
            ConfigError: It is not supported.
        """
        tower = self.vision_config
        if tower.num_key_value_heads != tower.num_attention_heads:
            raise ConfigError(
                f"{file}: vision_config: num_key_value_heads = {tower.num_key_value_heads}: must "
                f"be num_attention_heads = {tower.num_attention_heads}"
            )
        if tower.head_dim % 4:
            raise ConfigError(
                f"{file}: vision_config: head_dim = {tower.head_dim}: must be a multiple of four"
            )
        # Without bounds, linears have the same names.
        part = "" if tower.use_clipped_linears else ".linear"
        return AreaTowerSpec(
            width=tower.hidden_size,
            intermediate=tower.intermediate_size,
            hidden=self.text_config.hidden_size,
            layers=tower.num_hidden_layers,
            heads=tower.num_attention_heads,
            patch=tower.patch_size,
            merge=tower.pooling_kernel_size,
            frames=0,
            base=(tower.rope_parameters or _AxialRope()).rope_theta,
            activation=tower.hidden_activation,
            gated=True,
            biases=False,
            eps=tower.rms_norm_eps,
            head_size=tower.head_dim,
            axial=True,
            places=tower.position_embedding_size,
            clipped=tower.use_clipped_linears,
            standardized=tower.standardize,
            names=GridNames(
                patch="patch_embedder.input_proj",
                positions="patch_embedder.position_embedding_table",
                layer="encoder.layers.{}",
                norm1="input_layernorm",
                qkv=tuple(f"self_attn.{each}_proj{part}" for each in "qkv"),
                out=f"self_attn.o_proj{part}",
                after1="post_attention_layernorm",
                norm2="pre_feedforward_layernorm",
                up=(f"mlp.gate_proj{part}", f"mlp.up_proj{part}"),
                down=f"mlp.down_proj{part}",
                after2="post_feedforward_layernorm",
            ),
        )


@dataclass(frozen=True, slots=True)
class CenteredPatches:
    """Embeds patches of pixels from 0 to 1, which the linear takes from -1 to 1."""

    linear: Linear

    def __call__(self, x: Tensor) -> Tensor:
        """(T, merge * merge, 3 * patch * patch)  ->  (P, C), as the linear."""
        return self.linear(2 * (x - 0.5))


@dataclass(frozen=True, slots=True)
class PooledMerger:
    """What makes a token of the mean of its patches, grown by the root of C.

    `shift` and `factor` (C,) standardize it, if there are any; then it is normalised, without
    weights, and projected.
    """

    shift: Tensor | None
    factor: Tensor | None
    eps: float
    projection: Linear

    def __call__(self, squares: Tensor) -> Tensor:
        """The tokens of squares of patches: (T, merge * merge, C)  ->  (T, hidden)."""
        width = squares.shape[-1]
        rows = squares.mean(dim=1) * width**0.5
        if self.shift is not None and self.factor is not None:
            rows = (rows - self.shift) * self.factor
        return self.projection(F.rms_norm(rows, (width,), None, self.eps))


def read_area_patches(files: TensorFiles, spec: AreaTowerSpec) -> CenteredPatches:
    """Read what embeds patches, of which the colours of a pixel lie beside each other."""
    edge, width = spec.patch, spec.width
    flat = files.read(f"{spec.names.patch}.weight", width, edge * edge * 3)
    by_colour = flat.view(width, edge * edge, 3).transpose(1, 2).flatten(1)
    return CenteredPatches(files.linear(Affine(by_colour, None)))


def read_area_positions(files: TensorFiles, spec: AreaTowerSpec) -> Tensor:
    """Read the learned positions of columns and of rows, (2, places, C)."""
    return files.read(spec.names.positions, 2, spec.places, spec.width)


def read_area_merger(files: TensorFiles, behind: TensorFiles, spec: AreaTowerSpec) -> PooledMerger:
    """Read what makes tokens; the projection is `behind` the tower."""
    projection = behind.read(PROJECTION, spec.hidden, spec.width)
    shift, factor = None, None
    if spec.standardized:
        shift, factor = (files.read(name, spec.width) for name in ("std_bias", "std_scale"))
    return PooledMerger(shift, factor, spec.eps, files.linear(Affine(projection, None)))


def read_area_layer(files: TensorFiles, name: str, spec: AreaTowerSpec) -> TowerLayer:
    """Read a layer: norms around both blocks, and of each head; linears without biases."""
    names, width, size = spec.names, spec.width, spec.heads * spec.head

    def norm(part: str) -> Affine:
        return files.affine(f"{name}.{part}", width, bias=False)

    def linear(
        *parts: str, outputs: int, inputs: int, halves: bool = False
    ) -> Linear | ClippedLinear:
        whole = [f"{name}.{part}" for part in parts]
        if spec.clipped:
            return files.clipped(*whole, shape=(outputs, inputs), halves=halves)
        read = (files.affine(each, outputs, inputs, bias=False) for each in whole)
        return files.linear(*read, halves=halves)

    return TowerLayer(
        norm1=norm(names.norm1),
        qkv=linear(*names.qkv, outputs=size, inputs=width),
        out=linear(names.out, outputs=width, inputs=size),
        after1=norm(names.after1),
        norm2=norm(names.norm2),
        up=linear(*names.up, outputs=spec.intermediate, inputs=width, halves=True),
        down=linear(names.down, outputs=width, inputs=spec.intermediate),
        after2=norm(names.after2),
        q_norm=files.read(f"{name}.self_attn.q_norm.weight", spec.head),
        k_norm=files.read(f"{name}.self_attn.k_norm.weight", spec.head),
    )
