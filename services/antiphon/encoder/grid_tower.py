"""The vision transformers of Qwen2-VL to Qwen3-VL, GLM-4V and Pixtral, for images of any shape.

An image is a grid of patches, and each square of `merge` x `merge` of them becomes one token. Its
patches lie next to each other from the start: token by token, in rows of each.

Axes: P patches of an image, C width, N heads, D of each head, T tokens.

Source: Wang et al. 2024, arXiv:2409.12191; Bai et al. 2025, arXiv:2502.13923 and arXiv:2511.21631;
Agrawal et al. 2024, arXiv:2410.07073 (Pixtral); GLM-V Team 2025, arXiv:2507.01006.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from msgspec import Meta
from torch import Tensor

from antiphon.config.errors import ConfigError
from antiphon.encoder.activations import ACTIVATIONS
from antiphon.encoder.preprocess import VisionActivation
from antiphon.encoder.tensor_files import Affine, TensorFiles, fused, weight_files
from antiphon.model_card.config_json import parse_json, read_json
from antiphon.model_card.vision import DEEPSTACKS, GLMS, MISTRAL3

if TYPE_CHECKING:
    from pathlib import Path

Size = Annotated[int, Meta(ge=1)]
PROJECTOR = "multi_modal_projector."


class GridNames(msgspec.Struct, frozen=True, kw_only=True):
    """Names of tensors, which differ between models; those of a layer's parts are relative to it.

    Linears of several names are fused. The name of the patches shows the prefix of a tower's names.
    """

    patch: str = "patch_embed.proj"
    norm_before: str = ""
    positions: str = "pos_embed.weight"
    layer: str = "blocks.{}"
    norm1: str = "norm1"
    qkv: tuple[str, ...] = ("attn.qkv",)
    out: str = "attn.proj"
    norm2: str = "norm2"
    up: tuple[str, ...] = ("mlp.fc1",)
    down: str = "mlp.fc2"
    norm_after: str = "ln_q"
    first: str = "mlp.0"
    second: str = "mlp.2"


class ProjectorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What makes tokens of patches in Pixtral and Mistral 3.

    Attributes:
        eps: Of the norm before patches are merged; None: they are not.
        bias: Whether its two linears have one.
    """

    eps: float | None
    bias: bool


class GridTowerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a tower.

    Attributes:
        width: C.
        hidden: Of the text model.
        frames: Frames of a video that a patch holds; an image is in all of them.
        gated: Feed-forward blocks with a gate, and RMS norms; else two linears and layer norms.
        biases: Whether the linears of layers have any.
        eps: Of the norms.
        window: Edge of the windows that patches attend within, in tokens; 0: there are none.
        whole_layers: Layers that attend to the whole image all the same.
        side: Edge of the square of learned positions that is scaled to an image; 0: there is none.
        cubic: Whether those positions are scaled by cubic pieces, pixels at their middles.
        patch_bias: Whether patches are embedded with a bias.
        taps: Layers behind which a merger of their own makes rows for the text model's first ones.
        alternating: Frequencies of rows and columns by turns; else both have the same.
        projector: Of Mistral's models, what is behind the tower instead of a merger.
        gated_merger: Width of GLM-4V's merger, which has a gate; 0: another one.
    """

    width: int
    intermediate: int
    hidden: int
    layers: int
    heads: int
    patch: int
    merge: int
    frames: int
    base: float
    activation: VisionActivation
    gated: bool
    biases: bool = True
    eps: float = 1e-6
    window: int = 0
    whole_layers: frozenset[int] = frozenset()
    side: int = 0
    cubic: bool = False
    patch_bias: bool = False
    taps: tuple[int, ...] = ()
    names: GridNames = GridNames()
    alternating: bool = False
    projector: ProjectorSpec | None = None
    gated_merger: int = 0

    @property
    def rows_width(self) -> int:
        """Width of an embedding: all mergers' rows lie behind each other."""
        return (1 + len(self.taps)) * self.hidden

    def windows_of(self, layer: int) -> bool:
        return self.window > 0 and layer not in self.whole_layers


