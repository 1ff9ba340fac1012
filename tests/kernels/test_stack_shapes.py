"""Layers of other shapes than Llama's in one call: the bits of their operations.

Norms in any place, parallel blocks, multipliers, RoPE and scales that differ between layers, and
ends that scale, add positions or cap.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tests.kernels.rows import ISAS, threads, using
from tests.kernels.test_stack import (
    EPS,
    GROUP,
    HEADS,
    HIDDEN,
    PASSES,
    SCALE,
    SIZE,
    WIDTH,
    World,
    a_world,
)
from torch import Tensor

from antiphon.kernels.cpu.fused_decoder import (
    BlockNorms,
    EmbeddingAndHead,
    FusedDecoder,
    FusedDecoderLayer,
)
from antiphon.kernels.cpu.linear import PackedWeight
from antiphon.kernels.norm import NormKind, NormWeights
from antiphon.kernels.op import DeviceCapability
from antiphon.kernels.ops import Ops, select
from antiphon.kernels.rotary import CosSinCache, QkNormWeights, RotarySpec, Temperature, TokenCosSin

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from antiphon.kernels.activation import ActivationKind
    from antiphon.kernels.kv import LayerKvCache

pytestmark = pytest.mark.skipif(not ISAS, reason="the CPU's own kernels are not built")


@dataclass(frozen=True)
class Shape:
    """The shape of all layers of a stack."""

    norm: NormKind = "rms"
    attention: tuple[str, ...] = ("before",)
    mlp: tuple[str, ...] = ("before",)
    parallel: bool = False
    multiplier: float = 1.0
    activation: ActivationKind = "silu"
    head_norms: tuple[NormKind, str] | None = None
    softcap: float | None = None
    sinks: bool = False
    temperature: Temperature | None = None
    rotaries: tuple[RotarySpec | None, ...] = (RotarySpec(SIZE, 50.0),)
    experts: bool = False
    final: bool = True


SHAPES = {
    "sandwich norms": Shape(
        norm="rms_wide",
        attention=("before", "after"),
        mlp=("before", "after"),
        activation="gelu_tanh",
        head_norms=("rms_wide", "head"),
        rotaries=(RotarySpec(SIZE, 50.0), RotarySpec(SIZE, 9.0)),
    ),
    "norms of outputs": Shape(
        norm="rms_wide", attention=("after",), mlp=("after",), head_norms=("rms_wide", "token")
    ),
    "norms of outputs with experts": Shape(attention=("after",), mlp=("after",), experts=True),
    "norms of sums": Shape(norm="layer", attention=("of_sum",), mlp=("of_sum",), final=False),
    "norms of sums and a final one": Shape(norm="layer", attention=("of_sum",), mlp=("of_sum",)),
    "norms of sums and before": Shape(attention=("before", "of_sum"), mlp=("before", "of_sum")),
    "no norm before attention": Shape(norm="layer", attention=()),
    "parallel with one norm": Shape(
        norm="layer", mlp=(), parallel=True, head_norms=("layer", "head")
    ),
    "parallel with two norms": Shape(norm="layer", parallel=True),
    "parallel with all": Shape(
        attention=("before", "after"), mlp=("before", "after"), parallel=True, multiplier=0.3
    ),
    "parallel experts": Shape(parallel=True, experts=True, head_norms=("rms", "token")),
    "capped scores": Shape(softcap=2.5),
    "sinks": Shape(sinks=True),
    "temperatures": Shape(rotaries=(None,), temperature=Temperature(floor=9, scale=0.3)),
    "temperatures before norms and RoPE": Shape(
        head_norms=("layer", "head"), temperature=Temperature(floor=9, scale=0.3)
    ),
    "a multiplier": Shape(multiplier=0.22),
    "some layers without RoPE": Shape(rotaries=(None, RotarySpec(SIZE // 2, 50.0))),
}


@dataclass
class Stacked:
    """A world whose layers have a shape, with what it needs of a pass."""

    world: World
    shape: Shape
    final_norm: NormWeights | None
    turns: list[TokenCosSin]

    @classmethod
    def of(cls, shape: Shape, dtype: torch.dtype, passed: tuple[list[int], list[int]]) -> Stacked:
        world = a_world(dtype, *passed, head_norms=False, experts=shape.experts)
        generator = torch.Generator().manual_seed(7)

        def weights(size: int, kind: NormKind) -> NormWeights:
            weight = 1.0 + 0.3 * torch.randn(size, generator=generator)
            bias = torch.randn(size, generator=generator).to(dtype) if kind == "layer" else None
            return NormWeights(weight if kind == "rms_wide" else weight.to(dtype), bias)

        def norms(places: Sequence[str]) -> BlockNorms:
            return BlockNorms(**{place: weights(HIDDEN, shape.norm) for place in places})

        def head_norms() -> QkNormWeights | None:
            if shape.head_norms is None:
                return None
            kind, over = shape.head_norms
            whole = over == "token"
            query = weights(SIZE * (HEADS * GROUP if whole else 1), kind)
            key = weights(SIZE * (HEADS if whole else 1), kind)
            return QkNormWeights(query, key, EPS / 2, kind, "token" if whole else "head")

        world.layers = [
            replace(
                layer,
                activation=shape.activation,
                attention_norms=norms(shape.attention),
                mlp_norms=norms(shape.mlp),
                parallel=shape.parallel,
                multiplier=shape.multiplier,
                head_norms=head_norms(),
                scale=SCALE * (1 + index / 4),
                softcap=shape.softcap,
                sinks=torch.randn(HEADS * GROUP, generator=generator).to(dtype)
                if shape.sinks
                else None,
                rotary=index % len(shape.rotaries),
            )
            for index, layer in enumerate(world.layers)
        ]
        positions = world.turns.positions
        assert isinstance(positions, np.ndarray), "positions of the host"
        turns = [
            replace(
                CosSinCache(each, dtype, temperature=shape.temperature).at_positions(
                    positions + 16
                ),
                positions=positions,
            )
            for each in shape.rotaries
        ]
        final = weights(HIDDEN, shape.norm) if shape.final else None
        return cls(world, shape, final, turns)

    def fused(
        self,
        caches: list[LayerKvCache],
        ends: EmbeddingAndHead | None = None,
        aux_layers: tuple[int, ...] = (),
    ) -> FusedDecoder:
        return FusedDecoder(
            zip(self.world.layers, caches, strict=True),
            hidden=HIDDEN,
            dtype=self.world.dtype,
            final_norm=self.final_norm,
            eps=EPS,
            norm=self.shape.norm,
            ends=ends,
            aux_layers=aux_layers,
        )

    def run(self, caches: list[LayerKvCache]) -> tuple[Tensor, Tensor | None]:
        world = self.world
        hidden, finite, aux = self.fused(caches)(world.residual.clone(), self.turns, world.rows)
        assert aux is None
        return hidden, finite

    def one_by_one(self, ops: Ops, caches: list[LayerKvCache]) -> Tensor:
        """The layers as the decoder runs them when they are not fused."""
        return self.streams(ops, caches)[-1]

    def streams(self, ops: Ops, caches: list[LayerKvCache]) -> list[Tensor]:
        """The streams that enter the layers, and the last one, normalised."""
        stream, entering = self.world.residual, list[Tensor]()
        for layer, cache in zip(self.world.layers, caches, strict=True):
            entering.append(stream)
            attended = self._left(
                ops, layer, layer.attention_norms, self._attended(ops, layer, cache, stream)
            )
            if layer.parallel:
                own = layer.mlp_norms.before or layer.attention_norms.before
                made = self._fed_forward(ops, layer, self._normed(ops, own, stream))
                stream = stream + (attended + self._left(ops, layer, layer.mlp_norms, made))
                continue
            stream = self._normed(ops, layer.attention_norms.of_sum, stream + attended)
            read = self._normed(ops, layer.mlp_norms.before, stream)
            made = self._fed_forward(ops, layer, read)
            stream = stream + self._left(ops, layer, layer.mlp_norms, made)
            stream = self._normed(ops, layer.mlp_norms.of_sum, stream)
        return [*entering, self._normed(ops, self.final_norm, stream)]

    def _normed(self, ops: Ops, norm: NormWeights | None, x: Tensor) -> Tensor:
        if norm is None:
            return x
        match self.shape.norm:
            case "rms":
                return ops.rmsnorm(x, norm.weight, EPS)
            case "rms_wide":
                return ops.rmsnorm_wide(x, norm.weight, EPS)
            case "layer":
                return ops.layernorm(x, norm.weight, norm.bias, EPS)

    def _left(
        self, ops: Ops, layer: FusedDecoderLayer, norms: BlockNorms, output: Tensor
    ) -> Tensor:
        return self._normed(ops, norms.after, output) * layer.multiplier

    def _attended(
        self, ops: Ops, layer: FusedDecoderLayer, cache: LayerKvCache, stream: Tensor
    ) -> Tensor:
        assert layer.qkv is not None
        assert layer.out is not None
        heads = layer.qkv.multiply(self._normed(ops, layer.attention_norms.before, stream))
        rows, pages = self.world.rows[cache.group], (cache.keys, cache.values)
        angles, heads = self.turns[layer.rotary], heads.view(len(heads), -1, SIZE)
        turns = angles.by_token
        if angles.query_scale is not None:
            factors = angles.query_scale[torch.as_tensor(angles.positions)].view(-1, 1, 1)
            queries, others = heads.split((HEADS * GROUP, 2 * HEADS), dim=1)
            heads = torch.cat(((queries * factors).to(heads.dtype), others), dim=1)
        norms = layer.head_norms
        q = ops.qk_norm_rope_store(heads, *turns, *pages, rows.slot_mapping, norms, cache.scales)
        shaped = layer.softcap, layer.sinks
        mixed = ops.paged_attention(q, *pages, rows, layer.scale, cache.scales, *shaped)
        return layer.out.multiply(mixed.flatten(1))

    def _fed_forward(self, ops: Ops, layer: FusedDecoderLayer, x: Tensor) -> Tensor:
        if layer.experts is not None:
            return layer.experts.forward(x)
        assert layer.gate_up is not None
        assert layer.down is not None
        return layer.down.multiply(ops.gate(layer.gate_up.multiply(x), layer.activation))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_a_stack_has_the_bits_of_its_operations(isa: str, dtype: torch.dtype, shape: Shape) -> None:
    with using(isa):
        ops = select(DeviceCapability("cpu", dtype=dtype))
        for passed in PASSES.values():
            stacked = Stacked.of(shape, dtype, passed)
            apart, together = stacked.world.copied_caches(), stacked.world.copied_caches()
            expected = stacked.one_by_one(ops, apart)
            out, finite = stacked.run(together)
            assert torch.equal(out, expected)
            assert finite is None
            for one, other in zip(apart, together, strict=True):
                assert torch.equal(one.keys, other.keys)
                assert torch.equal(one.values, other.values)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_the_streams_that_enter_auxiliary_layers_are_kept(isa: str, shape: Shape) -> None:
    dtype = torch.bfloat16
    with using(isa):
        ops = select(DeviceCapability("cpu", dtype=dtype))
        for passed in PASSES.values():
            stacked = Stacked.of(shape, dtype, passed)
            world = stacked.world
            streams = stacked.streams(ops, world.copied_caches())
            for aux_layers in ((1,), (0, 2), (0, 1, 2)):
                stack = stacked.fused(world.copied_caches(), aux_layers=aux_layers)
                hidden, _, aux = stack(world.residual.clone(), stacked.turns, world.rows)
                assert aux is not None
                assert torch.equal(aux, torch.cat([streams[layer] for layer in aux_layers], dim=-1))
                assert torch.equal(hidden, streams[-1])


@pytest.mark.parametrize("aux_layers", [(3,), (-1,), (2, 1), (1, 1)])
def test_auxiliary_layers_are_layers_in_their_order(aux_layers: tuple[int, ...]) -> None:
    stacked = Stacked.of(next(iter(SHAPES.values())), torch.bfloat16, PASSES["one decode"])
    with pytest.raises(RuntimeError, match="auxiliary layers are layers, ascending"):
        stacked.fused(stacked.world.copied_caches(), aux_layers=aux_layers)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_more_threads_than_cores_change_nothing(shape: Shape) -> None:
    for name in ("three decodes", "a chunk"):
        stacked = Stacked.of(shape, torch.bfloat16, PASSES[name])
        expected, _ = stacked.run(stacked.world.copied_caches())
        with threads(3):
            for _ in range(10):
                out, _ = stacked.run(stacked.world.copied_caches())
                assert torch.equal(out, expected)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_a_token_that_is_not_finite_is_flagged_and_spoils_no_other_row(shape: Shape) -> None:
    stacked = Stacked.of(shape, torch.bfloat16, PASSES["three decodes"])
    expected, _ = stacked.run(stacked.world.copied_caches())
    stacked.world.residual[1, 5] = torch.nan
    out, finite = stacked.run(stacked.world.copied_caches())
    assert finite is not None
    assert finite.tolist() == [True, False, True]
    assert torch.equal(out[[0, 2]], expected[[0, 2]])


ENDS: dict[str, Callable[..., EmbeddingAndHead]] = {
    "scaled": partial(EmbeddingAndHead, embedding_scale=6.25, logits_scale=0.125),
    "capped": partial(EmbeddingAndHead, logits_scale=2.0, softcap=3.0),
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("learned", [False, True], ids=["", "learned positions"])
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS.keys())
def test_ends_have_the_bits_of_their_operations(
    isa: str, dtype: torch.dtype, ends: Callable[..., EmbeddingAndHead], tied: bool, learned: bool
) -> None:
    vocabulary = 20_000
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(vocabulary, HIDDEN, generator=generator).to(dtype)
    head = PackedWeight(HIDDEN, vocabulary, bias=False, dtype=dtype, format_="packed")
    head.write(0, table)
    positions = torch.randn(300, HIDDEN, generator=generator).to(dtype) if learned else None
    with using(isa):
        ops = select(DeviceCapability("cpu", dtype=dtype))
        for name in ("three decodes", "decodes beside a chunk"):
            stacked = Stacked.of(SHAPES["sandwich norms"], dtype, PASSES[name])
            world, whole = (
                stacked.world,
                ends(
                    embedding=head.linear if tied else table, head=head.linear, positions=positions
                ),
            )
            ids = np.random.default_rng(4).integers(0, vocabulary, len(world.residual))
            residual = table[torch.as_tensor(ids)] * whole.embedding_scale
            if positions is not None:
                residual = residual + positions[torch.as_tensor(world.turns.positions).long()]
            world.residual = residual
            hidden = stacked.one_by_one(ops, world.copied_caches())
            last = np.cumsum(PASSES[name][0]) - 1
            logits = head.linear.multiply_wide(hidden[torch.as_tensor(last)])
            logits = logits * whole.logits_scale
            if whole.softcap is not None:
                logits = ops.soft_capped(logits, whole.softcap)
            stack = stacked.fused(world.copied_caches(), whole)
            scored = stack.score(
                ids.astype(np.int32), last.astype(np.int32), stacked.turns, world.rows
            )
            assert torch.equal(scored.hidden, hidden)
            assert torch.equal(scored.logits, logits)
            assert scored.argmax is not None
            assert scored.argmax.tolist() == logits.argmax(dim=1).tolist()


def test_a_position_that_was_not_learned_is_refused() -> None:
    stacked = Stacked.of(SHAPES["a multiplier"], torch.float32, PASSES["one decode"])
    weight = PackedWeight(HIDDEN, WIDTH, bias=False, dtype=torch.float32, format_="packed")
    weight.write(0, torch.zeros(WIDTH, HIDDEN))
    ends = EmbeddingAndHead(weight.linear, weight.linear, positions=torch.zeros(30, HIDDEN))
    stack = stacked.fused(stacked.world.copied_caches(), ends)
    ids = np.zeros(1, np.int32)
    with pytest.raises(IndexError, match="position 30 of 30"):
        stack.score(ids, ids, stacked.turns, stacked.world.rows)
