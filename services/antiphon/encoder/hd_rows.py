"""The rows of an image of Phi-4-multimodal: those of its grid of tiles, and of all of it.

Axes: F tiles and all of the image, S edge of a tile, R rows and L columns of tokens.

Source: Microsoft 2025, arXiv:2503.01743, section 2.2; Dong et al. 2024, arXiv:2404.06512,
section 3.2.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec
import torch

from antiphon.encoder.activations import VisionActivation
from antiphon.encoder.grid_tower import GridTowerSpec, MergerWeights, merged
from antiphon.encoder.tensor_files import TensorFiles, weight_files
from antiphon.encoder.tower_config import SIGLIP_NAMES, BlockFields, computed_layers
from antiphon.encoder.tower_spec import Size
from antiphon.model_card.config_json import parse_json
from antiphon.model_card.vision.hd_tiles import MERGE, HdTiling, HdTower

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from antiphon.encoder.grid_tower import GridTower

_LINE, _BETWEEN = "sub_img_feature_extensor", "global_img_feature_extensor"
_NAMES = msgspec.structs.replace(
    SIGLIP_NAMES, first="img_projection_up", second="img_projection_down"
)


class _HdBlocks(BlockFields, frozen=True):
    hidden_act: VisionActivation = VisionActivation.GELU_TANH
    layer_norm_eps: float = 1e-6


class HdConfig(msgspec.Struct, frozen=True):
    """The config.json of Phi-4-multimodal, with the defaults of its class."""

    vision_config: msgspec.Raw
    hidden_size: Size = 3072

    def spec(self, file: Path) -> GridTowerSpec:
        """The shape of the tower, up to the layer whose output is read.

        Raises:
            ConfigError: It is malformed, or there is no such layer.
        """
        name = f"{file}: vision_config"
        blocks = parse_json(self.vision_config, _HdBlocks, name)
        tower = parse_json(self.vision_config, HdTower, name)
        layers = computed_layers(
            file, "vision_config: feature_layer", tower.feature_layer, blocks.num_hidden_layers
        )
        return GridTowerSpec(
            width=blocks.hidden_size,
            intermediate=blocks.intermediate_size,
            hidden=self.hidden_size,
            layers=layers,
            heads=blocks.num_attention_heads,
            patch=blocks.patch_size,
            merge=MERGE,
            frames=0,
            base=None,
            activation=blocks.hidden_act,
            gated=False,
            eps=blocks.layer_norm_eps,
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