@dataclass(frozen=True, slots=True)
class GridNorm:
    """Weight (C,), and the bias (C,) of a layer norm; an RMS norm has none."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class GridLayerWeights:
    """The weights of one layer. Query, key and value are fused, (3 C, C); so are gate and up."""

    norm1: GridNorm
    qkv: Affine
    out: Affine
    norm2: GridNorm
    up: Affine
    down: Affine


@dataclass(frozen=True, slots=True)
class MergerWeights:
    """What makes a token of its patches; the norm is that of each, or of all as one row.

    `merge` (C, C * merge * merge) makes one patch of those of a token, by channel. With a
    `gate_up` what `first` and `inner` make is gated.
    """

    norm: GridNorm | None
    first: Affine
    second: Affine
    merge: Affine | None = None
    inner: GridNorm | None = None
    gate_up: Affine | None = None


@dataclass(frozen=True, slots=True)
class GridTowerWeights:
    """All weights. `patch` (C, 3 * patch * patch) is for an image that is in all frames.

    `positions` are (side * side, C); `tapped` the mergers of layers, in their order.
    """

    patch: Tensor
    patch_bias: Tensor | None
    positions: Tensor | None
    norm_before: GridNorm | None
    layers: tuple[GridLayerWeights, ...]
    merger: MergerWeights
    tapped: tuple[MergerWeights, ...]


class GridTower:
    """Computes one embedding per token of an image, alone: nothing else has a part in its bits."""

    def __init__(self, spec: GridTowerSpec, weights: GridTowerWeights) -> None:
        self.spec = spec
        self._weights = weights
        self._activation = ACTIVATIONS[spec.activation]

    @torch.inference_mode()
    def __call__(self, pixels: Tensor) -> Tensor:
        """Embed: pixels (1, 3, height, width), in whole tokens  ->  (1, T, rows_width)."""
        spec, weights = self.spec, self._weights
        rows, columns = (edge // (spec.patch * spec.merge) for edge in pixels.shape[-2:])
        windows = _windows(rows, columns, spec.window)
        order = torch.cat(windows)  # (T,) tokens, window by window
        patches = self._patches(pixels, rows, columns)[order].flatten(0, 1)
        x = F.linear(patches, weights.patch, weights.patch_bias)
        if weights.norm_before is not None:
            x = weights.norm_before(x)
        if weights.positions is not None:
            learned = self._cubic if spec.cubic else self._learned
            x = x + learned(weights.positions, rows, columns, order)
        cos, sin = self._angles(rows, columns, order)
        lengths = [len(window) * spec.merge**2 for window in windows]
        made = list[Tensor]()
        for number, layer in enumerate(weights.layers):
            parts = lengths if spec.windows_of(number) else [len(x)]
            x = x + self._attend(layer.norm1(x), layer, cos, sin, parts)
            x = x + self._feed_forward(layer.norm2(x), layer)
            if number in spec.taps:
                merger = weights.tapped[spec.taps.index(number)]
                made.append(_merged(_normed(x.view(len(order), -1), merger), merger))
        squares = _normed(x, weights.merger).view(len(order), -1, spec.width)
        tokens = torch.cat([_merged(squares, weights.merger), *made], dim=-1)
        return tokens[torch.argsort(order)][None]

    def _patches(self, pixels: Tensor, rows: int, columns: int) -> Tensor:
        """Cut into patches: (1, 3, height, width)  ->  (T, merge * merge, 3 * patch * patch)."""
        merge, patch = self.spec.merge, self.spec.patch
        cut = pixels.view(3, rows, merge, patch, columns, merge, patch)
        return cut.permute(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, merge * merge, -1)

    def _angles(self, rows: int, columns: int, order: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine of each patch, (P, 1, D): half of the pairs by row."""
        spec = self.spec
        size = spec.width // spec.heads // 2
        exponents = torch.arange(0, size, 2, dtype=torch.float32)
        of_columns = exponents + 1 if spec.alternating else exponents
        frequencies = 1.0 / spec.base ** (torch.stack((exponents, of_columns)) / size)
        places = self._places(rows, columns, order).float()
        angle = (places[..., None] * frequencies[:, None]).permute(1, 0, 2).flatten(1)  # (P, D / 2)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]

    def _places(self, rows: int, columns: int, order: Tensor) -> Tensor:
        """Row and column of each patch, (2, P)."""
        merge = self.spec.merge
        grid = torch.stack(
            torch.meshgrid(torch.arange(rows * merge), torch.arange(columns * merge), indexing="ij")
        )
        tokens = grid.view(2, rows, merge, columns, merge).transpose(2, 3).flatten(1, 2)
        return tokens.flatten(2)[:, order].flatten(1)

    def _learned(self, table: Tensor, rows: int, columns: int, order: Tensor) -> Tensor:
        """Learned positions of patches (P, C): the square's ends lie on those of the image."""
        side = self.spec.side
        edges = torch.tensor([[rows], [columns]]) * self.spec.merge
        places = self._places(rows, columns, order) * (side - 1) / (edges - 1).clamp(min=1)
        low = places.floor().long()
        high, part = (low + 1).clamp(max=side - 1), places - low
        learned = torch.zeros(())
        for row, by_row in ((low[0], 1 - part[0]), (high[0], part[0])):
            for column, by_column in ((low[1], 1 - part[1]), (high[1], part[1])):
                learned = learned + table[row * side + column] * (by_row * by_column)[:, None]
        return learned

    def _cubic(self, table: Tensor, rows: int, columns: int, order: Tensor) -> Tensor:
        """Learned positions of patches (P, C): its edges lie on those of the image."""
        side, edges = self.spec.side, torch.tensor([[rows], [columns]]) * self.spec.merge
        down, across = (self._places(rows, columns, order) + 0.5) / edges * 2 - 1
        square = table.view(side, side, -1).permute(2, 0, 1)[None]
        grid = torch.stack((across, down), dim=-1)[None, :, None]
        sampled = F.grid_sample(
            square, grid, mode="bicubic", padding_mode="border", align_corners=False
        )
        return sampled[0, :, :, 0].T

    def _attend(
        self, x: Tensor, layer: GridLayerWeights, cos: Tensor, sin: Tensor, parts: list[int]
    ) -> Tensor:
        """Bidirectional attention within parts of so many patches: (P, C)  ->  (P, C)."""
        qkv = F.linear(x, layer.qkv.weight, layer.qkv.bias)
        q, k, v = qkv.view(len(x), 3, self.spec.heads, -1).unbind(1)  # each (P, N, D)
        q, k = (each * cos + each.roll(each.shape[-1] // 2, -1) * sin for each in (q, k))
        q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))  # each (1, N, P, D)
        mixed, first = list[Tensor](), 0
        for count in parts:
            part = slice(first, first + count)
            mixed.append(
                F.scaled_dot_product_attention(q[:, :, part], k[:, :, part], v[:, :, part])
            )
            first += count
        joined = torch.cat(mixed, dim=2)[0].transpose(0, 1).flatten(1)
        return F.linear(joined, layer.out.weight, layer.out.bias)

    def _feed_forward(self, x: Tensor, layer: GridLayerWeights) -> Tensor:
        wide = F.linear(x, layer.up.weight, layer.up.bias)
        if self.spec.gated:
            gate, up = wide.chunk(2, dim=-1)
            wide = self._activation(gate) * up
        else:
            wide = self._activation(wide)
        return F.linear(wide, layer.down.weight, layer.down.bias)


