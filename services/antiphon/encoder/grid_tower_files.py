"""Reads the weights of the towers of `grid_tower.py`."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec

from antiphon.config.model import Dtype
from antiphon.encoder.area_tower import (
    PROJECTION,
    AreaTowerSpec,
    read_area_layer,
    read_area_merger,
    read_area_patches,
    read_area_positions,
)
from antiphon.encoder.early_merger import EARLY, EarlyMerger
from antiphon.encoder.grid_tower import (
    GridNorm,
    GridTowerSpec,
    GridTowerWeights,
    MergerWeights,
    ProjectorSpec,
)
from antiphon.encoder.linear import Affine, Linear, by_halves
from antiphon.encoder.tensor_files import TensorFiles, weight_files
from antiphon.encoder.tower_layers import TowerLayer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

PROJECTOR = "multi_modal_projector."


def read_grid_weights(
    folder: Path, spec: GridTowerSpec, dtype: Dtype = Dtype.FLOAT32
) -> GridTowerWeights:
    """Read a tower.

    Raises:
        ConfigError: There are no files, one is broken, or a tensor is missing, has another shape or
            an unsupported dtype.
    """
    width = spec.width
    wide = width * spec.merge**2
    with ExitStack() as open_files:
        last = f"{spec.names.patch}.weight"
        files = TensorFiles(weight_files(folder), open_files, last=last, dtype=dtype)
        if spec.published is not None and files.has(spec.published.positions):
            spec = msgspec.structs.replace(spec, names=spec.published)
        names = spec.names
        lists = (f"deepstack_merger_list.{i}" for i in range(len(spec.taps)))
        if spec.gated_merger:
            merger = _gated_merger(files, spec)
        elif spec.second_eps is not None:
            # Its names begin with `mlp_AR`, `projector` or `mm_projector`.
            first = "pre_norm.weight"
            behind = TensorFiles(weight_files(folder), open_files, last=first, dtype=dtype)
            merger = _normed_projector(files, behind, spec, spec.second_eps)
        elif isinstance(spec, AreaTowerSpec):
            behind = TensorFiles(weight_files(folder), open_files, last=PROJECTION, dtype=dtype)
            merger = read_area_merger(files, behind, spec)
        elif spec.row_eps is not None:
            first = "mlp.0.pre_norm.weight"
            behind = TensorFiles(weight_files(folder), open_files, last=first, dtype=dtype)
            merger = _row_normed_merger(files, behind, spec, spec.row_eps)
        elif spec.mean:
            last = f"{names.first}.weight"
            behind = TensorFiles(weight_files(folder), open_files, last=last, dtype=dtype)
            merger = MergerWeights(
                norms=(),
                first=behind.linear(behind.affine(names.first, spec.hidden, width)),
                second=behind.linear(behind.affine(names.second, spec.hidden, spec.hidden)),
                mean=True,
            )
        elif spec.projector is None:
            merger = _merger(files, "merger", spec, width)
        else:
            last = f"{PROJECTOR}linear_1.weight"
            behind = TensorFiles(weight_files(folder), open_files, last=last, dtype=dtype)
            merger = _projector(behind, spec, spec.projector)
        patch, frames = _patch(files, spec)
        return GridTowerWeights(
            patch=patch,
            frames=frames,
            positions=_positions(files, spec),
            norm_before=(
                _norm(files, names.norm_before, spec, width) if names.norm_before else None
            ),
            layers=tuple(_layer(files, names.layer.format(i), spec) for i in range(spec.layers)),
            merger=merger,
            tapped=tuple(_merger(files, name, spec, wide) for name in lists),
            early=None if spec.early_merge is None else _early_merger(files, spec),
        )


def _positions(files: TensorFiles, spec: GridTowerSpec) -> Tensor | None:
    """The learned positions, (side * side, C), or of columns and of rows, (2, places, C)."""
    name, side, width = spec.names.positions, spec.side, spec.width
    if isinstance(spec, AreaTowerSpec):
        return read_area_positions(files, spec)
    if spec.names.square:
        return files.read(name, side, side, width).flatten(0, 1)
    return files.read(name, side**2, width) if side else None


def _patch(
    files: TensorFiles, spec: GridTowerSpec
) -> tuple[Callable[[Tensor], Tensor], Linear | None]:
    """What embeds the patches of images, and those of videos, if there are any."""
    if isinstance(spec, AreaTowerSpec):
        return read_area_patches(files, spec), None
    name, edge, width = spec.names.patch, spec.patch, spec.width
    bias = files.read(f"{name}.bias", width) if spec.patch_bias else None
    if not spec.frames:
        weight = files.read(f"{name}.weight", width, 3, edge, edge)
        return files.linear(Affine(weight.flatten(1), bias)), None
    weight = files.read(f"{name}.weight", width, 3, spec.frames, edge, edge)
    by_frame = weight.transpose(1, 2).flatten(1)
    return (
        files.linear(Affine(weight.sum(dim=2).flatten(1), bias)),
        files.linear(Affine(by_frame, bias)),
    )


def _merger(files: TensorFiles, name: str, spec: GridTowerSpec, normed: int) -> MergerWeights:
    names, wide = spec.names, spec.width * spec.merge**2
    return MergerWeights(
        norms=(_norm(files, f"{name}.{names.norm_after}", spec, normed),),
        first=files.linear(files.affine(f"{name}.{names.first}", wide, wide)),
        second=files.linear(files.affine(f"{name}.{names.second}", spec.hidden, wide)),
    )


def _gated_merger(files: TensorFiles, spec: GridTowerSpec) -> MergerWeights:
    """GLM-4V's: a convolution of the patches of a token, and a feed-forward block with a gate."""
    hidden, edge, wide = spec.hidden, spec.merge, spec.gated_merger
    conv = files.read("downsample.weight", hidden, spec.width, edge, edge)
    gate, up = (files.affine(f"merger.{part}_proj", wide, hidden, bias=False) for part in _GATED)
    inner = files.affine("merger.post_projection_norm", hidden)
    return MergerWeights(
        norms=(_norm(files, "post_layernorm", spec, spec.width),),
        merge=files.linear(Affine(conv.flatten(1), files.read("downsample.bias", hidden))),
        first=files.linear(files.affine("merger.proj", hidden, hidden, bias=False)),
        inner=GridNorm(inner.weight, inner.bias, 1e-5),
        gate_up=files.linear(gate, up),
        second=files.linear(files.affine("merger.down_proj", hidden, wide, bias=False)),
    )


