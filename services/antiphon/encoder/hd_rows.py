"""The rows of an image of Phi-4-multimodal: those of its grid of tiles, and of all of it.

Axes: F tiles and all of the image, S edge of a tile, R rows and L columns of tokens.

Source: Microsoft 2025, arXiv:2503.01743, section 2.2; Dong et al. 2024, arXiv:2404.06512,
section 3.2.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import msgspec
import torch
from msgspec import Meta, field

from antiphon.config.errors import ConfigError
from antiphon.encoder.activations import VisionActivation
from antiphon.encoder.grid_tower import GridNames, GridTowerSpec, MergerWeights, merged
from antiphon.encoder.tensor_files import TensorFiles, weight_files
from antiphon.model_card.vision.hd_tiles import MERGE, HdTiling, HdTower

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from antiphon.encoder.grid_tower import GridTower

Size = Annotated[int, Meta(ge=1)]
_LINE, _BETWEEN = "sub_img_feature_extensor", "global_img_feature_extensor"
_NAMES = GridNames(
    patch="embeddings.patch_embedding",
    positions="embeddings.position_embedding.weight",
    layer="encoder.layers.{}",
    norm1="layer_norm1",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.out_proj",
    norm2="layer_norm2",
    first="img_projection_up",
    second="img_projection_down",
)


class _HdTowerFields(HdTower, frozen=True):
    hidden_size: Size = 1152
    intermediate_size: Size = 4304
    num_hidden_layers: Size = 27
    num_attention_heads: Size = 16
    hidden_act: VisionActivation = VisionActivation.GELU_TANH
    layer_norm_eps: float = 1e-6


class HdConfig(msgspec.Struct, frozen=True):
    """The config.json of Phi-4-multimodal, with the defaults of its class."""

    hidden_size: Size = 3072
    vision_config: _HdTowerFields = field(default_factory=_HdTowerFields)

    def spec(self, file: Path) -> GridTowerSpec:
        """The shape of the tower, up to the layer whose output is read.

        Raises:
            ConfigError: There is no such layer.
        """
        tower = self.vision_config
        layer, most = tower.feature_layer, tower.num_hidden_layers
        layers = layer + (most + 1 if layer < 0 else 0)
        if not 0 < layers <= most:
            raise ConfigError(
                f"{file}: vision_config: feature_layer = {layer}: must be one of {most} layers"
            )
        return GridTowerSpec(
            width=tower.hidden_size,
            intermediate=tower.intermediate_size,
            hidden=self.hidden_size,
            layers=layers,
            heads=tower.num_attention_heads,
            patch=tower.patch_size,
            merge=MERGE,
            frames=0,
            base=None,
            activation=tower.hidden_act,
            gated=False,
            eps=tower.layer_norm_eps,
            side=tower.image_size // tower.patch_size,
            sampled="steps",
            patch_bias=True,
            mean=True,
            names=_NAMES,
        )


class HdRows:
    """Computes the rows of an image: of its grid without padding, a row between, and of all of it.

    `line` (hidden,) is behind each row of tokens, and `between` (hidden,) before all of the image.
    """

    def __init__(self, tower: GridTower, tiling: HdTiling, line: Tensor, between: Tensor) -> None:
        self._tower, self._tiling = tower, tiling
        self._line, self._between = line, between

    @property
    def rows_max(self) -> int:
        """Rows of an image, at most."""
        return self._tiling.tokens_max

    @torch.inference_mode()
    def __call__(self, frames: Tensor, width: int, height: int) -> Tensor:
        """Embed an image of this size: (F, 3, S, S), all of it first  ->  (rows, hidden)."""
        tiling = self._tiling.of(len(frames) - 1)
        columns, rows = tiling.grid(width, height)
        down, across = tiling.patches(width, height)
        side, tiles = tiling.side, iter(frames[1:])
        grid = torch.cat(
            [
                torch.cat(
                    [
                        self._tokens(next(tiles), down - side * row, across - side * column)
                        for column in range(columns)
                    ],
                    dim=1,
                )
                for row in range(rows)
            ]
        )  # (R, L, hidden)
        whole = self._tokens(frames[0], side, side)
        return torch.cat((self._lines(grid), self._between[None], self._lines(whole)))

    def _tokens(self, frame: Tensor, down: int, across: int) -> Tensor:
        """The tokens of so many rows and columns of patches of (3, S, S), or all: (R, L, hidden).

        The square of a token at their end may have patches that are padding.
        """
        side, edge = self._tiling.side, MERGE * self._tiling.patch
        inside = min(down, side), min(across, side)
        rows, columns = (-(-count // MERGE) for count in inside)
        pixels = frame[:, : rows * edge, : columns * edge].contiguous()
        return self._tower(pixels[None], inside).view(rows, columns, -1)

    def _lines(self, grid: Tensor) -> Tensor:
        """Rows of tokens with their ends: (R, L, hidden)  ->  (R * (L + 1), hidden)."""
        ends = self._line.expand(len(grid), 1, -1)
        return torch.cat((grid, ends), dim=1).flatten(0, 1)


@torch.inference_mode()
def read_hd_rows(folder: Path, tower: GridTower, tiling: HdTiling, merger: MergerWeights) -> HdRows:
    """Read what stands behind rows of tokens: it is projected as they are.

    Raises:
        ConfigError: A tensor is missing or has another shape.
    """
    width = tower.spec.width
    with ExitStack() as open_files:
        files = TensorFiles(weight_files(folder), open_files, last=_LINE)
        line, between = files.read(_LINE, 1, 1, 1, width), files.read(_BETWEEN, 1, 1, width)
    both = torch.stack((line.flatten(), between.flatten()))
    line, between = merged(both[:, None], merger)
    return HdRows(tower, tiling, line, between)