def _normed(x: Tensor, merger: MergerWeights) -> Tensor:
    return x if merger.norm is None else merger.norm(x)


def _merged(squares: Tensor, merger: MergerWeights) -> Tensor:
    """The tokens of squares of patches: (T, merge * merge, C), or flat  ->  (T, hidden)."""
    if merger.merge is None:
        squares = squares.flatten(1)
    else:
        channels = squares.transpose(1, 2).flatten(1)
        squares = F.linear(channels, merger.merge.weight, merger.merge.bias)
    wide = F.linear(squares, merger.first.weight, merger.first.bias)
    wide = F.gelu(wide if merger.inner is None else merger.inner(wide))
    if merger.gate_up is not None:
        gate, up = F.linear(wide, merger.gate_up.weight, merger.gate_up.bias).chunk(2, dim=-1)
        wide = F.silu(gate) * up
    return F.linear(wide, merger.second.weight, merger.second.bias)


def _windows(rows: int, columns: int, edge: int) -> list[Tensor]:
    """The tokens of each window of an image, row by row; those at its ends may be smaller."""
    tokens = torch.arange(rows * columns).view(rows, columns)
    if not edge:
        return [tokens.flatten()]
    return [
        tokens[top : top + edge, left : left + edge].flatten()
        for top in range(0, rows, edge)
        for left in range(0, columns, edge)
    ]


class _Rope(msgspec.Struct):
    rope_theta: float = 10000.0


class _TowerFields(msgspec.Struct):
    """What the towers' configs have in common."""

    depth: Size = 32
    num_heads: Size = 16
    patch_size: Size = 14
    spatial_merge_size: Size = 2
    temporal_patch_size: Size = 2
    rope_parameters: _Rope | None = None

    @property
    def base(self) -> float:
        return (self.rope_parameters or _Rope()).rope_theta


