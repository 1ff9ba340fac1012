"""What stands between a tower and a text model: the rows of an image as the text model has them.

Axes: F frames of an image, T tokens of a frame, C width of the tower.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec
import torch
import torch.nn.functional as F  # noqa: N812  # the usual name

from antiphon.config.errors import ConfigError
from antiphon.encoder.activations import ACTIVATIONS
from antiphon.encoder.tensor_files import Affine, TensorFiles, weight_files
from antiphon.encoder.tower_spec import read_features
from antiphon.model_card.config_json import read_json
from antiphon.model_card.image_tiles import AnyresTiling
from antiphon.model_card.vision import (
    CLIP,
    GEMMA3,
    IDEFICS,
    INTERN,
    SIGLIP,
    read_anyres,
    shuffle_factor,
)

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from antiphon.encoder.preprocess import PreprocessorConfig
    from antiphon.encoder.tower_spec import VisionTowerSpec
    from antiphon.model_card.image_tiles import Packing
    from antiphon.model_card.vision import FeatureFields

PROJECTOR = "multi_modal_projector."
_PROJECTION = "mm_input_projection_weight"
NEWLINE = "image_newline"
CONNECTOR = "connector.modality_projection.proj.weight"
VISUAL_PROJECTION = "visual_projection.weight"


class Connector(Protocol):
    """Makes the rows of an image."""

    @property
    def hidden(self) -> int:
        """The width of the text model, or of its vectors."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """What the tower has computed: (F, T, C)  ->  (F, rows of a frame, hidden)."""
        ...


def read_connector(folder: Path, spec: VisionTowerSpec) -> Connector | None:
    """Read what a model has behind its tower; None for a tower alone.

    Raises:
        ConfigError: A tensor is missing or has another shape, or the connector is not supported.
    """
    kind = read_json(folder / "config.json", _ConnectedKind).model_type
    if kind == GEMMA3:
        return _read_pooled(folder, spec)
    if kind in IDEFICS:
        return _read_shuffle(folder, spec)
    if kind == CLIP:
        return _read_class_projection(folder, spec)
    if kind == SIGLIP:
        return _read_attention_pool(folder, spec)
    if kind == INTERN:
        return _read_shuffled_projector(folder, spec)
    features = read_features(folder)
    return None if features is None else read_projector(folder, spec, features)


class _ConnectedKind(msgspec.Struct, frozen=True):
    model_type: str = ""


class ClassProjection:
    """CLIP's: the class token alone, a norm and a matrix make the vector of an image.

    weight (hidden, C).

    Source: Radford et al. 2021, arXiv:2103.00020.
    """

    def __init__(self, norm: Affine, weight: Tensor, eps: float) -> None:
        self._norm, self._weight, self._eps = norm, weight, eps

    @property
    def hidden(self) -> int:
        return len(self._weight)

    @torch.inference_mode()
    def __call__(self, x: Tensor) -> Tensor:
        """Project: (F, T, C)  ->  (F, 1, hidden)."""
        norm, token = self._norm, x[:, :1]
        normed = F.layer_norm(token, token.shape[-1:], norm.weight, norm.bias, self._eps)
        return F.linear(normed, self._weight)


def _read_class_projection(folder: Path, spec: VisionTowerSpec) -> ClassProjection:
    files, norm = weight_files(folder), "post_layernorm"
    with ExitStack() as open_files:
        tower = TensorFiles(files, open_files, last=f"{norm}.weight")
        behind = TensorFiles(files, open_files, last=VISUAL_PROJECTION)
        width = behind.length(VISUAL_PROJECTION)
        weight = behind.read(VISUAL_PROJECTION, width, spec.hidden)
        return ClassProjection(tower.affine(norm, spec.hidden), weight, spec.norm_eps)


class AttentionPool:
    """SigLIP's: a learned query attends to the patches, and a block makes the vector of an image.

    probe (C,); `qkv` has the weights of query, key and value, (3 C, C).

    Source: Zhai et al. 2022, arXiv:2106.04560, section 3.2 (MAP).
    """

    def __init__(
        self,
        spec: VisionTowerSpec,
        probe: Tensor,
        *,
        qkv: Affine,
        out: Affine,
        norm: Affine,
        up: Affine,
        down: Affine,
    ) -> None:
        self._spec, self._probe = spec, probe
        self._qkv, self._out, self._norm, self._up, self._down = qkv, out, norm, up, down
        self._activation = ACTIVATIONS[spec.activation]

    @property
    def hidden(self) -> int:
        return self._spec.hidden

    @torch.inference_mode()
    def __call__(self, x: Tensor) -> Tensor:
        """Pool: (F, T, C)  ->  (F, 1, C)."""
        spec, (frames, tokens, width), qkv = self._spec, x.shape, self._qkv
        assert qkv.bias is not None, "it was read with one"
        query = F.linear(self._probe, qkv.weight[:width], qkv.bias[:width])
        query = query.view(1, spec.heads, 1, -1).expand(frames, -1, -1, -1)  # (F, N, 1, D)
        both = F.linear(x, qkv.weight[width:], qkv.bias[width:])
        # Each (F, N, T, D).
        key, value = both.view(frames, tokens, 2, spec.heads, -1).transpose(1, 3).unbind(2)
        seen = F.scaled_dot_product_attention(query, key, value)
        pooled = F.linear(seen.reshape(frames, 1, width), self._out.weight, self._out.bias)
        normed = F.layer_norm(
            pooled, (width,), self._norm.weight, self._norm.bias, self._spec.norm_eps
        )
        wide = self._activation(F.linear(normed, self._up.weight, self._up.bias))
        return pooled + F.linear(wide, self._down.weight, self._down.bias)


def _read_attention_pool(folder: Path, spec: VisionTowerSpec) -> AttentionPool:
    hidden, wide = spec.hidden, spec.intermediate
    with ExitStack() as open_files:
        tower = TensorFiles(weight_files(folder), open_files, last="head.probe")
        take, affine = tower.read, tower.affine
        return AttentionPool(
            spec,
            take("head.probe", 1, 1, hidden).flatten(),
            qkv=Affine(
                take("head.attention.in_proj_weight", 3 * hidden, hidden),
                take("head.attention.in_proj_bias", 3 * hidden),
            ),
            out=affine("head.attention.out_proj", hidden, hidden),
            norm=affine("head.layernorm", hidden),
            up=affine("head.mlp.fc1", wide, hidden),
            down=affine("head.mlp.fc2", hidden, wide),
        )


class PooledPatches:
    """Gemma 3's connector: squares of patches are averaged to one row, then a norm and a matrix.

    weight (C, hidden), norm (C,): what is added to 1; `side` squares an edge.

    Source: Gemma Team 2025, arXiv:2503.19786.
    """

    def __init__(self, weight: Tensor, norm: Tensor, side: int, eps: float) -> None:
        self._weight, self._norm, self._side, self._eps = weight, norm, side, eps

    @property
    def hidden(self) -> int:
        return self._weight.shape[1]

    @torch.inference_mode()
    def __call__(self, x: Tensor) -> Tensor:
        """Connect: (F, T, C)  ->  (F, side ** 2, hidden)."""
        frames, tokens, width = x.shape
        patches = round(tokens**0.5)
        grid = x.transpose(1, 2).view(frames, width, patches, patches)
        pooled = F.avg_pool2d(grid, patches // self._side).flatten(2).transpose(1, 2)
        normed = pooled * torch.rsqrt(pooled.pow(2).mean(-1, keepdim=True) + self._eps)
        return (normed * (1 + self._norm)) @ self._weight


class _PooledFields(msgspec.Struct, frozen=True):
    mm_tokens_per_image: int = 256


def _read_pooled(folder: Path, spec: VisionTowerSpec) -> PooledPatches:
    file = folder / "config.json"
    tokens = read_json(file, _PooledFields).mm_tokens_per_image
    side, patches = round(tokens**0.5), spec.image_size // spec.patch_size
    if side**2 != tokens or patches // max(side, 1) * side != patches:
        raise ConfigError(
            f"{file}: mm_tokens_per_image = {tokens}: must be a square whose edge divides {patches}"
        )
    with ExitStack() as open_files:
        checkpoint = TensorFiles(weight_files(folder), open_files, last=f"{PROJECTOR}{_PROJECTION}")
        hidden = checkpoint.width(f"{PROJECTOR}{_PROJECTION}")
        weight = checkpoint.read(f"{PROJECTOR}{_PROJECTION}", spec.hidden, hidden)
        norm = checkpoint.read(f"{PROJECTOR}mm_soft_emb_norm.weight", spec.hidden)
    return PooledPatches(weight, norm, side, spec.norm_eps)


class PixelShuffle:
    """Idefics3's connector: squares of `factor` x `factor` patches become one row, and a linear.

    Source: Laurencon et al. 2024, arXiv:2408.12637.
    """

    def __init__(self, weight: Tensor, factor: int) -> None:
        self._weight, self._factor = weight, factor

    @property
    def hidden(self) -> int:
        return len(self._weight)

    @torch.inference_mode()
    def __call__(self, x: Tensor) -> Tensor:
        """Connect: (F, T, C)  ->  (F, T / factor ** 2, hidden)."""
        return F.linear(shuffled(x, self._factor), self._weight)


def shuffled(x: Tensor, by: int) -> Tensor:
    """Squares of `by` x `by` patches as rows: (F, T, C)  ->  (F, T / by ** 2, by ** 2 * C)."""
    frames, tokens, width = x.shape
    side = round(tokens**0.5) // by
    # Of a square, the rows come first, then the columns, then the width.
    squares = x.reshape(frames, side, by, side, by, width).transpose(2, 3)
    return squares.reshape(frames, side * side, -1)


class _IdeficsFields(msgspec.Struct, frozen=True):
    scale_factor: int = 2


def _read_shuffle(folder: Path, spec: VisionTowerSpec) -> PixelShuffle:
    file = folder / "config.json"
    factor = read_json(file, _IdeficsFields).scale_factor
    if (spec.image_size // spec.patch_size) % factor:
        raise ConfigError(f"{file}: scale_factor = {factor}: must divide the patches of an edge")
    with ExitStack() as open_files:
        checkpoint = TensorFiles(weight_files(folder), open_files, last=CONNECTOR)
        hidden = checkpoint.length(CONNECTOR)
        return PixelShuffle(checkpoint.read(CONNECTOR, hidden, spec.hidden * factor**2), factor)


class ShuffledProjector:
    """InternVL's connector: squares of `factor` x `factor` patches, a norm, and two linears.

    Source: Chen et al. 2024, arXiv:2404.16821.
    """

    def __init__(
        self, norm: Affine, first: Affine, second: Affine, *, factor: int, drops_first: bool
    ) -> None:
        self._norm, self._first, self._second = norm, first, second
        self._factor, self._start = factor, int(drops_first)

    @property
    def hidden(self) -> int:
        return len(self._second.weight)

    @torch.inference_mode()
    def __call__(self, x: Tensor) -> Tensor:
        """Connect: (F, T, C)  ->  (F, rows of a frame, hidden)."""
        norm, first, second = self._norm, self._first, self._second
        squares = shuffled(x[:, self._start :], self._factor)
        normed = F.layer_norm(squares, squares.shape[-1:], norm.weight, norm.bias)
        return F.linear(
            F.gelu(F.linear(normed, first.weight, first.bias)), second.weight, second.bias
        )


class _ShuffleFields(msgspec.Struct, frozen=True):
    downsample_ratio: float = 0.5
    projector_hidden_act: Literal["gelu"] = "gelu"


def _read_shuffled_projector(folder: Path, spec: VisionTowerSpec) -> ShuffledProjector:
    file, features = folder / "config.json", read_features(folder)
    assert features is not None, "of this model"
    factor = shuffle_factor(file, read_json(file, _ShuffleFields).downsample_ratio)
    if (side := spec.image_size // spec.patch_size) % factor:
        raise ConfigError(f"{file}: downsample_ratio: {factor} patches must divide {side}")
    if not features.drops_first:
        raise ConfigError(f"{file}: vision_feature_select_strategy: must be default")
    last = f"{PROJECTOR}linear_1.weight"
    with ExitStack() as open_files:
        checkpoint = TensorFiles(weight_files(folder), open_files, last=last)
        hidden, wide = checkpoint.length(last), spec.hidden * factor**2
        return ShuffledProjector(
            checkpoint.affine(f"{PROJECTOR}layer_norm", wide),
            checkpoint.affine(f"{PROJECTOR}linear_1", hidden, wide),
            checkpoint.affine(f"{PROJECTOR}linear_2", hidden, hidden),
            factor=factor,
            drops_first=True,
        )


class PackedTiles:
    """LLaVA-NeXT's rows of an image: all of it, and its grid of patches without the padding.

    `newline` (hidden,) is behind each row of the grid, and behind an image of one tile or a video.

    Source: Liu et al. 2024, LLaVA-NeXT; Li et al. 2024, arXiv:2408.03326 (OneVision).
    """

    def __init__(self, newline: Tensor, tiling: AnyresTiling, packing: Packing) -> None:
        self.newline, self._tiling, self._packing = newline, tiling, packing

    @property
    def rows_max(self) -> int:
        """Rows of an image, at most."""
        side, tile = self._packing.side, self._tiling.tile
        grids = [(x // tile * side, y // tile * side) for x, y in self._tiling.sizes]
        return side**2 + max(rows * (columns + 1) for columns, rows in grids)

    @torch.inference_mode()
    def __call__(self, x: Tensor, width: int, height: int) -> Tensor:
        """Pack the tiles of an image of this size: (F, T, hidden)  ->  (rows, hidden)."""
        whole, tiles, side = x[0], x[1:], self._packing.side
        if not len(tiles):
            return torch.cat((whole, self.newline[None]))
        columns, rows = self._tiling.grid(width, height)
        cut = tiles.view(rows, columns, side, side, -1).transpose(1, 2)
        grid = cut.reshape(rows * side, columns * side, -1)
        across, down = self._tiling.margins(width, height, side)
        grid = grid[down : len(grid) - down, across : grid.shape[1] - across]
        columns, rows = self._packing.grid(self._tiling, width, height)
        if grid.shape[:2] != (rows, columns):
            channels = grid.permute(2, 0, 1)[None]
            grid = F.interpolate(channels, (rows, columns), mode="bilinear")[0].permute(1, 2, 0)
        lines = torch.cat((grid, self.newline.expand(rows, 1, -1)), dim=1)
        return torch.cat((whole, lines.flatten(0, 1)))

    @torch.inference_mode()
    def pooled(self, x: Tensor) -> Tensor:
        """Halve the grid of a frame of a video: (1, T, hidden)  ->  (rows, hidden)."""
        side, halved = self._packing.side, self._packing.pooled_side
        channels = x.view(1, side, side, -1).permute(0, 3, 1, 2)
        scaled = F.interpolate(channels, (halved, halved), mode="bilinear")
        return scaled[0].flatten(1).transpose(0, 1)


def read_packed(folder: Path, recipe: PreprocessorConfig) -> PackedTiles | None:
    """Read how a model packs tiles; None: their rows lie behind each other.

    Raises:
        ConfigError: The row for a new line is missing.
    """
    kind = read_json(folder / "config.json", _ConnectedKind).model_type
    if not isinstance(recipe.tiling, AnyresTiling):
        return None
    with ExitStack() as open_files:
        checkpoint = TensorFiles(weight_files(folder), open_files, last=NEWLINE)
        newline = checkpoint.read(NEWLINE, checkpoint.length(NEWLINE))
    return PackedTiles(newline, recipe.tiling, read_anyres(folder, kind)[1])


class Projector:
    """LLaVA's projector: two linear layers, from the width of the tower to that of the text model.

    Source: Liu et al. 2023, arXiv:2310.03744.
    """

    def __init__(self, first: Affine, second: Affine, *, drops_first: bool) -> None:
        self._first, self._second = first, second
        self._start = int(drops_first)

    @property
    def hidden(self) -> int:
        return len(self._second.weight)

    @torch.inference_mode()
    def __call__(self, x: Tensor) -> Tensor:
        """Project what the tower has computed: (B, T, C)  ->  (B, T or T - 1, hidden)."""
        wide = F.gelu(F.linear(x[:, self._start :], self._first.weight, self._first.bias))
        return F.linear(wide, self._second.weight, self._second.bias)


def read_projector(folder: Path, spec: VisionTowerSpec, features: FeatureFields) -> Projector:
    """Read LLaVA's projector as float32.

    Raises:
        ConfigError: A tensor is missing or has another shape, or the projector is not supported.
    """
    file = folder / "config.json"
    config = read_json(file, _ProjectorFields)
    if config.projector_hidden_act != "gelu":
        raise ConfigError(
            f"{file}: projector_hidden_act = {config.projector_hidden_act!r}: must be gelu"
        )
    if not config.multimodal_projector_bias:
        raise ConfigError(f"{file}: multimodal_projector_bias = false is not supported")
    with ExitStack() as open_files:
        checkpoint = TensorFiles(weight_files(folder), open_files, last=f"{PROJECTOR}linear_1.bias")
        hidden = checkpoint.length(f"{PROJECTOR}linear_1.bias")
        first = checkpoint.affine(f"{PROJECTOR}linear_1", hidden, spec.hidden)
        second = checkpoint.affine(f"{PROJECTOR}linear_2", hidden, hidden)
    return Projector(first, second, drops_first=features.drops_first and spec.has_class)


class _ProjectorFields(msgspec.Struct, frozen=True):
    projector_hidden_act: str = "gelu"
    multimodal_projector_bias: bool = True
