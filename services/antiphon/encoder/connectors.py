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
from antiphon.config.model import Dtype
from antiphon.encoder.activations import ACTIVATIONS
from antiphon.encoder.linear import Affine, Linear
from antiphon.encoder.tensor_files import TensorFiles, weight_files
from antiphon.encoder.tower_spec import read_features
from antiphon.kernels.activation import activate
from antiphon.model_card.config_json import read_json
from antiphon.model_card.vision.canvas_tiles import LLAMA4, read_llama4_tower
from antiphon.model_card.vision.compared import CLIP, SIGLIP
from antiphon.model_card.vision.frame_videos import INTERN
from antiphon.model_card.vision.padded_tiles import AnyresTiling, read_anyres
from antiphon.model_card.vision.squares import GEMMA3
from antiphon.model_card.vision.tiles import IDEFICS
from antiphon.model_card.vision.tower_fields import shuffle_factor

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from antiphon.encoder.preprocess import PreprocessorConfig
    from antiphon.encoder.tower_spec import VisionTowerSpec
    from antiphon.kernels.activation import ActivationKind
    from antiphon.model_card.vision.padded_tiles import Packing
    from antiphon.model_card.vision.tower_fields import FeatureFields

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


def read_connector(
    folder: Path, spec: VisionTowerSpec, dtype: Dtype = Dtype.FLOAT32
) -> Connector | None:
    """Read what a model has behind its tower; None for a tower alone.

    Raises:
        ConfigError: A tensor is missing or has another shape, or the connector is not supported.
    """
    kind = read_json(folder / "config.json", _ConnectedKind).model_type
    if kind == GEMMA3:
        return _read_pooled(folder, spec, dtype)
    if kind in IDEFICS:
        return _read_shuffle(folder, spec, dtype)
    if kind == CLIP:
        return _read_class_projection(folder, spec, dtype)
    if kind == SIGLIP:
        return _read_attention_pool(folder, spec, dtype)
    if kind == INTERN:
        return _read_shuffled_projector(folder, spec, dtype)
    if kind == LLAMA4:
        return _read_adapter(folder, spec, dtype)
    features = read_features(folder)
    return None if features is None else read_projector(folder, spec, features, dtype)


class _ConnectedKind(msgspec.Struct, frozen=True):
    model_type: str = ""


class ClassProjection:
    """CLIP's: the class token alone, a norm and a matrix make the vector of an image.

    Source: Radford et al. 2021, arXiv:2103.00020.
    """

    def __init__(self, norm: Affine, linear: Linear, eps: float) -> None:
        self._norm, self._linear, self._eps = norm, linear, eps

    @property
    def hidden(self) -> int:
        return self._linear.outputs

    @torch.inference_mode()
    def __call__(self, x: Tensor) -> Tensor:
        """Project: (F, T, C)  ->  (F, 1, hidden)."""
        norm, token = self._norm, x[:, :1]
        normed = F.layer_norm(token, token.shape[-1:], norm.weight, norm.bias, self._eps)
        return self._linear(normed)


def _read_class_projection(folder: Path, spec: VisionTowerSpec, dtype: Dtype) -> ClassProjection:
    files, norm = weight_files(folder), "post_layernorm"
    with ExitStack() as open_files:
        tower = TensorFiles(files, open_files, last=f"{norm}.weight")
        behind = TensorFiles(files, open_files, last=VISUAL_PROJECTION, dtype=dtype)
        width = behind.length(VISUAL_PROJECTION)
        weight = behind.read(VISUAL_PROJECTION, width, spec.hidden)
        linear = behind.linear(Affine(weight, None))
        return ClassProjection(tower.affine(norm, spec.hidden), linear, spec.norm_eps)