class _Qwen25Tower(_TowerFields):
    hidden_size: Size = 3584
    intermediate_size: Size = 3420
    out_hidden_size: Size = 3584
    hidden_act: Literal["silu"] = "silu"
    window_size: Size = 112
    fullatt_block_indexes: tuple[int, ...] = (7, 15, 23, 31)

    def spec(self) -> GridTowerSpec:
        return GridTowerSpec(
            width=self.hidden_size,
            intermediate=self.intermediate_size,
            hidden=self.out_hidden_size,
            layers=self.depth,
            heads=self.num_heads,
            patch=self.patch_size,
            merge=self.spatial_merge_size,
            frames=self.temporal_patch_size,
            base=self.base,
            activation=VisionActivation.SILU,
            gated=True,
            names=GridNames(up=("mlp.gate_proj", "mlp.up_proj"), down="mlp.down_proj"),
            window=self.window_size // self.spatial_merge_size // self.patch_size,
            whole_layers=frozenset(self.fullatt_block_indexes),
        )


class _Qwen2Tower(_TowerFields):
    embed_dim: Size = 1280
    hidden_size: Size = 3584
    mlp_ratio: float = 4
    hidden_act: VisionActivation = VisionActivation.QUICK_GELU

    def spec(self) -> GridTowerSpec:
        return GridTowerSpec(
            width=self.embed_dim,
            intermediate=int(self.embed_dim * self.mlp_ratio),
            hidden=self.hidden_size,
            layers=self.depth,
            heads=self.num_heads,
            patch=self.patch_size,
            merge=self.spatial_merge_size,
            frames=self.temporal_patch_size,
            base=self.base,
            activation=self.hidden_act,
            gated=False,
        )


class _Qwen3Tower(_TowerFields):
    depth: Size = 27
    patch_size: Size = 16
    hidden_size: Size = 1152
    intermediate_size: Size = 4304
    out_hidden_size: Size = 3584
    hidden_act: VisionActivation = VisionActivation.GELU_TANH
    num_position_embeddings: Size = 2304
    deepstack_visual_indexes: tuple[int, ...] = (8, 16, 24)

    def spec(self) -> GridTowerSpec:
        return GridTowerSpec(
            width=self.hidden_size,
            intermediate=self.intermediate_size,
            hidden=self.out_hidden_size,
            layers=self.depth,
            heads=self.num_heads,
            patch=self.patch_size,
            merge=self.spatial_merge_size,
            frames=self.temporal_patch_size,
            base=self.base,
            activation=self.hidden_act,
            gated=False,
            side=math.isqrt(self.num_position_embeddings),
            patch_bias=True,
            taps=self.deepstack_visual_indexes,
            names=GridNames(
                up=("mlp.linear_fc1",),
                down="mlp.linear_fc2",
                norm_after="norm",
                first="linear_fc1",
                second="linear_fc2",
            ),
        )


class _GlmTower(_TowerFields):
    depth: Size = 24
    num_heads: Size = 12
    hidden_size: Size = 1536
    intermediate_size: Size = 13696
    out_hidden_size: Size = 4096
    hidden_act: Literal["silu"] = "silu"
    image_size: Size = 336
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False

    def spec(self) -> GridTowerSpec:
        if self.attention_bias:
            raise ConfigError("vision_config: attention_bias = true is not supported")
        return GridTowerSpec(
            width=self.hidden_size,
            intermediate=self.out_hidden_size,  # the other one is the merger's
            hidden=self.out_hidden_size,
            layers=self.depth,
            heads=self.num_heads,
            patch=self.patch_size,
            merge=self.spatial_merge_size,
            frames=self.temporal_patch_size,
            base=self.base,
            activation=VisionActivation.SILU,
            gated=True,
            biases=False,
            eps=self.rms_norm_eps,
            side=self.image_size // self.patch_size,
            cubic=True,
            patch_bias=True,
            gated_merger=self.intermediate_size,
            names=GridNames(
                norm_before="post_conv_layernorm",
                positions="embeddings.position_embedding.weight",
                up=("mlp.gate_proj", "mlp.up_proj"),
                down="mlp.down_proj",
            ),
        )


class _PixtralTower(msgspec.Struct):
    hidden_size: Size = 1024
    intermediate_size: Size = 4096
    num_hidden_layers: Size = 24
    num_attention_heads: Size = 16
    patch_size: Size = 16
    hidden_act: VisionActivation = VisionActivation.GELU
    rope_theta: float = 10000.0
    rope_parameters: _Rope | None = None