_GATED = ("gate", "up")


def _normed_projector(
    files: TensorFiles, behind: TensorFiles, spec: GridTowerSpec, eps: float
) -> MergerWeights:
    """PaddleOCR-VL's and Kimi K2.5's: the tower's norm, and the projector's, which is `behind`."""
    names, wide = spec.names, spec.width * spec.merge**2
    own = behind.affine("pre_norm", spec.width)
    return MergerWeights(
        norms=(
            _norm(files, names.norm_after, spec, spec.width),
            GridNorm(own.weight, own.bias, eps),
        ),
        first=behind.linear(behind.affine(names.first, wide, wide)),
        second=behind.linear(behind.affine(names.second, spec.hidden, wide)),
    )


def _row_normed_merger(
    files: TensorFiles, behind: TensorFiles, spec: GridTowerSpec, eps: float
) -> MergerWeights:
    """MiniCPM-V's: the norm of the tower, and one of the patches of a token as a row."""
    names, wide = spec.names, spec.width * spec.last_merge**2
    own = behind.affine("mlp.0.pre_norm", wide)
    return MergerWeights(
        norms=(_norm(files, names.norm_after, spec, spec.width),),
        row_norm=GridNorm(own.weight, own.bias, eps),
        first=behind.linear(behind.affine(f"mlp.0.{names.first}", wide, wide)),
        second=behind.linear(behind.affine(f"mlp.0.{names.second}", spec.hidden, wide)),
    )


def _early_merger(files: TensorFiles, spec: GridTowerSpec) -> EarlyMerger:
    names, width, patches = spec.names, spec.width, EARLY**2
    qkv = (files.affine(f"vit_merger.{part}", width, width) for part in names.qkv)
    wide = patches * spec.intermediate
    return EarlyMerger(
        heads=spec.heads,
        norm=_norm(files, f"vit_merger.{names.norm1}", spec, width),
        qkv=files.linear(*qkv),
        out=files.linear(files.affine(f"vit_merger.{names.out}", width, width)),
        row_norm=_norm(files, "vit_merger.pre_norm", spec, patches * width),
        first=files.linear(files.affine("vit_merger.linear_1", wide, patches * width)),
        second=files.linear(files.affine("vit_merger.linear_2", width, wide)),
    )


def _projector(files: TensorFiles, spec: GridTowerSpec, own: ProjectorSpec) -> MergerWeights:
    width, hidden, bias, merge = spec.width, spec.hidden, own.bias, None
    norms: tuple[GridNorm, ...] = ()
    if own.eps is not None:
        norms = (GridNorm(files.read(f"{PROJECTOR}norm.weight", width), None, own.eps),)
        name = f"{PROJECTOR}patch_merger.merging_layer.weight"
        merge = files.linear(Affine(files.read(name, width, width * spec.merge**2), None))
    return MergerWeights(
        norms=norms,
        first=files.linear(files.affine(f"{PROJECTOR}linear_1", hidden, width, bias=bias)),
        second=files.linear(files.affine(f"{PROJECTOR}linear_2", hidden, hidden, bias=bias)),
        merge=merge,
    )


def _layer(files: TensorFiles, name: str, spec: GridTowerSpec) -> TowerLayer:
    if isinstance(spec, AreaTowerSpec):
        return read_area_layer(files, name, spec)
    names, width, wide = spec.names, spec.width, spec.intermediate

    def affine(part: str, outputs: int, inputs: int) -> Affine:
        return files.affine(f"{name}.{part}", outputs, inputs, bias=spec.biases)

    def norm(part: str) -> Affine:
        return files.affine(f"{name}.{part}", width, bias=not spec.gated)

    each = 3 * width // len(names.qkv)
    qkv = [affine(part, each, width) for part in names.qkv]
    if names.pairs:
        query, key, value = _thirds(*qkv)
        qkv = [by_halves(query, spec.heads), by_halves(key, spec.heads), value]
    return TowerLayer(
        norm1=norm(names.norm1),
        qkv=files.linear(*qkv),
        out=files.linear(affine(names.out, width, width)),
        norm2=norm(names.norm2),
        up=files.linear(*(affine(part, wide, width) for part in names.up), halves=spec.gated),
        down=files.linear(affine(names.down, width, wide)),
    )


def _thirds(fused: Affine) -> list[Affine]:
    """Queries, keys and values, of one linear with biases."""
    assert fused.bias is not None, "as of all linears of such layers"
    parts = zip(fused.weight.chunk(3), fused.bias.chunk(3), strict=True)
    return [Affine(weight, bias) for weight, bias in parts]


def _norm(files: TensorFiles, name: str, spec: GridTowerSpec, width: int) -> GridNorm:
    bias = None if spec.gated else files.read(f"{name}.bias", width)
    return GridNorm(files.read(f"{name}.weight", width), bias, spec.eps)
