"""The operation between the projections of a recurrent layer: all ways to compute it, any cut."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tests.kernels.rows import Row, each_row, threads
from torch import Tensor

from antiphon.kernels.recurrent import LayerStates, Recurrence, StateMetadata, recurrence

if TYPE_CHECKING:
    from collections.abc import Sequence


STATES = 24
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])


def random(*size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def ssd_layer(dtype: torch.dtype, columns: int = 64, rows: int = 128, **said) -> Recurrence:
    """Four heads in two groups."""
    fields = {"norm_part": 2 * columns, "norm_eps": 1e-5, "step_limits": (0.01, 3.0)} | said
    inputs = 8 * columns + 4 * rows + 4
    return Recurrence(
        kind="ssd",
        key_heads=2,
        heads=4,
        rows=rows,
        columns=columns,
        conv=random(4, 4 * columns + 4 * rows, seed=1).to(dtype) / 2,
        conv_bias=random(4 * columns + 4 * rows, seed=2).to(dtype),
        decay_log=random(4, seed=3),
        step_bias=random(4, seed=4),
        skip=random(4, seed=5),
        scales=(1 + random(inputs, seed=6) / 4).to(dtype),
        norm=random(4 * columns, seed=7).to(dtype),
        gate_first=True,
        **fields,
    )


def delta_layer(dtype: torch.dtype, columns: int = 64, rows: int = 128) -> Recurrence:
    """Four value heads on two key heads."""
    return Recurrence(
        kind="gated_delta",
        key_heads=2,
        heads=4,
        rows=rows,
        columns=columns,
        conv=random(4, 4 * columns + 4 * rows, seed=1).to(dtype) / 2,
        conv_bias=None,
        decay_log=random(4, seed=3),
        step_bias=random(4, seed=4),
        norm=random(columns, seed=7).to(dtype),
        norm_part=columns,
        norm_eps=1e-6,
    )


LAYERS = {
    "ssd": ssd_layer,
    "ssd, odd": lambda dtype: ssd_layer(dtype, columns=7, rows=5),
    "ssd, a vector and a number": lambda dtype: ssd_layer(dtype, columns=17, rows=33),
    "ssd, without a norm": lambda dtype: replace(
        ssd_layer(dtype, columns=20, rows=16), norm=None, scales=None
    ),
    "ssd, gated behind the norm": lambda dtype: replace(
        ssd_layer(dtype, columns=32, rows=16), gate_first=False, norm_part=128
    ),
    "gated delta": delta_layer,
    "gated delta, odd": lambda dtype: delta_layer(dtype, columns=3, rows=5),
    "gated delta, three vectors": lambda dtype: delta_layer(dtype, columns=48, rows=30),
}
KINDS = pytest.mark.parametrize("kind", list(LAYERS))


def states_of(layer: Recurrence) -> LayerStates:
    """States of NaN: what is read and was not written is seen."""
    taps, channels = layer.conv.shape
    return LayerStates(
        0,
        torch.full((STATES, taps - 1, channels), torch.nan, dtype=layer.conv.dtype),
        torch.full((STATES, layer.heads, layer.rows, layer.columns), torch.nan),
    )


def projected(layer: Recurrence, tokens: int, seed: int = 9) -> Tensor:
    rates = layer.heads * (1 if layer.kind == "ssd" else 2)
    inputs = layer.width + layer.channels + rates
    return random(tokens, inputs, seed=seed).to(layer.conv.dtype)


def rows_of(
    reads: Sequence[int], writes: Sequence[Sequence[int]], lengths: Sequence[int], ends: object
) -> StateMetadata:
    return StateMetadata(
        reads=np.array(reads, np.int32),
        writes=np.array(writes, np.int32),
        query_len=np.array(lengths, np.int32),
        kv_len=np.array(ends, np.int32),
    )


def in_cuts(row: Row, layer: Recurrence, x: Tensor, cuts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """A sequence in so many tokens at a time: its outputs, and the last state."""
    states, outs, begin, read = states_of(layer), list[Tensor](), 0, -1
    for place, count in enumerate(cuts):
        end = begin + count
        rows = rows_of([read], [[place]], [count], [end])
        outs.append(row(x[begin:end], layer, states, rows))
        begin, read = end, place
    return torch.cat(outs), states.recurrent_states[read]


@each_row(recurrence)
@KINDS
@DTYPES
def test_rows_side_by_side_equal_the_reference(row: Row, kind: str, dtype: torch.dtype) -> None:
    layer = LAYERS[kind](dtype)
    x, known = projected(layer, 90), states_of(layer)
    known.conv_states[5] = random(*known.conv_states[5].shape, seed=1).to(dtype)
    known.recurrent_states[5] = random(*known.recurrent_states[5].shape, seed=2)
    # A prompt, a decode, the rest of a prompt, and drafts of which each leaves a state.
    lengths, ends = [70, 1, 17, 2], [70, 40, 30, 12]
    rows = rows_of([-1, 5, 5, 5], [[0, -1], [1, -1], [2, -1], [3, 4]], lengths, ends)
    results: list[tuple[Tensor, Tensor, Tensor]] = []
    for compute in (row, recurrence.reference):
        states = LayerStates(0, known.conv_states.clone(), known.recurrent_states.clone())
        out = compute(x, layer, states, rows)
        results.append((out, states.conv_states[:5], states.recurrent_states[:5]))
        assert states.recurrent_states[6:].isnan().all(), "no other state is written"
        assert torch.equal(states.recurrent_states[5], known.recurrent_states[5])
    (got, got_conv, got_states), (want, want_conv, want_states) = results
    assert torch.equal(got_conv, want_conv)
    close = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got_states, want_states, rtol=close, atol=close)
    torch.testing.assert_close(got, want, rtol=close, atol=close)


@each_row(recurrence, invariant=True)
@KINDS
@DTYPES
def test_a_token_has_the_same_bits_in_any_cut(row: Row, kind: str, dtype: torch.dtype) -> None:
    layer = LAYERS[kind](dtype)
    x = projected(layer, 70)
    whole, state = in_cuts(row, layer, x, [70])
    for cuts in ([1, 1, 5, 63], [64, 6], [69, 1], [3] * 20 + [10]):
        cut, other = in_cuts(row, layer, x, cuts)
        assert torch.equal(cut, whole)
        assert torch.equal(other, state)


@each_row(recurrence, invariant=True)
@KINDS
def test_a_row_has_the_same_bits_beside_others(row: Row, kind: str) -> None:
    layer = LAYERS[kind](torch.bfloat16)
    x, others = projected(layer, 9), projected(layer, 40, seed=4)
    alone, state = in_cuts(row, layer, x, [9])
    states = states_of(layer)
    rows = rows_of([-1] * 3, [[0], [1], [2]], [30, 9, 10], [30, 9, 10])
    with threads(2):
        beside = row(torch.cat((others[:30], x, others[30:])), layer, states, rows)
    assert torch.equal(beside[30:39], alone)
    assert torch.equal(states.recurrent_states[1], state)


@each_row(recurrence, invariant=True)
@KINDS
def test_drafts_leave_the_state_of_each_of_their_tokens(row: Row, kind: str) -> None:
    layer = LAYERS[kind](torch.float32)
    x, states = projected(layer, 5), states_of(layer)
    together = row(x, layer, states, rows_of([-1], [[7, 3, 9, 1, 5]], [5], [5]))
    one_by_one, _ = in_cuts(row, layer, x, [1] * 5)
    assert torch.equal(together, one_by_one)
    for count, place in enumerate((7, 3, 9, 1, 5), start=1):
        _, state = in_cuts(row, layer, x[:count], [count])
        assert torch.equal(states.recurrent_states[place], state)


@each_row(recurrence, invariant=True)
@pytest.mark.parametrize(
    ("reads", "writes", "message"),
    [
        ([0, 1], [[2], [STATES]], f"a row has state {STATES} of {STATES}"),
        ([0, STATES], [[2], [3]], f"a row has state {STATES} of {STATES}"),
        ([0, 1], [[2], [-1]], "row 1 of 2 tokens leaves 0 states"),
        ([0, 1], [[2, -1, -1], [3, 4, 5]], "row 1 of 2 tokens leaves 3 states"),
    ],
)
def test_states_that_do_not_exist_are_refused(row: Row, reads, writes, message: str) -> None:
    layer = delta_layer(torch.float32, columns=4, rows=4)
    rows = rows_of(reads, writes, [1, 2], [5, 6])
    with pytest.raises(RuntimeError, match=message):
        row(projected(layer, 3), layer, states_of(layer), rows)