class _RowText(msgspec.Struct):
    hidden_size: Size = 4096
    rms_norm_eps: float = 1e-6


class _RowConfig(msgspec.Struct):
    vision_config: _PixtralTower
    text_config: _RowText
    model_type: str
    spatial_merge_size: Size = 2
    multimodal_projector_bias: bool | None = None
    projector_hidden_act: Literal["gelu"] = "gelu"
    vision_feature_layer: int | list[int] | None = None
    vision_feature_select_strategy: str = "full"

    def spec(self, file: Path) -> GridTowerSpec:
        tower, merges = self.vision_config, self.model_type == MISTRAL3
        layer = self.vision_feature_layer
        if layer is None:
            layer = -1 if merges else -2
        if not isinstance(layer, int) or self.vision_feature_select_strategy != "full":
            raise ConfigError(
                f"{file}: vision_feature_layer, vision_feature_select_strategy: of Pixtral's tower "
                "one layer is supported, and full"
            )
        layers = layer + (tower.num_hidden_layers + 1 if layer < 0 else 0)
        if not 0 < layers <= tower.num_hidden_layers:
            raise ConfigError(
                f"{file}: vision_feature_layer = {layer}: must be one of "
                f"{tower.num_hidden_layers} layers"
            )
        bias = self.multimodal_projector_bias
        return GridTowerSpec(
            width=tower.hidden_size,
            intermediate=tower.intermediate_size,
            hidden=self.text_config.hidden_size,
            layers=layers,
            heads=tower.num_attention_heads,
            patch=tower.patch_size,
            merge=self.spatial_merge_size if merges else 1,
            frames=1,
            base=tower.rope_parameters.rope_theta if tower.rope_parameters else tower.rope_theta,
            activation=tower.hidden_act,
            gated=True,
            biases=False,
            eps=1e-5,
            alternating=True,
            names=PIXTRAL_NAMES,
            projector=ProjectorSpec(
                eps=self.text_config.rms_norm_eps if merges else None,
                bias=not merges if bias is None else bias,
            ),
        )


PIXTRAL_NAMES = GridNames(
    patch="patch_conv",
    norm_before="ln_pre",
    layer="transformer.layers.{}",
    norm1="attention_norm",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    out="attention.o_proj",
    norm2="ffn_norm",
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
)
_TOWERS: dict[str, type[_Qwen2Tower | _Qwen25Tower | _Qwen3Tower | _GlmTower]] = {
    **dict.fromkeys(GLMS, _GlmTower),
    "qwen2_vl": _Qwen2Tower,
    "qwen2_5_vl": _Qwen25Tower,
    **dict.fromkeys(DEEPSTACKS, _Qwen3Tower),
}


class _Config(msgspec.Struct):
    model_type: str
    vision_config: msgspec.Raw


def read_grid_spec(folder: Path) -> GridTowerSpec:
    """Read the config.json of a Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Pixtral or Mistral 3 model.

    Raises:
        ConfigError: It is missing or malformed, or the tower is not supported.
    """
    file = folder / "config.json"
    config = read_json(file, _Config)
    if config.model_type in _TOWERS:
        kind = _TOWERS[config.model_type]
        spec = parse_json(config.vision_config, kind, f"{file}: vision_config").spec()
    else:
        spec = read_json(file, _RowConfig).spec(file)
    if spec.width % (4 * spec.heads):
        raise ConfigError(
            f"{file}: vision_config: a width of {spec.width} is not a multiple of four times the "
            f"{spec.heads} heads"
        )
    if config.model_type == "qwen2_5_vl" and not spec.window:
        raise ConfigError(f"{file}: vision_config: window_size is less than a token")
    if sorted(set(spec.taps) & set(range(spec.layers))) != list(spec.taps):
        raise ConfigError(
            f"{file}: vision_config: deepstack_visual_indexes = {list(spec.taps)}: must be layers "
            f"of {spec.layers}, rising"
        )
    return spec


