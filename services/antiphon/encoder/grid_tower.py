"""The vision transformers of models from Qwen2-VL to Gemma 4, for media of any shape.

An image is a grid of patches, and each square of `merge` x `merge` of them becomes one token. Its
patches lie next to each other from the start: token by token, in rows of each.

Axes: P patches of an image, C width, N heads, D of each head, T tokens.

Source: Wang et al. 2024, arXiv:2409.12191; Bai et al. 2025, arXiv:2502.13923 and arXiv:2511.21631;
Agrawal et al. 2024, arXiv:2410.07073 (Pixtral); GLM-V Team 2025, arXiv:2507.01006; Cui et al. 2025,
arXiv:2510.14528 (PaddleOCR-VL); Kimi Team 2025, arXiv:2504.07491, section 2.1 (MoonViT);
Yao et al. 2024, arXiv:2408.01800 (MiniCPM-V); Microsoft 2025, arXiv:2503.01743
(Phi-4-multimodal).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec
import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from torch import Tensor

from antiphon.encoder.activations import ACTIVATIONS, VisionActivation
from antiphon.encoder.early_merger import EARLY, EarlyMerger
from antiphon.encoder.tower_layers import TowerLayer, TowerLayers

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.encoder.linear import Linear


class GridNames(msgspec.Struct, frozen=True, kw_only=True):
    """Names of tensors, which differ between models; those of a layer's parts are relative to it.

    Linears of several names are fused. The name of the patches shows the prefix of a tower's names.
    In `pairs` the parts of a head that are rotated together are neighbours where queries and keys
    are stored; a `square` of learned positions is stored as that, else as a list.
    """

    patch: str = "patch_embed.proj"
    norm_before: str = ""
    positions: str = "pos_embed.weight"
    layer: str = "blocks.{}"
    norm1: str = "norm1"
    qkv: tuple[str, ...] = ("attn.qkv",)
    out: str = "attn.proj"
    after1: str = ""
    norm2: str = "norm2"
    up: tuple[str, ...] = ("mlp.fc1",)
    down: str = "mlp.fc2"
    after2: str = ""
    norm_after: str = "ln_q"
    first: str = "mlp.0"
    second: str = "mlp.2"
    pairs: bool = False
    square: bool = False


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
        frames: Frames of a video that a patch holds; an image is in all of them. 0: the tower takes
            images only.
        gated: Feed-forward blocks with a gate, and RMS norms; else two linears and layer norms.
        biases: Whether the linears of layers have any.
        eps: Of the norms.
        base: Of the frequencies by which heads are rotated; None: they are not.
        window: Edge of the windows that patches attend within, in tokens; 0: there are none.
        whole_layers: Layers that attend to the whole image all the same.
        side: Edge of the square of learned positions that is scaled to an image; 0: there is none.
        sampled: How those positions are scaled, pixels at their middles, or which one is taken, by
            where a patch begins, or by how many steps it is from the edge, which are rounded;
            None: between their ends.
        patch_bias: Whether patches are embedded with a bias.
        taps: Layers behind which a merger of their own makes rows for the text model's first ones.
        published: Names in files as they were published, of models that have others, too.
        alternating: Frequencies of rows and columns by turns; else both have the same.
        by_turns: Pairs of a head go by column and row by turns; else the first half by row.
        projector: Of Mistral's models, what is behind the tower instead of a merger.
        gated_merger: Width of GLM-4V's merger, which has a gate; 0: another one.
        early_merge: Of MiniCPM-V, the layer behind which each window of two patches an edge becomes
            one of the same width; None: there is none.
        second_eps: Of PaddleOCR-VL and Kimi K2.5, that of a second norm before the merger, which is
            a projector.
        head_size: Of a head, if heads are normalised one by one; None: they are not, and share the
            width.
        axial: Whether learned positions are those of columns and of rows, and each half of a head
            is rotated by one of both.
        row_eps: Of MiniCPM-V, that of a norm of the patches of a token as one row, in its merger.
        mean: Of Phi-4-multimodal: a token is the mean of its patches, projected by two linears.
    """

    width: int
    intermediate: int
    hidden: int
    layers: int
    heads: int
    patch: int
    merge: int
    frames: int
    base: float | None
    activation: VisionActivation
    gated: bool
    biases: bool = True
    eps: float = 1e-6
    window: int = 0
    whole_layers: frozenset[int] = frozenset()
    side: int = 0
    sampled: Literal["nearest", "steps", "bilinear", "bicubic"] | None = None
    patch_bias: bool = False
    taps: tuple[int, ...] = ()
    names: GridNames = GridNames()
    published: GridNames | None = None
    alternating: bool = False
    by_turns: bool = False
    projector: ProjectorSpec | None = None
    gated_merger: int = 0
    early_merge: int | None = None
    second_eps: float | None = None
    head_size: int | None = None
    axial: bool = False
    row_eps: float | None = None
    mean: bool = False

    @property
    def last_merge(self) -> int:
        """Edge of the square of what the last layer computes that becomes a token."""
        return self.merge if self.early_merge is None else self.merge // EARLY

    @property
    def head(self) -> int:
        """Size of a head."""
        return self.head_size or self.width // self.heads

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
class MergerWeights:
    """What makes a token of its patches; norms, one after the other, are of each, or of all as one.

    `row_norm` is of all patches of a token as one row, behind those of each. `merge`
    (C, C * merge * merge) makes one patch of those of a token, by channel. With a `gate_up` what
    `first` and `inner` make is gated. With `mean` a token is made of the mean of its patches.
    """

    norms: tuple[GridNorm, ...]
    first: Linear
    second: Linear
    merge: Linear | None = None
    inner: GridNorm | None = None
    gate_up: Linear | None = None
    row_norm: GridNorm | None = None
    mean: bool = False


