"""All layers in one call give the bits of the single operations, one after the other."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from tests.kernels.rows import ISAS, using
from torch import Tensor

from antiphon.kernels.attention import AttentionRows, KvShape
from antiphon.kernels.cpu.linear import PackedWeight
from antiphon.kernels.cpu.stack import Scored, Stack, StackEnds, StackLayer
from antiphon.kernels.heads import HeadNorms
from antiphon.kernels.kv import LayerCache
from antiphon.kernels.op import Device
from antiphon.kernels.ops import Ops, select
from antiphon.kernels.rotary import AngleTable, Rotary, Turns

pytestmark = pytest.mark.skipif(not ISAS, reason="the CPU's own kernels are not built")

HIDDEN, HEADS, GROUP, SIZE, WIDTH = 40, 2, 3, 16, 56
PAGES_EACH, PAGE_TOKENS = 50, 4
EPS, SCALE = 1e-3, SIZE**-0.5
LAYERS = 3
SCAN_PART = 16384  # of a row of logits, looked through at once
VOCABULARY = SCAN_PART + 3600

PASSES = {
    "one decode": ([1], [30]),
    "three decodes": ([1, 1, 1], [0, 63, 100]),
    "decodes": ([1] * 20, [7 * row for row in range(20)]),
    "a prompt": ([33], [0]),
    "a chunk": ([70], [90]),
    "decodes beside a chunk": ([1, 1, 30, 1], [5, 64, 17, 3]),
}


@dataclass
class World:
    """Random layers, and a pass over rows whose earlier tokens are in the cache."""

    dtype: torch.dtype
    layers: list[StackLayer]
    caches: list[LayerCache]
    final_norm: Tensor
    rows: tuple[AttentionRows, AttentionRows]
    residual: Tensor
    turns: Turns

    def copied_caches(self) -> list[LayerCache]:
        return [
            replace(cache, keys=cache.keys.clone(), values=cache.values.clone())
            for cache in self.caches
        ]


def a_world(
    dtype: torch.dtype, query_len: list[int], prefix: list[int], *, head_norms: bool
) -> World:
    generator = torch.Generator().manual_seed(sum(query_len) + sum(prefix))

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    def linear(inputs: int, outputs: int, *, halves: bool = False):
        packed = PackedWeight(
            inputs, outputs, bias=True, dtype=dtype, format_="packed", halves=halves
        )
        packed.write(0, random(outputs, inputs) * inputs**-0.5)
        packed.write_bias(0, random(outputs))
        return packed.linear

    layers = [
        StackLayer(
            qkv=linear(HIDDEN, HEADS * (GROUP + 2) * SIZE),
            out=linear(HEADS * GROUP * SIZE, HIDDEN),
            gate_up=linear(HIDDEN, 2 * WIDTH, halves=True),
            down=linear(WIDTH, HIDDEN),
            attention_norm=random(HIDDEN),
            mlp_norm=random(HIDDEN),
            head_norms=HeadNorms(random(SIZE), random(SIZE), EPS) if head_norms else None,
        )
        for _ in range(LAYERS)
    ]
    query, kv = np.array(query_len, np.int32), np.add(query_len, prefix).astype(np.int32)
    pages = len(query) * PAGES_EACH
    table = np.random.default_rng(0).permutation(pages).astype(np.int32).reshape(len(query), -1)
    shapes = [KvShape(PAGE_TOKENS, HEADS, GROUP, SIZE, dtype, window) for window in (None, 9)]
    positions = np.concatenate([np.arange(b - a, b) for a, b in zip(query, kv, strict=True)])
    # Normed heads are rotated in part, the others whole.
    rotary = Rotary(SIZE // 2 if head_norms else SIZE, 50.0)
    angles = AngleTable(rotary, dtype)
    cache = (pages, PAGE_TOKENS, HEADS, SIZE)
    return World(
        dtype=dtype,
        layers=layers,
        caches=[LayerCache(i % 2, random(*cache), random(*cache)) for i in range(LAYERS)],
        final_norm=random(HIDDEN),
        rows=(
            AttentionRows(shapes[0], table, query, kv),
            AttentionRows(shapes[1], table, query, kv),
        ),
        residual=random(len(positions), HIDDEN),
        turns=angles.turns(positions.astype(np.int32)),
    )


def one_by_one(world: World, ops: Ops, caches: list[LayerCache]) -> Tensor:
    """The layers as the decoder runs them when they are not fused."""
    residual, pending = world.residual, None
    for layer, cache in zip(world.layers, caches, strict=True):
        if pending is None:
            normed = ops.rmsnorm(residual, layer.attention_norm, EPS)
        else:
            normed, residual = ops.add_rmsnorm(pending, residual, layer.attention_norm, EPS)
        heads = layer.qkv.multiply(normed).view(len(normed), -1, SIZE)
        rows = world.rows[cache.group]
        q = ops.ready_heads(
            heads,
            *world.turns.by_token,
            cache.keys,
            cache.values,
            rows.write_places,
            layer.head_norms,
            cache.scales,
        )
        mixed = ops.paged_attention(q, cache.keys, cache.values, rows, SCALE, cache.scales)
        attended = layer.out.multiply(mixed.flatten(1))
        normed, residual = ops.add_rmsnorm(attended, residual, layer.mlp_norm, EPS)
        pending = layer.down.multiply(ops.silu_mul(layer.gate_up.multiply(normed)))
    assert pending is not None
    return ops.add_rmsnorm(pending, residual, world.final_norm, EPS)[0]


def fused(world: World, caches: list[LayerCache]) -> tuple[Tensor, Tensor | None]:
    layers = zip(world.layers, caches, strict=True)
    stack = Stack(layers, final_norm=world.final_norm, eps=EPS, scale=SCALE)
    return stack(world.residual.clone(), world.turns, world.rows)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("head_norms", [False, True], ids=["", "normed heads"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("query_len", "prefix"), PASSES.values(), ids=PASSES.keys())
def test_a_stack_has_the_bits_of_its_operations(
    isa: str, dtype: torch.dtype, query_len: list[int], prefix: list[int], head_norms: bool
) -> None:
    world = a_world(dtype, query_len, prefix, head_norms=head_norms)
    with using(isa):
        ops = select(Device("cpu", dtype=dtype))
        apart, together = world.copied_caches(), world.copied_caches()
        expected = one_by_one(world, ops, apart)
        out, finite = fused(world, together)
    assert torch.equal(out, expected)
    assert finite is None
    for one, other in zip(apart, together, strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)


@dataclass
class Spoken:
    """A world with a table of embeddings and a head, and the ids of its pass."""

    world: World
    table: Tensor
    head: PackedWeight
    ids: np.ndarray

    @classmethod
    def of(cls, dtype: torch.dtype, query_len: list[int], prefix: list[int]) -> Spoken:
        world = a_world(dtype, query_len, prefix, head_norms=False)
        generator = torch.Generator().manual_seed(len(query_len))
        table = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype)
        head = PackedWeight(HIDDEN, VOCABULARY, bias=True, dtype=dtype, format_="packed")
        head.write(0, table)
        ids = np.random.default_rng(4).integers(0, VOCABULARY, len(world.residual))
        world.residual = table[torch.as_tensor(ids)]
        return cls(world, table, head, ids.astype(np.int32))

    def stack(self, *, tied: bool, caches: list[LayerCache]) -> Stack:
        world, head = self.world, self.head.linear
        return Stack(
            zip(world.layers, caches, strict=True),
            final_norm=world.final_norm,
            eps=EPS,
            scale=SCALE,
            ends=StackEnds(embedding=head if tied else self.table, head=head),
        )

    def score(self, wanted: list[int], *, tied: bool = True) -> Scored:
        stack = self.stack(tied=tied, caches=self.world.copied_caches())
        tokens = np.array(wanted, np.int32)
        return stack.score(self.ids, tokens, self.world.turns, self.world.rows)

    def likeliest(self, wanted: list[int], *, tied: bool = True) -> list[int]:
        found = self.score(wanted, tied=tied).likeliest
        assert found is not None
        return found.tolist()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("query_len", "prefix"), PASSES.values(), ids=PASSES.keys())
def test_logits_have_the_bits_of_their_operations(
    isa: str, dtype: torch.dtype, query_len: list[int], prefix: list[int], tied: bool
) -> None:
    spoken = Spoken.of(dtype, query_len, prefix)
    last = np.cumsum(query_len) - 1
    with using(isa):
        ops = select(Device("cpu", dtype=dtype))
        expected = one_by_one(spoken.world, ops, spoken.world.copied_caches())
        logits = spoken.head.linear.multiply_wide(expected[torch.as_tensor(last)])
        scored = spoken.score(last.tolist(), tied=tied)
    assert torch.equal(scored.hidden, expected)
    assert torch.equal(scored.logits, logits)
    assert scored.likeliest is not None
    assert scored.likeliest.tolist() == logits.argmax(dim=1).tolist()
    assert scored.finite is None
    assert scored.logits_finite is None


def test_of_equal_logits_the_first_is_likeliest() -> None:
    spoken = Spoken.of(torch.bfloat16, *PASSES["one decode"])
    spoken.head.write(0, torch.zeros(VOCABULARY, HIDDEN, dtype=torch.bfloat16))
    bias = torch.zeros(VOCABULARY)
    bias[[SCAN_PART - 1, SCAN_PART, VOCABULARY - 1]] = 3.0
    spoken.head.write_bias(0, bias)
    assert spoken.likeliest([0], tied=False) == [SCAN_PART - 1]
    bias[0] = 3.0
    spoken.head.write_bias(0, bias)
    assert spoken.likeliest([0], tied=False) == [0]


def said(flags: Tensor | None) -> list[bool]:
    assert flags is not None
    return flags.tolist()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_told_of_their_row(bad: float) -> None:
    spoken = Spoken.of(torch.bfloat16, *PASSES["three decodes"])
    good = spoken.score([0, 1, 2], tied=False)
    spoken.table[spoken.ids[1], 5] = bad
    scored = spoken.score([0, 1, 2], tied=False)
    assert said(scored.finite) == said(scored.logits_finite) == [True, False, True]
    assert torch.equal(scored.logits[[0, 2]], good.logits[[0, 2]])
    bias = torch.zeros(VOCABULARY)
    bias[SCAN_PART + 7] = bad
    spoken.head.write_bias(0, bias)
    assert said(spoken.score([0, 2], tied=False).logits_finite) == [False, False]


def test_logits_of_no_token_are_none() -> None:
    spoken = Spoken.of(torch.bfloat16, *PASSES["a chunk"])
    scored = spoken.score([])
    assert scored.logits.shape == (0, VOCABULARY)
    assert spoken.likeliest([]) == []
    assert torch.equal(scored.hidden, spoken.score([3]).hidden)


@pytest.mark.parametrize("wanted", [[-1], [33], [2, 2], [3, 1]])
def test_wanted_tokens_are_of_the_pass_and_rise(wanted: list[int]) -> None:
    with pytest.raises(IndexError, match="wanted"):
        Spoken.of(torch.bfloat16, *PASSES["a prompt"]).score(wanted)


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("token", [-1, VOCABULARY])
def test_tokens_beyond_the_vocabulary_are_refused(token: int, tied: bool) -> None:
    spoken = Spoken.of(torch.bfloat16, *PASSES["one decode"])
    spoken.ids[0] = token
    with pytest.raises(IndexError, match=f"token {token} of {VOCABULARY}"):
        spoken.score([0], tied=tied)


@pytest.mark.parametrize("threads", [2, 3, 5])
@pytest.mark.parametrize(("query_len", "prefix"), PASSES.values(), ids=PASSES.keys())
def test_more_threads_than_cores_change_nothing(
    threads: int, query_len: list[int], prefix: list[int]
) -> None:
    world = a_world(torch.bfloat16, query_len, prefix, head_norms=False)
    expected, _ = fused(world, world.copied_caches())
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(20):
            assert torch.equal(fused(world, world.copied_caches())[0], expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_token_that_is_not_finite_is_told_and_spoils_no_other_row(bad: float) -> None:
    world = a_world(torch.bfloat16, *PASSES["three decodes"], head_norms=False)
    expected, _ = fused(world, world.copied_caches())
    world.residual[1, 5] = bad
    out, finite = fused(world, world.copied_caches())
    assert finite is not None
    assert finite.tolist() == [True, False, True]
    assert torch.equal(out[[0, 2]], expected[[0, 2]])


def test_what_does_not_fit_together_is_refused() -> None:
    world = a_world(torch.bfloat16, *PASSES["a prompt"], head_norms=False)
    stack = Stack(
        zip(world.layers, world.caches, strict=True),
        final_norm=world.final_norm,
        eps=EPS,
        scale=SCALE,
    )
    with pytest.raises(RuntimeError, match="residual stream"):
        stack(world.residual.float(), world.turns, world.rows)
    with pytest.raises(RuntimeError, match="a position a token"):
        stack(world.residual[1:], world.turns, world.rows)
    with pytest.raises(RuntimeError, match="no rows of group 1"):
        stack(world.residual, world.turns, world.rows[:1])
    swapped = replace(world.layers[0], qkv=world.layers[0].down)
    with pytest.raises(RuntimeError, match="a linear of 56 to 40 where one of 40 to 40 belongs"):
        Stack([(swapped, world.caches[0])], final_norm=world.final_norm, eps=EPS, scale=SCALE)


def test_a_position_beyond_the_table_is_refused() -> None:
    world = a_world(torch.bfloat16, *PASSES["one decode"], head_norms=False)
    world.turns.positions[0] = 1024
    with pytest.raises(IndexError, match="position 1024 of 1024"):
        fused(world, world.copied_caches())
