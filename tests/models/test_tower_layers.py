"""The layers of towers in one call, by single operations, and without the kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
import torch
from tests.kernels.rows import ISAS, using
from tests.support.llava import picture
from tests.support.qwen_vl import write_glm4v, write_qwen25_vl
from tests.support.towers import check_rows, embedding, opened
from torch import Tensor

from antiphon.encoder.linear import Affine, Linear
from antiphon.encoder.tower_layers import TowerLayer, TowerLayers
from antiphon.kernels.cpu import extension

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from antiphon.kernels.activation import ActivationKind

HEADS, SIZE, WIDE = 3, 20, 56
WIDTH = HEADS * SIZE
LAYERS = 3
WHOLE, WINDOWS = [130, 1, 33], [30, 100, 1, 16, 17]
"""Two divisions of the same tokens."""


@dataclass(frozen=True)
class Kind:
    """What towers differ in."""

    activation: ActivationKind
    rms: bool = False
    gated: bool = False
    qk_norms: bool = False
    turned: bool = False
    divisions: Sequence[int] | None = None
    taps: Sequence[int] = ()


KINDS = {
    "CLIP": Kind("quick_gelu"),
    "InternVL": Kind("gelu", qk_norms=True),
    "Qwen2.5-VL": Kind("silu", rms=True, gated=True, turned=True, divisions=(1, 0, 1)),
    "Qwen3-VL": Kind("gelu_tanh", turned=True, taps=(0, 2)),
}


class Layers:
    """Random layers of a kind, and the tokens of rows."""

    def __init__(self, kind: Kind, dtype: torch.dtype) -> None:
        self._draw = torch.Generator().manual_seed(3)
        self._kind, self._dtype = kind, dtype
        self.layers = TowerLayers(
            [self._layer() for _ in range(LAYERS)],
            heads=HEADS,
            activation=kind.activation,
            eps=1e-5,
            divisions=kind.divisions,
            taps=kind.taps,
        )
        self.x = self._random(sum(WHOLE), WIDTH)
        self.turns = None
        if kind.turned:
            angle = self._random(len(self.x), 1, SIZE // 2)
            cos, sin = angle.cos(), angle.sin()
            self.turns = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    def _random(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self._draw)

    def _norm(self) -> Affine:
        return Affine(self._random(WIDTH), None if self._kind.rms else self._random(WIDTH))

    def _linear(self, inputs: int, outputs: int, *, halves: bool = False) -> Linear:
        weight = self._random(outputs, inputs) * inputs**-0.5
        return Linear(Affine(weight, self._random(outputs)), dtype=self._dtype, halves=halves)

    def _layer(self) -> TowerLayer:
        gated = self._kind.gated
        layer = TowerLayer(
            norm1=self._norm(),
            qkv=self._linear(WIDTH, 3 * WIDTH),
            out=self._linear(WIDTH, WIDTH),
            norm2=self._norm(),
            up=self._linear(WIDTH, WIDE * (1 + gated), halves=gated),
            down=self._linear(WIDE, WIDTH),
        )
        if not self._kind.qk_norms:
            return layer
        return replace(layer, q_norm=self._random(WIDTH), k_norm=self._random(WIDTH))


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.mark.skipif(not ISAS, reason="the CPU's own kernels are not built")
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_call_has_the_bits_of_single_operations(
    isa: str, dtype: torch.dtype, kind: Kind
) -> None:
    with using(isa):
        made = Layers(kind, dtype)
        entered = made.x.clone()
        rows = (WHOLE, WINDOWS)
        found = made.layers(made.x, rows, made.turns)
        right = made.layers.by_layer(made.x, rows, made.turns)
    assert torch.equal(made.x, entered)
    assert torch.equal(found.last, right.last)
    assert len(found.tapped) == len(right.tapped) == len(kind.taps)
    for one, other in zip(found.tapped, right.tapped, strict=True):
        assert torch.equal(one, other)
    if 2 in kind.taps:
        assert torch.equal(found.tapped[-1], found.last)


@pytest.mark.skipif(not ISAS, reason="the CPU's own kernels are not built")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_has_its_bits_whatever_is_beside_it(dtype: torch.dtype) -> None:
    made = Layers(KINDS["CLIP"], dtype)
    together = made.layers(made.x, (WHOLE,)).last
    alone = [made.layers(row, ([len(row)],)).last for row in made.x.split(WHOLE)]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("write", [write_qwen25_vl, write_glm4v])
def test_torch_computes_the_same_without_the_kernels(
    write: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, data = write(tmp_path), picture(5, 70, 60)
    right = embedding(opened(folder), data)
    monkeypatch.setattr(extension, "unavailable_reason", lambda: "not built")
    check_rows(embedding(opened(folder), data), torch.as_tensor(right.copy()))
