"""Recurrences against the token by token form in float64, however their rows are cut and mixed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.rows import Row, each_row
from torch import Tensor

from antiphon.kernels.norm import finite_rows, gated_rmsnorm
from antiphon.kernels.recurrent import (
    CHUNK_TOKENS,
    NORM_EPS,
    SPAN_TOKENS,
    StateMetadata,
    causal_conv,
    gated_delta,
    ssd,
)
from antiphon.kernels.sampling import argmax

Compute = Callable[[StateMetadata, Tensor, Tensor], Tensor]
"""Rows, which tokens of all sequences they are, and the states  ->  what comes out of them."""


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


class Conv:
    """Six channels, four taps."""

    state_shape = (3, 6)

    def __init__(self, tokens: int) -> None:
        self.x, self.weight, self.bias = random(tokens, 6), random(6, 4, seed=1), random(6, seed=2)

    def __call__(self, rows: StateMetadata, tokens: Tensor, states: Tensor) -> Tensor:
        return causal_conv(self.x[tokens], self.weight.t(), self.bias, states, rows)

    def slowly(self, tokens: Tensor) -> Tensor:
        x = torch.cat((torch.zeros(3, 6), self.x[tokens])).double()
        out = torch.zeros(len(tokens), 6, dtype=torch.float64)
        for t in range(len(tokens)):
            for tap in range(4):
                out[t] += x[t + tap] * self.weight[:, tap]
            out[t] += self.bias
        return out * torch.sigmoid(out)


class Ssd:
    """Six heads of four channels in two groups, and a state of five numbers a channel."""

    state_shape = (6, 5, 4)

    def __init__(self, tokens: int) -> None:
        self.x, self.b, self.c = random(tokens, 6, 4), random(tokens, 2, 5), random(tokens, 2, 5)
        self.dt = torch.nn.functional.softplus(random(tokens, 6, seed=3))
        self.a = -torch.exp(random(6, seed=4))
        self.d = random(6, seed=5)

    def __call__(self, rows: StateMetadata, tokens: Tensor, states: Tensor) -> Tensor:
        x, dt, b, c = (each[tokens] for each in (self.x, self.dt, self.b, self.c))
        return ssd(x, dt, self.a, b, c, self.d, states, rows)

    def slowly(self, tokens: Tensor) -> Tensor:
        x, dt, b, c = (each[tokens].double() for each in (self.x, self.dt, self.b, self.c))
        state = torch.zeros(self.state_shape, dtype=torch.float64)
        out = torch.zeros_like(x)
        for t in range(len(tokens)):
            for head in range(6):
                group = head // 3
                state[head] *= torch.exp(dt[t, head] * self.a[head])
                state[head] += dt[t, head] * torch.outer(b[t, group], x[t, head])
                out[t, head] = c[t, group] @ state[head] + self.d[head] * x[t, head]
        return out


class Delta:
    """Four value heads of three numbers on two key heads of five."""

    state_shape = (4, 5, 3)

    def __init__(self, tokens: int) -> None:
        self.q, self.k = random(tokens, 2, 5), random(tokens, 2, 5, seed=1)
        self.v = random(tokens, 4, 3, seed=2)
        self.decay = -torch.exp(random(tokens, 4, seed=3) - 1)
        self.beta = torch.sigmoid(random(tokens, 4, seed=4))

    def __call__(self, rows: StateMetadata, tokens: Tensor, states: Tensor) -> Tensor:
        q, k, v = self.q[tokens], self.k[tokens], self.v[tokens]
        decay, beta = self.decay[tokens], self.beta[tokens]
        return gated_delta(q, k, v, decay, beta, states, rows)

    def slowly(self, tokens: Tensor) -> Tensor:
        parts = (self.q, self.k, self.v, self.decay, self.beta)
        q, k, v, decay, beta = (each[tokens].double() for each in parts)
        state = torch.zeros(self.state_shape, dtype=torch.float64)
        out = torch.zeros_like(v)
        for t in range(len(tokens)):
            for head in range(4):
                key, query = (
                    x[t, head // 2] / math.sqrt(float(x[t, head // 2].square().sum()) + NORM_EPS)
                    for x in (k, q)
                )
                state[head] *= torch.exp(decay[t, head])
                missing = v[t, head] - state[head].T @ key
                state[head] += torch.outer(key, beta[t, head] * missing)
                out[t, head] = state[head].T @ query / math.sqrt(5)
        return out


KINDS = pytest.mark.parametrize("kind", [Conv, Ssd, Delta])


class Sequences:
    """Several sequences that are computed in passes; the place of each pass's state is drawn."""

    def __init__(self, kind: type[Conv | Ssd | Delta], lengths: Sequence[int], seed: int) -> None:
        self.op = kind(sum(lengths))
        self.starts = [sum(lengths[:i]) for i in range(len(lengths))]
        self.lengths = lengths
        self.done = [0] * len(lengths)
        self.places = [-1] * len(lengths)
        self.random = np.random.default_rng(seed)
        self.states = torch.full((4 * len(lengths), *kind.state_shape), torch.nan)
        self.out: list[list[Tensor]] = [[] for _ in lengths]

    def step(self, counts: Sequence[int]) -> None:
        """Compute the next `counts` tokens of each sequence, in an order of its own."""
        order = [i for i in self.random.permutation(len(counts)).tolist() if counts[i]]
        free = sorted(set(range(len(self.states))) - set(self.places))
        writes = self.random.permutation(free)[: len(order)].tolist()
        kept = self.states.clone()
        tokens: list[int] = []
        for i in order:
            first = self.starts[i] + self.done[i]
            tokens += range(first, first + counts[i])
            self.done[i] += counts[i]
        rows = StateMetadata(
            reads=np.array([self.places[i] for i in order], np.int32),
            writes=np.array(writes, np.int32)[:, np.newaxis],
            query_len=np.array([counts[i] for i in order], np.int32),
            kv_len=np.array([self.done[i] for i in order], np.int32),
        )
        given = torch.tensor(tokens)
        out = self.op(rows, given, self.states)
        again = self.op(rows, given, self.states)
        assert torch.equal(out, again), "a pass that is run again gives the same"
        untouched = [i for i in range(len(kept)) if i not in writes]
        assert torch.equal(kept[untouched].nan_to_num(), self.states[untouched].nan_to_num())
        for i, write, part in zip(
            order, writes, out.split([counts[i] for i in order]), strict=True
        ):
            self.places[i] = write
            self.out[i].append(part)

    def check(self) -> None:
        for start, done, parts in zip(self.starts, self.done, self.out, strict=True):
            want = self.op.slowly(torch.arange(start, start + done))
            got = torch.cat(parts)
            torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-5 * float(want.std()))


