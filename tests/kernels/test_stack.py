"""All layers in one call give the bits of the single operations, one after the other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tests.kernels.rows import ISAS, threads, using
from torch import Tensor

from antiphon.kernels.attention import AttentionMetadata, KvShape
from antiphon.kernels.cpu.experts import PackedExperts
from antiphon.kernels.cpu.fused_decoder import (
    BlockNorms,
    EmbeddingAndHead,
    FusedDecoder,
    FusedDecoderLayer,
    FusedDecoderOutput,
)
from antiphon.kernels.cpu.linear import PackedWeight
from antiphon.kernels.kv import LayerKvCache, as_bytes, key_pages_shape, value_pages_shape
from antiphon.kernels.norm import NormWeights
from antiphon.kernels.op import DeviceCapability
from antiphon.kernels.ops import Ops, select
from antiphon.kernels.rotary import CosSinCache, QkNormWeights, RotarySpec, TokenCosSin
from antiphon.kernels.routing import RoutingSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from antiphon.kernels.cpu.experts import CompiledExperts
    from antiphon.kernels.cpu.linear import CompiledLinear

pytestmark = pytest.mark.skipif(not ISAS, reason="the CPU's own kernels are not built")

HIDDEN, HEADS, GROUP, SIZE, WIDTH = 40, 2, 3, 16, 56
EXPERTS, CHOSEN, EXPERT_WIDTH = 6, 3, 24
PAGES_EACH, PAGE_TOKENS = 270, 4
EPS, SCALE = 1e-3, SIZE**-0.5
LAYERS = 3
SIZE_MOST = 2**31 - 1
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
    layers: list[FusedDecoderLayer]
    caches: list[LayerKvCache]
    final_norm: Tensor
    rows: tuple[AttentionMetadata, AttentionMetadata]
    residual: Tensor
    turns: TokenCosSin

    def copied_caches(self) -> list[LayerKvCache]:
        return [
            replace(cache, keys=cache.keys.clone(), values=cache.values.clone())
            for cache in self.caches
        ]


def a_world(
    dtype: torch.dtype,
    query_len: list[int],
    prefix: list[int],
    *,
    head_norms: bool,
    experts: bool = False,
) -> World:
    """With `experts` all layers but the second have them, each layer more than the one before.

    Weights and caches are those of all worlds of such a pass; what else there is may be changed.
    """
    world = _drawn(dtype, tuple(query_len), tuple(prefix), head_norms=head_norms, experts=experts)
    positions = world.turns.positions
    assert isinstance(positions, np.ndarray), "positions of the host"
    return replace(
        world,
        layers=[*world.layers],
        caches=[*world.caches],
        residual=world.residual.clone(),
        turns=replace(world.turns, positions=positions.copy()),
    )


@lru_cache(maxsize=16)  # instruction sets take turns, and shapes
def _drawn(
    dtype: torch.dtype,
    query_len: tuple[int, ...],
    prefix: tuple[int, ...],
    *,
    head_norms: bool,
    experts: bool,
) -> World:
    generator = torch.Generator().manual_seed(sum(query_len) + sum(prefix))

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    def linear(
        inputs: int, outputs: int, *, halves: bool = False, of: torch.dtype = dtype
    ) -> CompiledLinear:
        packed = PackedWeight(inputs, outputs, bias=True, dtype=of, format_="packed", halves=halves)
        packed.write(0, random(outputs, inputs).to(of) * inputs**-0.5)
        packed.write_bias(0, random(outputs))
        return packed.linear

    def mixture(count: int) -> CompiledExperts:
        return PackedExperts(
            routing=RoutingSpec(top_k=CHOSEN, renormalised=True),
            router=linear(HIDDEN, count, of=torch.float32),
            correction=None,
            gate_up=[linear(HIDDEN, 2 * EXPERT_WIDTH, halves=True) for _ in range(count)],
            down=[linear(EXPERT_WIDTH, HIDDEN) for _ in range(count)],
            first=0,
            activation="silu",
            shared=(linear(HIDDEN, 2 * WIDTH, halves=True), linear(WIDTH, HIDDEN)),
            shared_gate=linear(HIDDEN, 1) if count % 2 else None,
        ).compile()

    layers = [
        FusedDecoderLayer(
            qkv=linear(HIDDEN, HEADS * (GROUP + 2) * SIZE),
            out=linear(HEADS * GROUP * SIZE, HIDDEN),
            gate_up=linear(HIDDEN, 2 * WIDTH, halves=True),
            down=linear(WIDTH, HIDDEN),
            activation="silu",
            attention_norms=BlockNorms(NormWeights(random(HIDDEN))),
            mlp_norms=BlockNorms(NormWeights(random(HIDDEN))),
            head_norms=QkNormWeights(NormWeights(random(SIZE)), NormWeights(random(SIZE)), EPS)
            if head_norms
            else None,
            scale=SCALE,
        )
        for _ in range(LAYERS)
    ]
    if experts:
        layers = [
            layer
            if index == 1
            else replace(layer, gate_up=None, down=None, experts=mixture(EXPERTS + index))
            for index, layer in enumerate(layers)
        ]
    query, kv = np.array(query_len, np.int32), np.add(query_len, prefix).astype(np.int32)
    pages = len(query) * PAGES_EACH
    table = np.random.default_rng(0).permutation(pages).astype(np.int32).reshape(len(query), -1)
    shapes = [KvShape(PAGE_TOKENS, HEADS, GROUP, SIZE, dtype, window) for window in (None, 9)]
    positions = np.concatenate([np.arange(b - a, b) for a, b in zip(query, kv, strict=True)])
    positions = positions.astype(np.int32)
    # Normed heads are rotated in part, the others whole.
    rotary = RotarySpec(SIZE // 2 if head_norms else SIZE, 50.0)
    angles = CosSinCache(rotary, dtype)
    page = (pages, PAGE_TOKENS, HEADS, SIZE, dtype)
    keys, values = key_pages_shape(*page), value_pages_shape(*page)
    return World(
        dtype=dtype,
        layers=layers,
        caches=[LayerKvCache(i % 2, random(*keys), random(*values)) for i in range(LAYERS)],
        final_norm=random(HIDDEN),
        rows=(
            AttentionMetadata(shapes[0], table, query, kv),
            AttentionMetadata(shapes[1], table, query, kv),
        ),
        residual=random(len(positions), HIDDEN),
        # Rows may go on from here.
        turns=replace(angles.at_positions(positions + 16), positions=positions),
    )


def one_by_one(world: World, ops: Ops, caches: list[LayerKvCache]) -> Tensor:
    """The layers as the decoder runs them when they are not fused."""
    residual, pending = world.residual, None
    for layer, cache in zip(world.layers, caches, strict=True):
        attention_norm, mlp_norm = layer.attention_norms.before, layer.mlp_norms.before
        assert attention_norm is not None
        assert mlp_norm is not None
        if pending is None:
            normed = ops.rmsnorm(residual, attention_norm.weight, EPS)
        else:
            normed, residual = ops.add_rmsnorm(pending, residual, attention_norm.weight, EPS)
        assert layer.qkv is not None
        assert layer.out is not None
        heads = layer.qkv.multiply(normed).view(len(normed), -1, SIZE)
        rows = world.rows[cache.group]
        q = ops.qk_norm_rope_store(
            heads,
            *world.turns.by_token,
            cache.keys,
            cache.values,
            rows.slot_mapping,
            layer.head_norms,
            cache.scales,
        )
        mixed = ops.paged_attention(q, cache.keys, cache.values, rows, SCALE, cache.scales)
        attended = layer.out.multiply(mixed.flatten(1))
        normed, residual = ops.add_rmsnorm(attended, residual, mlp_norm.weight, EPS)
        pending = fed_forward(layer, ops, normed)
    assert pending is not None
    return ops.add_rmsnorm(pending, residual, world.final_norm, EPS)[0]


def fed_forward(layer: FusedDecoderLayer, ops: Ops, normed: Tensor) -> Tensor:
    if layer.experts is not None:
        return layer.experts.forward(normed)
    assert layer.gate_up is not None
    assert layer.down is not None
    return layer.down.multiply(ops.silu_mul(layer.gate_up.multiply(normed)))


def fused(world: World, caches: list[LayerKvCache]) -> tuple[Tensor, Tensor | None]:
    layers = zip(world.layers, caches, strict=True)
    hidden, finite, _ = decoder_of(world, layers)(world.residual.clone(), [world.turns], world.rows)
    return hidden, finite


def decoder_of(
    world: World,
    layers: Iterable[tuple[FusedDecoderLayer, LayerKvCache]],
    ends: EmbeddingAndHead | None = None,
) -> FusedDecoder:
    return FusedDecoder(
        layers,
        hidden=HIDDEN,
        dtype=world.dtype,
        final_norm=NormWeights(world.final_norm),
        eps=EPS,
        ends=ends,
        aux_layers=() if ends is None else (1, 2),
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("head_norms", [False, True], ids=["", "normed heads"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("query_len", "prefix"), PASSES.values(), ids=PASSES.keys())
def test_a_stack_has_the_bits_of_its_operations(
    isa: str, dtype: torch.dtype, query_len: list[int], prefix: list[int], head_norms: bool
) -> None:
    world = a_world(dtype, query_len, prefix, head_norms=head_norms)
    assert_has_the_bits_of_its_operations(world, isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("query_len", "prefix"), PASSES.values(), ids=PASSES.keys())
def test_a_stack_with_experts_has_the_bits_of_its_operations(
    isa: str, dtype: torch.dtype, query_len: list[int], prefix: list[int]
) -> None:
    world = a_world(dtype, query_len, prefix, head_norms=False, experts=True)
    assert_has_the_bits_of_its_operations(world, isa)


def assert_has_the_bits_of_its_operations(world: World, isa: str) -> None:
    with using(isa):
        ops = select(DeviceCapability("cpu", dtype=world.dtype))
        apart, together = world.copied_caches(), world.copied_caches()
        expected = one_by_one(world, ops, apart)
        out, finite = fused(world, together)
    assert torch.equal(out, expected)
    assert finite is None
    for one, other in zip(apart, together, strict=True):
        assert torch.equal(as_bytes(one.keys), as_bytes(other.keys))
        assert torch.equal(as_bytes(one.values), as_bytes(other.values))


@dataclass
class TextModel:
    """A world with a table of embeddings and a head, and the ids of its pass."""

    world: World
    table: Tensor
    head: PackedWeight
    ids: np.ndarray

    @classmethod
    def of(cls, dtype: torch.dtype, query_len: list[int], prefix: list[int]) -> TextModel:
        world = a_world(dtype, query_len, prefix, head_norms=False)
        generator = torch.Generator().manual_seed(len(query_len))
        table = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype)
        head = PackedWeight(HIDDEN, VOCABULARY, bias=True, dtype=dtype, format_="packed")
        head.write(0, table)
        ids = np.random.default_rng(4).integers(0, VOCABULARY, len(world.residual))
        world.residual = table[torch.as_tensor(ids)]
        return cls(world, table, head, ids.astype(np.int32))

    def stack(self, *, tied: bool, caches: list[LayerKvCache]) -> FusedDecoder:
        world, head = self.world, self.head.linear
        ends = EmbeddingAndHead(embedding=head if tied else self.table, head=head)
        return decoder_of(world, zip(world.layers, caches, strict=True), ends)

    def score(self, wanted: list[int], *, tied: bool = True) -> FusedDecoderOutput:
        stack = self.stack(tied=tied, caches=self.world.copied_caches())
        tokens = np.array(wanted, np.int32)
        return stack.score(self.ids, tokens, [self.world.turns], self.world.rows)

    def likeliest(self, wanted: list[int], *, tied: bool = True) -> list[int]:
        found = self.score(wanted, tied=tied).argmax
        assert found is not None
        return found.tolist()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("query_len", "prefix"), PASSES.values(), ids=PASSES.keys())
def test_logits_have_the_bits_of_their_operations(
    isa: str, dtype: torch.dtype, query_len: list[int], prefix: list[int], tied: bool
) -> None:
    text_model = TextModel.of(dtype, query_len, prefix)
    last = np.cumsum(query_len) - 1
    with using(isa):
        ops = select(DeviceCapability("cpu", dtype=dtype))
        expected = one_by_one(text_model.world, ops, text_model.world.copied_caches())
        logits = text_model.head.linear.multiply_wide(expected[torch.as_tensor(last)])
        scored = text_model.score(last.tolist(), tied=tied)
    assert torch.equal(scored.hidden, expected)
    assert torch.equal(scored.logits, logits)
    assert scored.argmax is not None
    assert scored.argmax.tolist() == logits.argmax(dim=1).tolist()
    assert scored.finite is None
    assert scored.logits_finite is None


def test_of_equal_logits_the_first_is_likeliest() -> None:
    text_model = TextModel.of(torch.bfloat16, *PASSES["one decode"])
    text_model.head.write(0, torch.zeros(VOCABULARY, HIDDEN, dtype=torch.bfloat16))
    bias = torch.zeros(VOCABULARY)
    bias[[SCAN_PART - 1, SCAN_PART, VOCABULARY - 1]] = 3.0
    text_model.head.write_bias(0, bias)
    assert text_model.likeliest([0], tied=False) == [SCAN_PART - 1]
    bias[0] = 3.0
    text_model.head.write_bias(0, bias)
    assert text_model.likeliest([0], tied=False) == [0]


def said(flags: Tensor | None) -> list[bool]:
    assert flags is not None
    return flags.tolist()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_flagged_by_row(bad: float) -> None:
    text_model = TextModel.of(torch.bfloat16, *PASSES["three decodes"])
    good = text_model.score([0, 1, 2], tied=False)
    text_model.table[text_model.ids[1], 5] = bad
    scored = text_model.score([0, 1, 2], tied=False)
    assert said(scored.finite) == said(scored.logits_finite) == [True, False, True]
    assert torch.equal(scored.logits[[0, 2]], good.logits[[0, 2]])
    bias = torch.zeros(VOCABULARY)
    bias[SCAN_PART + 7] = bad
    text_model.head.write_bias(0, bias)
    assert said(text_model.score([0, 2], tied=False).logits_finite) == [False, False]


def test_logits_of_no_token_are_none() -> None:
    text_model = TextModel.of(torch.bfloat16, *PASSES["a chunk"])
    scored = text_model.score([])
    assert scored.logits.shape == (0, VOCABULARY)
    assert text_model.likeliest([]) == []
    assert torch.equal(scored.hidden, text_model.score([3]).hidden)


@pytest.mark.parametrize("wanted", [[-1], [33], [2, 2], [3, 1]])
def test_wanted_tokens_are_of_the_pass_and_rise(wanted: list[int]) -> None:
    with pytest.raises(IndexError, match="logit indices"):
        TextModel.of(torch.bfloat16, *PASSES["a prompt"]).score(wanted)


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("token", [-1, VOCABULARY])
def test_tokens_beyond_the_vocabulary_are_refused(token: int, tied: bool) -> None:
    text_model = TextModel.of(torch.bfloat16, *PASSES["one decode"])
    text_model.ids[0] = token
    with pytest.raises(IndexError, match=f"token {token} of {VOCABULARY}"):
        text_model.score([0], tied=tied)


@pytest.mark.parametrize("number", [2, 3, 5])
@pytest.mark.parametrize(("query_len", "prefix"), PASSES.values(), ids=PASSES.keys())
def test_more_threads_than_cores_change_nothing(
    number: int, query_len: list[int], prefix: list[int]
) -> None:
    world = a_world(torch.bfloat16, query_len, prefix, head_norms=False, experts=True)
    expected, _ = fused(world, world.copied_caches())
    with threads(number):
        for _ in range(20):
            assert torch.equal(fused(world, world.copied_caches())[0], expected)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_token_that_is_not_finite_is_flagged_and_spoils_no_other_row(bad: float) -> None:
    world = a_world(torch.bfloat16, *PASSES["three decodes"], head_norms=False)
    expected, _ = fused(world, world.copied_caches())
    world.residual[1, 5] = bad
    out, finite = fused(world, world.copied_caches())
    assert finite is not None
    assert finite.tolist() == [True, False, True]
    assert torch.equal(out[[0, 2]], expected[[0, 2]])


@dataclass
class Walk:
    """Rows that decode step by step; their tables grow with them, and lose what no query sees."""

    text_model: TextModel
    step: int = 0

    @classmethod
    def of(cls, rows: int, dtype: torch.dtype = torch.bfloat16) -> Walk:
        return cls(TextModel.of(dtype, [1] * rows, [7 * row for row in range(rows)]))

    def stack(self) -> FusedDecoder:
        return self.text_model.stack(tied=False, caches=self.text_model.world.copied_caches())

    @property
    def ids(self) -> np.ndarray:
        generator = np.random.default_rng(self.step)
        return generator.integers(0, VOCABULARY, len(self.text_model.ids)).astype(np.int32)

    @property
    def rows(self) -> list[AttentionMetadata]:
        return [self._grown(rows) for rows in self.text_model.world.rows]

    @property
    def tables(self) -> tuple[np.ndarray, ...]:
        return tuple(rows.page_table for rows in self.rows)

    def score(
        self, stack: FusedDecoder, wanted: list[int] | None = None, *, bare: bool = False
    ) -> FusedDecoderOutput:
        positions = self.rows[0].kv_len - 1
        chosen = np.arange(len(self.ids)) if wanted is None else np.array(wanted)
        turns = replace(self.text_model.world.turns, positions=positions)
        return stack.score(self.ids, chosen.astype(np.int32), [turns], self.rows, argmax_only=bare)

    def again(self, stack: FusedDecoder, *, bare: bool = False) -> FusedDecoderOutput | None:
        return stack.decode_next(self.ids, self.tables, bare)

    def begun(self) -> FusedDecoder:
        """A stack that has run a step, with the next one at hand."""
        stack = self.stack()
        self.score(stack)
        self.step += 1
        return stack

    def _grown(self, rows: AttentionMetadata) -> AttentionMetadata:
        kv = (rows.kv_len + self.step).astype(np.int32)
        first = np.maximum(kv - (rows.shape.window or SIZE_MOST), 0) // PAGE_TOKENS
        last = (kv - 1) // PAGE_TOKENS
        page = np.arange(last.max() + 1)
        seen = (first[:, None] <= page) & (page <= last[:, None])
        table = np.where(seen, rows.page_table[:, : len(page)], -1)
        return AttentionMetadata(rows.shape, table, rows.query_len, kv)


def same(one: FusedDecoderOutput | None, other: FusedDecoderOutput) -> bool:
    assert one is not None
    assert one.argmax is not None
    assert other.argmax is not None
    assert one.aux is not None
    assert other.aux is not None
    return (
        torch.equal(one.hidden, other.hidden)
        and torch.equal(one.aux, other.aux)
        and torch.equal(one.logits, other.logits)
        and one.argmax.tolist() == other.argmax.tolist()
        and one.finite is other.finite is one.logits_finite is other.logits_finite is None
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_a_pass_that_goes_on_has_the_bits_of_one_made_anew(rows: int, dtype: torch.dtype) -> None:
    walk = Walk.of(rows, dtype)
    going, anew = walk.stack(), walk.stack()
    assert same(walk.score(going), walk.score(anew))
    for walk.step in range(1, 3 * PAGE_TOKENS):
        assert same(walk.again(going), walk.score(anew))
    walk.step += 1
    assert same(walk.score(going), walk.score(anew))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("before", [507, 1019])
def test_a_pass_that_goes_on_into_a_segment_has_the_bits_of_one_made_anew(
    isa: str, before: int
) -> None:
    """Long rows are shared out by segments of 512 keys, the first of which a window leaves."""
    with using(isa):
        walk = Walk(TextModel.of(torch.bfloat16, [1, 1], [before, 100]))
        going, anew = walk.stack(), walk.stack()
        assert same(walk.score(going), walk.score(anew))
        for walk.step in range(1, 17):
            assert same(walk.again(going), walk.score(anew))


def test_rows_that_are_not_finite_are_flagged_by_a_pass_that_goes_on() -> None:
    walk = Walk.of(3)
    stack = walk.begun()
    walk.text_model.table[walk.ids[1], 5] = torch.nan
    scored = walk.again(stack)
    assert scored is not None
    assert said(scored.finite) == said(scored.logits_finite) == [True, False, True]


def test_the_result_of_a_pass_stays_as_it_was_while_it_is_held() -> None:
    walk = Walk.of(3)
    stack = walk.begun()
    first = walk.again(stack)
    assert first is not None
    row, array = first.logits[1], first.hidden.view(torch.int16).numpy()
    kept = first.hidden.clone(), first.logits.clone()
    walk.step += 1
    second = walk.again(stack)
    assert second is not None
    assert torch.equal(first.hidden, kept[0])
    assert torch.equal(first.logits, kept[1])
    del first  # a view and an array hold its memory still
    for walk.step in range(3, 6):
        walk.again(stack)
    assert torch.equal(row, kept[1][1])
    assert torch.equal(torch.from_numpy(array).view(torch.bfloat16), kept[0])


@pytest.mark.parametrize("going", [False, True], ids=["anew", "going on"])
def test_a_bare_result_is_the_likeliest_alone_where_all_is_finite(going: bool) -> None:
    walk = Walk.of(3)
    stack = walk.begun()
    full = walk.score(stack)
    for bad in (False, True):
        if bad:
            walk.text_model.table[walk.ids[1], 5] = torch.nan
        walk.step = 0
        stack = walk.begun()
        bare = walk.again(stack, bare=True) if going else walk.score(stack, bare=True)
        assert bare is not None
        if not bad:
            assert bare[:4] == (None, None, None, None)
            assert bare.aux is not None
            assert bare.argmax is not None
            assert bare.argmax.tolist() == full.logits.argmax(dim=1).tolist()
    assert said(bare.finite) == said(bare.logits_finite) == [True, False, True]
    assert torch.equal(bare.logits[[0, 2]], full.logits[[0, 2]])
    assert torch.equal(bare.hidden[[0, 2]], full.hidden[[0, 2]])


def test_memory_that_is_no_longer_held_is_used_again() -> None:
    walk = Walk.of(3)
    stack = walk.begun()
    places: set[tuple[int, int]] = set()
    for walk.step in range(1, 5):
        scored = walk.again(stack)
        assert scored is not None
        places.add((scored.hidden.data_ptr(), scored.logits.data_ptr()))
        del scored
    assert len(places) == 1


def test_a_stack_goes_on_only_from_decodes_with_all_logits() -> None:
    walk = Walk.of(3)
    stack = walk.stack()
    assert walk.again(stack) is None
    walk.score(stack, [0, 2])
    walk.step += 1
    assert walk.again(stack) is None
    prompt = TextModel.of(torch.bfloat16, *PASSES["a prompt"])
    stack = prompt.stack(tied=False, caches=prompt.world.copied_caches())
    stack.score(prompt.ids, np.array([32], np.int32), [prompt.world.turns], prompt.world.rows)
    assert (
        stack.decode_next(prompt.ids, tuple(rows.page_table for rows in prompt.world.rows)) is None
    )


def test_a_stack_goes_on_only_from_the_pass_before() -> None:
    walk = Walk.of(3)
    stack, world = walk.begun(), walk.text_model.world
    stack(world.residual.clone(), [world.turns], world.rows)
    assert walk.again(stack) is None


def test_a_stack_goes_on_with_as_many_rows() -> None:
    walk = Walk.of(3)
    stack = walk.begun()
    assert stack.decode_next(walk.ids[:2], tuple(table[:2] for table in walk.tables)) is None
    assert walk.again(stack) is not None


def test_a_stack_goes_on_as_far_as_its_angles_are_known() -> None:
    walk = Walk.of(1)
    world = walk.text_model.world
    world.turns = replace(world.turns, cos=world.turns.cos[:2], sin=world.turns.sin[:2])
    stack = walk.begun()
    assert walk.again(stack) is not None
    walk.step += 1
    assert walk.again(stack) is None


def with_page(page: int) -> Callable[[tuple[np.ndarray, ...]], tuple[np.ndarray, ...]]:
    def spoil(tables: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        tables[1][2, -1] = page
        return tables

    return spoil


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (with_page(-1), "row 2 reads or writes a token that has no page"),
        (with_page(3 * PAGES_EACH), f"a row has page {3 * PAGES_EACH} of {3 * PAGES_EACH}"),
        (lambda tables: (tables[0], tables[1][:, :-1].copy()), "row 2 .* has no page"),
        (lambda tables: (tables[0], tables[1][:2]), "a table a row"),
        (lambda tables: tables[:1], "a table a cache group"),
    ],
    ids=["no page", "a page beyond", "too narrow", "too few rows", "too few groups"],
)
def test_tables_that_do_not_fit_are_refused_and_end_the_walk(spoil, reason: str) -> None:
    walk = Walk.of(3)
    stack = walk.begun()
    with pytest.raises(RuntimeError, match=reason):
        stack.decode_next(walk.ids, spoil(walk.tables))
    assert walk.again(stack) is None
    other = walk.stack()
    walk.step = 0
    walk.score(other)
    walk.step = 1
    assert same(walk.score(stack), walk.score(other))


@pytest.mark.parametrize("token", [-1, VOCABULARY])
def test_a_pass_that_goes_on_refuses_tokens_beyond_the_vocabulary(token: int) -> None:
    walk = Walk.of(3)
    stack = walk.begun()
    ids = walk.ids
    ids[1] = token
    with pytest.raises(IndexError, match=f"token {token} of {VOCABULARY}"):
        stack.decode_next(ids, walk.tables)
    assert walk.again(stack) is None


def test_what_does_not_fit_together_is_refused() -> None:
    world = a_world(torch.bfloat16, *PASSES["a prompt"], head_norms=False)
    stack = decoder_of(world, zip(world.layers, world.caches, strict=True))
    with pytest.raises(RuntimeError, match="residual stream"):
        stack(world.residual.float(), [world.turns], world.rows)
    with pytest.raises(RuntimeError, match="a position a token"):
        stack(world.residual[1:], [world.turns], world.rows)
    with pytest.raises(RuntimeError, match="no rows of group 1"):
        stack(world.residual, [world.turns], world.rows[:1])
    world.layers[0] = replace(world.layers[0], qkv=world.layers[0].down)
    with pytest.raises(RuntimeError, match="a linear of 56 to 40 where one of 40 to 40 belongs"):
        fused(world, world.caches)


def test_a_position_beyond_the_table_is_refused() -> None:
    world = a_world(torch.bfloat16, *PASSES["one decode"], head_norms=False)
    world.turns.positions[0] = 1024
    with pytest.raises(IndexError, match="position 1024 of 1024"):
        fused(world, world.copied_caches())