class AttentionPool:
    """SigLIP's: a learned query attends to the patches, and a block makes the vector of an image.

    probe (C,); `both` makes keys and values, (2 C, C).

    Source: Zhai et al. 2022, arXiv:2106.04560, section 3.2 (MAP).
    """

    def __init__(
        self,
        spec: VisionTowerSpec,
        probe: Tensor,
        *,
        query: Linear,
        both: Linear,
        out: Linear,
        norm: Affine,
        up: Linear,
        down: Linear,
    ) -> None:
        self._spec, self._probe, self._query, self._both = spec, probe, query, both
        self._out, self._norm, self._up, self._down = out, norm, up, down
        self._activation: ActivationKind = ACTIVATIONS[spec.activation]

    @property
    def hidden(self) -> int:
        return self._spec.hidden

    @torch.inference_mode()
    def __call__(self, x: Tensor) -> Tensor:
        """Pool: (F, T, C)  ->  (F, 1, C)."""
        spec, (frames, tokens, width) = self._spec, x.shape
        query = self._query(self._probe).view(1, spec.heads, 1, -1)
        query = query.expand(frames, -1, -1, -1)  # (F, N, 1, D)
        # Each (F, N, T, D).
        key, value = self._both(x).view(frames, tokens, 2, spec.heads, -1).transpose(1, 3).unbind(2)
        seen = F.scaled_dot_product_attention(query, key, value)
        pooled = self._out(seen.reshape(frames, 1, width))
        normed = F.layer_norm(
            pooled, (width,), self._norm.weight, self._norm.bias, self._spec.norm_eps
        )
        return pooled + self._down(activate.reference(self._up(normed), self._activation))


def _read_attention_pool(folder: Path, spec: VisionTowerSpec, dtype: Dtype) -> AttentionPool:
    hidden, wide = spec.hidden, spec.intermediate
    with ExitStack() as open_files:
        tower = TensorFiles(weight_files(folder), open_files, last="head.probe", dtype=dtype)
        take, affine, linear = tower.read, tower.affine, tower.linear
        weight = take("head.attention.in_proj_weight", 3 * hidden, hidden)
        bias = take("head.attention.in_proj_bias", 3 * hidden)
        return AttentionPool(
            spec,
            take("head.probe", 1, 1, hidden).flatten(),
            query=linear(Affine(weight[:hidden], bias[:hidden])),
            both=linear(Affine(weight[hidden:], bias[hidden:])),
            out=linear(affine("head.attention.out_proj", hidden, hidden)),
            norm=affine("head.layernorm", hidden),
            up=linear(affine("head.mlp.fc1", wide, hidden)),
            down=linear(affine("head.mlp.fc2", hidden, wide)),
        )


