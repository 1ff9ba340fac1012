"""Layers with layer norms and plain blocks in one call, causal or both ways: the same bits."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tests.kernels.rows import ISAS, using
from torch import Tensor

from antiphon.kernels.attention import AttentionMetadata, KvShape, TextRows
from antiphon.kernels.cpu.fused_decoder import (
    BlockNorms,
    FusedDecoder,
    FusedDecoderLayer,
    UncachedHeads,
)
from antiphon.kernels.cpu.linear import PackedWeight
from antiphon.kernels.cpu.ops import PASS_PAGE_TOKENS
from antiphon.kernels.kv import LayerKvCache, key_pages_shape, value_pages_shape
from antiphon.kernels.norm import NormWeights
from antiphon.kernels.op import DeviceCapability
from antiphon.kernels.ops import Ops, select
from antiphon.kernels.rotary import CosSinCache

if TYPE_CHECKING:
    from antiphon.kernels.activation import ActivationKind

pytestmark = pytest.mark.skipif(not ISAS, reason="the CPU's own kernels are not built")

HIDDEN, HEADS, GROUP, SIZE, WIDTH, LAYERS = 40, 2, 3, 16, 56, 3
EPS, SCALE = 1e-3, SIZE**-0.5
LENGTHS = np.array([1, 30, 130, 17], np.int32)
WINDOW = 9


class World:
    """Random layers, the last of which has a window, and texts to run through them."""

    def __init__(self, dtype: torch.dtype, *, bidirectional: bool, biases: bool) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self.dtype, self.bidirectional = dtype, bidirectional
        norms = [self._norm(biases) for _ in range(2 * LAYERS + 1)]
        self.layers = [
            FusedDecoderLayer(
                qkv=self._linear(HIDDEN, HEADS * (GROUP + 2) * SIZE),
                out=self._linear(HEADS * GROUP * SIZE, HIDDEN),
                gate_up=self._linear(HIDDEN, WIDTH),
                down=self._linear(WIDTH, HIDDEN),
                activation="gelu",
                attention_norms=BlockNorms(norms[2 * index]),
                mlp_norms=BlockNorms(norms[2 * index + 1]),
                head_norms=None,
                scale=SCALE,
            )
            for index in range(LAYERS)
        ]
        self.final_norm = norms[-1]
        self.groups = [
            AttentionMetadata.of_texts(
                KvShape(
                    PASS_PAGE_TOKENS, HEADS, GROUP, SIZE, dtype, window, bidirectional=bidirectional
                ),
                LENGTHS,
            )
            for window in (None, WINDOW)
        ]
        positions = np.concatenate([np.arange(length) for length in LENGTHS]).astype(np.int32)
        self.turns = CosSinCache(None, dtype).at_positions(positions)
        self.residual = self._random(len(positions), HIDDEN)
        pages = 1 + int(self.groups[0].page_table.max())
        page = (pages, PASS_PAGE_TOKENS, HEADS, SIZE, dtype)
        self.keys = torch.zeros(key_pages_shape(*page), dtype=dtype)
        self.values = torch.zeros(value_pages_shape(*page), dtype=dtype)

    def group(self, layer: int) -> int:
        return int(layer == LAYERS - 1)

    def _random(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self._generator).to(self.dtype)

    def _norm(self, biases: bool) -> NormWeights:
        return NormWeights(self._random(HIDDEN), self._random(HIDDEN) if biases else None)

    def _linear(self, inputs: int, outputs: int):
        packed = PackedWeight(inputs, outputs, bias=True, dtype=self.dtype, format_="packed")
        packed.write(0, self._random(outputs, inputs) * inputs**-0.5)
        packed.write_bias(0, self._random(outputs))
        return packed.linear

    def fused(
        self, *, post_norms: bool, activation: ActivationKind
    ) -> tuple[Tensor, Tensor | None]:
        def placed(norms: BlockNorms) -> BlockNorms:
            return BlockNorms(of_sum=norms.before) if post_norms else norms

        layers = [
            replace(
                layer,
                activation=activation,
                attention_norms=placed(layer.attention_norms),
                mlp_norms=placed(layer.mlp_norms),
            )
            for layer in self.layers
        ]
        stack = FusedDecoder(
            [(layer, self._cache_of(index)) for index, layer in enumerate(layers)],
            hidden=HIDDEN,
            dtype=self.dtype,
            final_norm=None if post_norms else self.final_norm,
            eps=EPS,
            norm="layer",
        )
        hidden, finite, _ = stack(self.residual.clone(), [self.turns], self.groups)
        return hidden, finite

    def _cache_of(self, index: int) -> LayerKvCache | UncachedHeads:
        if self.bidirectional:
            return UncachedHeads(self.group(index), HEADS, SIZE)
        return LayerKvCache(self.group(index), self.keys.clone(), self.values.clone())

    def apart(self, ops: Ops, *, post_norms: bool, activation: ActivationKind) -> Tensor:
        """The layers as the decoder runs them when they are not fused."""
        stream = self.residual
        for index, layer in enumerate(self.layers):
            attention_norm, mlp_norm = layer.attention_norms.before, layer.mlp_norms.before
            assert attention_norm is not None
            assert mlp_norm is not None

            def normed(norm: NormWeights, x: Tensor) -> Tensor:
                return ops.layernorm(x, *norm, EPS)

            assert layer.qkv is not None
            assert layer.out is not None
            entered = stream if post_norms else normed(attention_norm, stream)
            stream = stream + layer.out.multiply(
                self._mixed(ops, index, layer.qkv.multiply(entered))
            )
            if post_norms:
                stream = normed(attention_norm, stream)
            entered = stream if post_norms else normed(mlp_norm, stream)
            assert layer.gate_up is not None, "a layer of experts"
            assert layer.down is not None, "a layer of experts"
            wide = ops.activate(layer.gate_up.multiply(entered), activation)
            stream = stream + layer.down.multiply(wide)
            if post_norms:
                stream = normed(mlp_norm, stream)
        return stream if post_norms else ops.layernorm(stream, *self.final_norm, EPS)

    def _mixed(self, ops: Ops, index: int, heads: Tensor) -> Tensor:
        rows = self.groups[self.group(index)]
        heads = heads.view(len(heads), -1, SIZE)
        if self.bidirectional:
            q, k, v = heads.split((HEADS * GROUP, HEADS, HEADS), dim=1)
            texts = TextRows(LENGTHS.tolist())
            mixed = ops.bidirectional_attention(q, k, v, texts, SCALE, rows.shape.window)
        else:
            keys, values = self.keys.clone(), self.values.clone()
            turns = self.turns.by_token
            q = ops.qk_norm_rope_store(heads, *turns, keys, values, rows.slot_mapping, None)
            mixed = ops.paged_attention(q, keys, values, rows, SCALE)
        return mixed.flatten(1)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bidirectional", [False, True], ids=["causal", "both ways"])
def test_a_stack_has_the_bits_of_its_operations(
    isa: str, dtype: torch.dtype, bidirectional: bool
) -> None:
    kinds: tuple[ActivationKind, ...] = ("gelu", "relu_squared")
    with using(isa):
        ops = select(DeviceCapability("cpu", dtype=dtype))
        for biases, post_norms, kind in product((False, True), (False, True), kinds):
            world = World(dtype, bidirectional=bidirectional, biases=biases)
            out, finite = world.fused(post_norms=post_norms, activation=kind)
            assert torch.equal(out, world.apart(ops, post_norms=post_norms, activation=kind))
            assert finite is None


def test_a_token_that_is_not_finite_spoils_its_own_text_only() -> None:
    world = World(torch.bfloat16, bidirectional=True, biases=True)
    alone, _ = world.fused(post_norms=True, activation="gelu")
    world.residual[5] = torch.inf  # of the second text
    out, finite = world.fused(post_norms=True, activation="gelu")
    assert finite is not None
    assert not finite[1:31].any()
    others = torch.cat((torch.arange(1), torch.arange(31, len(out))))
    assert finite[others].all()
    assert torch.equal(out[others], alone[others])