def read_grid_weights(folder: Path, spec: GridTowerSpec) -> GridTowerWeights:
    """Read a tower as float32.

    Raises:
        ConfigError: There are no files, one is broken, or a tensor is missing, has another shape or
            an unsupported dtype.
    """
    names, width, edge = spec.names, spec.width, spec.patch
    wide = width * spec.merge**2
    with ExitStack() as open_files:
        files = TensorFiles(weight_files(folder), open_files, last=f"{names.patch}.weight")
        frames = () if spec.projector is not None else (spec.frames,)
        patch = files.read(f"{names.patch}.weight", width, 3, *frames, edge, edge)
        lists = (f"deepstack_merger_list.{i}" for i in range(len(spec.taps)))
        if spec.gated_merger:
            merger = _gated_merger(files, spec)
        elif spec.projector is None:
            merger = _merger(files, "merger", spec, width)
        else:
            last = f"{PROJECTOR}linear_1.weight"
            behind = TensorFiles(weight_files(folder), open_files, last=last)
            merger = _projector(behind, spec, spec.projector)
        return GridTowerWeights(
            patch=(patch if spec.projector is not None else patch.sum(dim=2)).flatten(1),
            patch_bias=files.read(f"{names.patch}.bias", width) if spec.patch_bias else None,
            positions=files.read(names.positions, spec.side**2, width) if spec.side else None,
            norm_before=(
                _norm(files, names.norm_before, spec, width) if names.norm_before else None
            ),
            layers=tuple(_layer(files, names.layer.format(i), spec) for i in range(spec.layers)),
            merger=merger,
            tapped=tuple(_merger(files, name, spec, wide) for name in lists),
        )


def _merger(files: TensorFiles, name: str, spec: GridTowerSpec, normed: int) -> MergerWeights:
    names, wide = spec.names, spec.width * spec.merge**2
    return MergerWeights(
        norm=_norm(files, f"{name}.{names.norm_after}", spec, normed),
        first=files.affine(f"{name}.{names.first}", wide, wide),
        second=files.affine(f"{name}.{names.second}", spec.hidden, wide),
    )


def _gated_merger(files: TensorFiles, spec: GridTowerSpec) -> MergerWeights:
    """GLM-4V's: a convolution of the patches of a token, and a feed-forward block with a gate."""
    hidden, edge, wide = spec.hidden, spec.merge, spec.gated_merger
    conv = files.read("downsample.weight", hidden, spec.width, edge, edge)
    gate, up = (files.affine(f"merger.{part}_proj", wide, hidden, bias=False) for part in _GATED)
    inner = files.affine("merger.post_projection_norm", hidden)
    return MergerWeights(
        norm=_norm(files, "post_layernorm", spec, spec.width),
        merge=Affine(conv.flatten(1), files.read("downsample.bias", hidden)),
        first=files.affine("merger.proj", hidden, hidden, bias=False),
        inner=GridNorm(inner.weight, inner.bias, 1e-5),
        gate_up=fused(gate, up),
        second=files.affine("merger.down_proj", hidden, wide, bias=False),
    )


_GATED = ("gate", "up")


def _projector(files: TensorFiles, spec: GridTowerSpec, own: ProjectorSpec) -> MergerWeights:
    width, hidden, bias, norm, merge = spec.width, spec.hidden, own.bias, None, None
    if own.eps is not None:
        norm = GridNorm(files.read(f"{PROJECTOR}norm.weight", width), None, own.eps)
        name = f"{PROJECTOR}patch_merger.merging_layer.weight"
        merge = Affine(files.read(name, width, width * spec.merge**2), None)
    return MergerWeights(
        norm=norm,
        first=files.affine(f"{PROJECTOR}linear_1", hidden, width, bias=bias),
        second=files.affine(f"{PROJECTOR}linear_2", hidden, hidden, bias=bias),
        merge=merge,
    )


def _layer(files: TensorFiles, name: str, spec: GridTowerSpec) -> GridLayerWeights:
    names, width, wide = spec.names, spec.width, spec.intermediate

    def linear(part: str, outputs: int, inputs: int) -> Affine:
        return files.affine(f"{name}.{part}", outputs, inputs, bias=spec.biases)

    each = 3 * width // len(names.qkv)
    return GridLayerWeights(
        norm1=_norm(files, f"{name}.{names.norm1}", spec, width),
        qkv=fused(*(linear(part, each, width) for part in names.qkv)),
        out=linear(names.out, width, width),
        norm2=_norm(files, f"{name}.{names.norm2}", spec, width),
        up=fused(*(linear(part, wide, width) for part in names.up)),
        down=linear(names.down, width, wide),
    )


def _norm(files: TensorFiles, name: str, spec: GridTowerSpec, width: int) -> GridNorm:
    bias = None if spec.gated else files.read(f"{name}.bias", width)
    return GridNorm(files.read(f"{name}.weight", width), bias, spec.eps)