class SquaresMerger(Protocol):
    """What makes tokens in another way than `MergerWeights` do."""

    def __call__(self, squares: Tensor) -> Tensor:
        """The tokens of squares of patches: (T, merge * merge, C)  ->  (T, hidden)."""
        ...


@dataclass(frozen=True, slots=True)
class GridTowerWeights:
    """All weights. `patch` (C, 3 * patch * patch) is for an image that is in all frames.

    `frames` (C, frames * 3 * patch * patch) is for videos, whose frames lie behind each other in a
    patch, if the tower takes any. `positions` are (side * side, C), or of columns and of rows,
    (2, places, C); `tapped` the mergers of layers, in their order.
    """

    patch: Callable[[Tensor], Tensor]
    frames: Linear | None
    positions: Tensor | None
    norm_before: GridNorm | None
    layers: tuple[TowerLayer, ...]
    merger: MergerWeights | SquaresMerger
    tapped: tuple[MergerWeights, ...]
    early: EarlyMerger | None = None


class GridTower:
    """Computes one embedding per token of an image, alone: nothing else has a part in its bits.

    Nor has another part of a video in those of the frames of its patches: all layers attend within.
    """

    def __init__(self, spec: GridTowerSpec, weights: GridTowerWeights) -> None:
        self.spec = spec
        self._weights = weights
        early = spec.early_merge
        cut = spec.layers if early is None else early + 1
        self._layers = self._stack(range(cut))
        self._upper = self._stack(range(cut, spec.layers)) if cut < spec.layers else None
        self._within: Tensor | slice = slice(None)  # which order a token's patches have
        if early is not None:  # window by window
            rows = torch.arange(spec.merge**2).view(-1, EARLY, spec.last_merge, EARLY)
            self._within = rows.transpose(1, 2).flatten()

    def _stack(self, numbers: range) -> TowerLayers:
        spec = self.spec
        return TowerLayers(
            [self._weights.layers[number] for number in numbers],
            heads=spec.heads,
            activation=ACTIVATIONS[spec.activation],
            eps=spec.eps,
            divisions=[int(spec.windows_of(number)) for number in numbers],
            taps=spec.taps,
            head=spec.head_size,
        )

    @torch.inference_mode()
    def __call__(self, pixels: Tensor, inside: tuple[int, int] | None = None) -> Tensor:
        """Embed: pixels (F, 3, height, width), in whole tokens  ->  (1, T, rows_width).

        F is 1, an image, or the frames of a patch, of a video. `inside` are the first rows and
        columns of patches, beyond which there is padding that no patch attends to; None: all are.
        """
        spec, weights = self.spec, self._weights
        rows, columns = (edge // (spec.patch * spec.merge) for edge in pixels.shape[-2:])
        windows = _windows(rows, columns, spec.window)
        order = torch.cat(windows)  # (T,) tokens, window by window
        seen = None
        if inside is not None and inside != (rows * spec.merge, columns * spec.merge):
            places = self._places(rows, columns, order)
            seen = (places < torch.tensor(inside)[:, None]).all(dim=0)  # (P,)
        x = self._embedded(pixels, rows, columns, order)
        if weights.norm_before is not None:
            x = weights.norm_before(x)
        if weights.positions is not None:
            if spec.axial:
                row, column = self._places(rows, columns, order)
                learned = weights.positions[0, column] + weights.positions[1, row]
            elif spec.sampled is None:
                learned = self._learned(weights.positions, rows, columns, order)
            elif spec.sampled == "nearest":
                learned = self._nearest(weights.positions, rows, columns, order)
            elif spec.sampled == "steps":
                learned = self._at_steps(weights.positions, rows, columns, order, seen)
            else:
                learned = self._sampled(weights.positions, rows, columns, order, spec.sampled)
            x = x + learned
        parts = [len(window) * spec.merge**2 for window in windows]
        turns = None if spec.base is None else self._angles(rows, columns, order, spec.base)
        streams = self._layers(x, ([len(x)], parts), turns, seen)
        last = streams.last
        if weights.early is not None:
            last = weights.early(last)
            if self._upper is not None:
                last = self._upper(last, ([len(last)],)).last
        if not isinstance(weights.merger, MergerWeights):
            made = [weights.merger(last.view(len(order), -1, spec.width))]
        else:
            squares = _normed(last, weights.merger).view(len(order), -1, spec.width)
            made = [merged(squares, weights.merger)]
        for stream, merger in zip(streams.tapped, weights.tapped, strict=True):
            made.append(merged(_normed(stream.view(len(order), -1), merger), merger))
        return torch.cat(made, dim=-1)[torch.argsort(order)][None]

    def _embedded(self, pixels: Tensor, rows: int, columns: int, order: Tensor) -> Tensor:
        """Embed patches, in that order of their tokens: (F, 3, height, width)  ->  (P, C)."""
        cut = [self._patches(frame, rows, columns)[order].flatten(0, 1) for frame in pixels]
        linear = self._weights.patch if len(cut) == 1 else self._weights.frames
        assert linear is not None, "a tower that takes videos"
        return linear(torch.cat(cut, dim=-1))

    def _patches(self, pixels: Tensor, rows: int, columns: int) -> Tensor:
        """Cut into patches: (3, height, width)  ->  (T, merge * merge, 3 * patch * patch)."""
        merge, patch = self.spec.merge, self.spec.patch
        cut = pixels.view(3, rows, merge, patch, columns, merge, patch)
        tokens = cut.permute(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, merge * merge, -1)
        return tokens[:, self._within]

    def _angles(self, rows: int, columns: int, order: Tensor, base: float) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine of each patch, (P, 1, D): half of the pairs by row.

        Gemma 4's are (P, 1, 2, D / 2): half of a head is turned by column, and half by row.
        """
        spec = self.spec
        size = spec.head // 2
        exponents = torch.arange(0, size, 2, dtype=torch.float32)
        of_columns = exponents + 1 if spec.alternating else exponents
        frequencies = 1.0 / base ** (torch.stack((exponents, of_columns)) / size)
        places = self._places(rows, columns, order).float()
        angles = places[..., None] * frequencies[:, None]  # (2, P, D / 4)
        if spec.axial:
            angle = angles.flip(0).transpose(0, 1)  # (P, 2, D / 4)
        elif spec.by_turns:
            angle = angles.flip(0).permute(1, 2, 0).flatten(1)  # (P, D / 2)
        else:
            angle = angles.transpose(0, 1).flatten(1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]

    def _places(self, rows: int, columns: int, order: Tensor) -> Tensor:
        """Row and column of each patch, (2, P)."""
        merge = self.spec.merge
        grid = torch.stack(
            torch.meshgrid(torch.arange(rows * merge), torch.arange(columns * merge), indexing="ij")
        )
        tokens = grid.view(2, rows, merge, columns, merge).transpose(2, 3).flatten(1, 2)
        return tokens.flatten(2)[:, order][..., self._within].flatten(1)

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

    def _nearest(self, table: Tensor, rows: int, columns: int, order: Tensor) -> Tensor:
        """Learned positions of patches (P, C): those at whose places patches begin, in float32."""
        side, edges = self.spec.side, torch.tensor([[rows], [columns]]) * self.spec.merge
        borders = torch.arange(1 / side, 1.0, 1 / side)
        down, across = torch.bucketize(
            self._places(rows, columns, order) / edges, borders, right=True
        )
        return table[down * side + across]

    def _at_steps(
        self, table: Tensor, rows: int, columns: int, order: Tensor, seen: Tensor | None
    ) -> Tensor:
        """Learned positions of patches (P, C), as `_nearest`, but by multiples of float32 steps.

        They are those of the patches that are seen; the others have the first one.
        """
        side, places = self.spec.side, self._places(rows, columns, order)
        inner = places if seen is None else places[:, seen]
        steps = 1.0 / (inner.amax(dim=1, keepdim=True) + 1)
        borders = torch.arange(1 / side, 1.0, 1 / side)
        down, across = torch.bucketize(places * steps, borders, right=True)
        found = down * side + across
        return table[found if seen is None else found.where(seen, 0)]

    def _sampled(self, table: Tensor, rows: int, columns: int, order: Tensor, mode: str) -> Tensor:
        """Learned positions of patches (P, C): its edges lie on those of the image."""
        side, edges = self.spec.side, torch.tensor([[rows], [columns]]) * self.spec.merge
        down, across = (self._places(rows, columns, order) + 0.5) / edges * 2 - 1
        square = table.view(side, side, -1).permute(2, 0, 1)[None]
        grid = torch.stack((across, down), dim=-1)[None, :, None]
        sampled = F.grid_sample(square, grid, mode=mode, padding_mode="border", align_corners=False)
        return sampled[0, :, :, 0].T


def _normed(x: Tensor, merger: MergerWeights) -> Tensor:
    for norm in merger.norms:
        x = norm(x)
    return x


def merged(squares: Tensor, merger: MergerWeights) -> Tensor:
    """The tokens of squares of patches: (T, merge * merge, C), or flat  ->  (T, hidden)."""
    if merger.mean:
        squares = squares.mean(dim=1)
    elif merger.merge is None:
        squares = squares.flatten(1)
        squares = squares if merger.row_norm is None else merger.row_norm(squares)
    else:
        squares = merger.merge(squares.transpose(1, 2).flatten(1))
    wide = merger.first(squares)
    wide = F.gelu(wide if merger.inner is None else merger.inner(wide))
    if merger.gate_up is not None:
        gate, up = merger.gate_up(wide).chunk(2, dim=-1)
        wide = F.silu(gate) * up
    return merger.second(wide)


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