class PooledPatches:
    """Gemma 3's connector: squares of patches are averaged to one row, then a norm and a matrix.

    norm (C,): what is added to 1; `side` squares an edge.

    Source: Gemma Team 2025, arXiv:2503.19786.
    """

    def __init__(self, linear: Linear, norm: Tensor, side: int, eps: float) -> None:
        self._linear, self._norm, self._side, self._eps = linear, norm, side, eps

    @property
    def hidden(self) -> int:
        return self._linear.outputs

    @torch.inference_mode()
    def __call__(self, x: Tensor) -> Tensor:
        """Connect: (F, T, C)  ->  (F, side ** 2, hidden)."""
        frames, tokens, width = x.shape
        patches = round(tokens**0.5)
        grid = x.transpose(1, 2).view(frames, width, patches, patches)
        pooled = F.avg_pool2d(grid, patches // self._side).flatten(2).transpose(1, 2)
        normed = pooled * torch.rsqrt(pooled.pow(2).mean(-1, keepdim=True) + self._eps)
        return self._linear(normed * (1 + self._norm))


class _PooledFields(msgspec.Struct, frozen=True):
    mm_tokens_per_image: int = 256


def _read_pooled(folder: Path, spec: VisionTowerSpec, dtype: Dtype) -> PooledPatches:
    file = folder / "config.json"
    tokens = read_json(file, _PooledFields).mm_tokens_per_image
    side, patches = round(tokens**0.5), spec.image_size // spec.patch_size
    if side**2 != tokens or patches // max(side, 1) * side != patches:
        raise ConfigError(
            f"{file}: mm_tokens_per_image = {tokens}: must be a square whose edge divides {patches}"
        )
    last = f"{PROJECTOR}{_PROJECTION}"
    with ExitStack() as open_files:
        checkpoint = TensorFiles(weight_files(folder), open_files, last=last, dtype=dtype)
        weight = checkpoint.read(last, spec.hidden, checkpoint.width(last))
        norm = checkpoint.read(f"{PROJECTOR}mm_soft_emb_norm.weight", spec.hidden)
        linear = checkpoint.linear(Affine(weight.T.contiguous(), None))
    return PooledPatches(linear, norm, side, spec.norm_eps)


class PixelShuffle:
    """Idefics3's connector: squares of `factor` x `factor` patches become one row, and a linear.

    Source: Laurencon et al. 2024, arXiv:2408.12637.
    """

    def __init__(self, linear: Linear, factor: int) -> None:
        self._linear, self._factor = linear, factor

    @property
    def hidden(self) -> int:
        return self._linear.outputs

    @torch.inference_mode()
    def __call__(self, x: Tensor) -> Tensor:
        """Connect: (F, T, C)  ->  (F, T / factor ** 2, hidden)."""
        return self._linear(shuffled(x, self._factor))


def shuffled(x: Tensor, by: int) -> Tensor:
    """Squares of `by` x `by` patches as rows: (F, T, C)  ->  (F, T / by ** 2, by ** 2 * C)."""
    frames, tokens, width = x.shape
    side = round(tokens**0.5) // by
    # Of a square, the rows come first, then the columns, then the width.
    squares = x.reshape(frames, side, by, side, by, width).transpose(2, 3)
    return squares.reshape(frames, side * side, -1)


class _IdeficsFields(msgspec.Struct, frozen=True):
    scale_factor: int = 2


def _read_shuffle(folder: Path, spec: VisionTowerSpec, dtype: Dtype) -> PixelShuffle:
    file = folder / "config.json"
    factor = read_json(file, _IdeficsFields).scale_factor
    if (spec.image_size // spec.patch_size) % factor:
        raise ConfigError(f"{file}: scale_factor = {factor}: must divide the patches of an edge")
    with ExitStack() as open_files:
        checkpoint = TensorFiles(weight_files(folder), open_files, last=CONNECTOR, dtype=dtype)
        hidden = checkpoint.length(CONNECTOR)
        weight = checkpoint.read(CONNECTOR, hidden, spec.hidden * factor**2)
        return PixelShuffle(checkpoint.linear(Affine(weight, None)), factor)


class ShuffledProjector:
    """InternVL's connector: squares of `factor` x `factor` patches, a norm, and two linears.

    Source: Chen et al. 2024, arXiv:2404.16821.
    """

    def __init__(
        self, norm: Affine, first: Linear, second: Linear, *, factor: int, drops_first: bool
    ) -> None:
        self._norm, self._first, self._second = norm, first, second
        self._factor, self._start = factor, int(drops_first)

    @property
    def hidden(self) -> int:
        return self._second.outputs

    @torch.inference_mode()
    def __call__(self, x: Tensor) -> Tensor:
        """Connect: (F, T, C)  ->  (F, rows of a frame, hidden)."""
        squares = shuffled(x[:, self._start :], self._factor)
        normed = F.layer_norm(squares, squares.shape[-1:], self._norm.weight, self._norm.bias)
        return self._second(F.gelu(self._first(normed)))


class _ShuffleFields(msgspec.Struct, frozen=True):
    downsample_ratio: float = 0.5
    projector_hidden_act: Literal["gelu"] = "gelu"


def _read_shuffled_projector(
    folder: Path, spec: VisionTowerSpec, dtype: Dtype
) -> ShuffledProjector:
    file, features = folder / "config.json", read_features(folder)
    assert features is not None, "of this model"
    factor = shuffle_factor(file, read_json(file, _ShuffleFields).downsample_ratio)
    if (side := spec.image_size // spec.patch_size) % factor:
        raise ConfigError(f"{file}: downsample_ratio: {factor} patches must divide {side}")
    if not features.drops_first:
        raise ConfigError(f"{file}: vision_feature_select_strategy: must be default")
    last = f"{PROJECTOR}linear_1.weight"
    with ExitStack() as open_files:
        checkpoint = TensorFiles(weight_files(folder), open_files, last=last, dtype=dtype)
        hidden, wide = checkpoint.length(last), spec.hidden * factor**2
        return ShuffledProjector(
            checkpoint.affine(f"{PROJECTOR}layer_norm", wide),
            checkpoint.linear(checkpoint.affine(f"{PROJECTOR}linear_1", hidden, wide)),
            checkpoint.linear(checkpoint.affine(f"{PROJECTOR}linear_2", hidden, hidden)),
            factor=factor,
            drops_first=True,
        )


class ShuffledAdapter:
    """Llama 4's connector: squares of patches, an adapter of two linears, and a projector.

    The class token, which is last, is left out.
    """

    def __init__(self, first: Linear, second: Linear, projector: Linear, *, factor: int) -> None:
        self._first, self._second, self._projector = first, second, projector
        self._factor = factor

    @property
    def hidden(self) -> int:
        return self._projector.outputs

    @torch.inference_mode()
    def __call__(self, x: Tensor) -> Tensor:
        """Connect: (F, T, C)  ->  (F, rows of a frame, hidden)."""
        wide = F.gelu(self._first(shuffled(x[:, :-1], self._factor)))
        return self._projector(F.gelu(self._second(wide)))


def _read_adapter(folder: Path, spec: VisionTowerSpec, dtype: Dtype) -> ShuffledAdapter:
    file, files = folder / "config.json", weight_files(folder)
    factor = read_llama4_tower(file).factor(file)
    first, second, last = (
        *(f"vision_adapter.mlp.{name}.weight" for name in ("fc1", "fc2")),
        f"{PROJECTOR}linear_1.weight",
    )
    with ExitStack() as open_files:
        tower = TensorFiles(files, open_files, last=first, dtype=dtype)
        behind = TensorFiles(files, open_files, last=last, dtype=dtype)
        wide, width = tower.length(first), tower.length(second)
        in_first = tower.read(first, wide, spec.hidden * factor**2)
        in_second = tower.read(second, width, wide)
        projector = behind.read(last, behind.length(last), width)
        return ShuffledAdapter(
            tower.linear(Affine(in_first, None)),
            tower.linear(Affine(in_second, None)),
            behind.linear(Affine(projector, None)),
            factor=factor,
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

    def __init__(self, first: Linear, second: Linear, *, drops_first: bool) -> None:
        self._first, self._second = first, second
        self._start = int(drops_first)

    @property
    def hidden(self) -> int:
        return self._second.outputs

    @torch.inference_mode()
    def __call__(self, x: Tensor) -> Tensor:
        """Project what the tower has computed: (B, T, C)  ->  (B, T or T - 1, hidden)."""
        return self._second(F.gelu(self._first(x[:, self._start :])))


def read_projector(
    folder: Path, spec: VisionTowerSpec, features: FeatureFields, dtype: Dtype
) -> Projector:
    """Read LLaVA's projector.

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
        last = f"{PROJECTOR}linear_1.bias"
        checkpoint = TensorFiles(weight_files(folder), open_files, last=last, dtype=dtype)
        affine, hidden = checkpoint.affine, checkpoint.length(last)
        first = checkpoint.linear(affine(f"{PROJECTOR}linear_1", hidden, spec.hidden))
        second = checkpoint.linear(affine(f"{PROJECTOR}linear_2", hidden, hidden))
    return Projector(first, second, drops_first=features.drops_first and spec.has_class)


class _ProjectorFields(msgspec.Struct, frozen=True):
    projector_hidden_act: str = "gelu"
    multimodal_projector_bias: bool = True