@KINDS
@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=4),
    cuts=st.lists(st.lists(st.sampled_from([0, 1, 1, 7, 64, 150]), min_size=4, max_size=4)),
    seed=st.integers(0, 99),
)
def test_any_cut_of_any_mixture_equals_the_recurrence(kind, lengths, cuts, seed) -> None:
    sequences = Sequences(kind, lengths, seed)
    for counts in [*cuts[:6], [150] * 4]:
        left = [n - d for d, n in zip(sequences.done, lengths, strict=True)]
        fitting = [min(count, most) for count, most in zip(counts, left, strict=False)]
        if any(fitting):
            sequences.step(fitting)
    sequences.check()


@KINDS
def test_a_run_of_more_than_a_span_goes_on_where_the_span_ends(kind) -> None:
    sequences = Sequences(kind, [SPAN_TOKENS + 90], 0)
    sequences.step([20])
    sequences.step([SPAN_TOKENS + 70])
    sequences.check()


@pytest.mark.parametrize("kind", [Ssd, Delta])
def test_cuts_where_chunks_end_change_next_to_nothing(kind) -> None:
    cuts = (CHUNK_TOKENS, 2 * CHUNK_TOKENS, CHUNK_TOKENS + 9)
    whole, cut = (Sequences(kind, [sum(cuts)], 0) for _ in range(2))
    whole.step([sum(cuts)])
    for count in cuts:
        cut.step([count])
    expected = whole.out[0][0]
    atol = 1e-6 * float(expected.std())
    torch.testing.assert_close(torch.cat(cut.out[0]), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("kind", [Ssd, Delta])
def test_a_long_quiet_stretch_neither_grows_nor_breaks(kind) -> None:
    sequences = Sequences(kind, [600], 0)
    if isinstance(sequences.op, Ssd):
        sequences.op.a *= 30
    elif isinstance(sequences.op, Delta):
        sequences.op.decay *= 30
    sequences.step([600])
    sequences.check()


@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
def test_gated_rmsnorm_scales_parts_of_a_row(gate_first: bool, groups: int) -> None:
    x, gate, weight = random(4, 12), random(4, 12, seed=1), random(12, seed=2)
    got = gated_rmsnorm(x, gate, weight, 0.1, groups, gate_first)
    opening = gate / (1 + torch.exp(-gate))
    y = x * opening if gate_first else x.clone()
    for part in y.split(12 // groups, dim=-1):
        part.div_(torch.sqrt(part.square().mean(dim=-1, keepdim=True) + 0.1))
    want = y * weight if gate_first else y * weight * opening
    torch.testing.assert_close(got, want)


GENERATOR = torch.Generator().manual_seed(0)
SIZES = (1, 15, 16, 17, 255, 256, 257, 301, 8192)


@each_row(argmax)
@pytest.mark.parametrize("size", SIZES)
def test_greedy_takes_the_first_of_the_highest(row: Row, size: int) -> None:
    logits = torch.randint(-3, 4, (30, size), generator=GENERATOR).float()
    logits[1] = -torch.inf
    logits[2, size // 2] = torch.inf
    logits[3] = torch.arange(size)
    found = row(logits)
    for i, values in enumerate(logits.tolist()):
        assert int(found[i]) == values.index(max(values))


@each_row(argmax)
def test_a_row_with_a_nan_still_gives_a_token(row: Row) -> None:
    logits = torch.full((2, 20), torch.nan)
    logits[1, 3] = 1.0
    assert all(0 <= token < 20 for token in row(logits).tolist())


@each_row(finite_rows)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_rows_that_are_not_finite_are_flagged(row: Row, dtype: torch.dtype, size: int) -> None:
    values = torch.randn(5, size, generator=GENERATOR).to(dtype) * 1e30
    assert row(values) is None
    for i, bad in enumerate((torch.nan, torch.inf, -torch.inf)):
        values[i, size - 1 - i % size] = bad
    assert row(values).tolist() == [False, False, False, True, True]


@each_row(finite_rows)
def test_opposite_infinities_do_not_cancel_and_of_no_rows_all_are_finite(row: Row) -> None:
    values = torch.zeros(2, 40)
    values[0, 3], values[0, 30] = torch.inf, -torch.inf
    assert row(values).tolist() == [False, True]
    assert row(values[:0]) is None


@each_row(argmax)
def test_no_rows_give_no_tokens(row: Row) -> None:
    assert row(torch.zeros(0, 8)).shape == (0,)
