"""Recurrences over states: a short causal convolution, Mamba 2 (SSD) and the gated delta rule.

A state is never overwritten: a row reads the state after the tokens before it, and writes the state
after its own tokens to another place. What a pass writes depends on the pass alone, so that a
failed pass can be run again, and a cached state that other requests may continue from is not
changed.

Axes: R rows, T tokens of all rows, H heads, S states; in chunks: C chunks, Q tokens of a chunk,
B rows of one token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (its name in every torch program)
from numpy.typing import NDArray
from torch import Tensor

from antiphon.kernels.cpu import extension
from antiphon.kernels.cpu.extension import cpu
from antiphon.kernels.norm import gated_rmsnorm
from antiphon.kernels.op import kernel
from antiphon.kernels.triton.backend import triton

if TYPE_CHECKING:
    from collections.abc import Iterator

    from antiphon.kernels.cpu.extension import CompiledRecurrence
    from antiphon.kernels.upload import Upload

NORM_EPS = 1e-6
"""Added to the squared norm of queries and keys, as checkpoints were trained."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Recurrence:
    """What a layer with a recurrence computes between its projections.

    A token's projection is, of `ssd` (Mamba 2), gate (H P), x (H P), B and C (Y N) each, and step
    (H,); of `gated_delta`, q and k (Y K) each, v and gate (H V) each, learning and forgetting (H,)
    each.

    Axes: H heads, Y key heads, which of `ssd` are the groups that share B and C; C channels that
    are convolved: x, B, C, or q, k, v.
    """

    kind: Literal["ssd", "gated_delta"]
    key_heads: int
    heads: int
    rows: int  # of a head's state: N or K
    columns: int  # P or V
    conv: Tensor  # (taps, C), the last tap is the token itself
    conv_bias: Tensor | None  # (C,)
    decay_log: Tensor  # (H,) float32, the logarithm of the rate by which a state decays
    step_bias: Tensor  # (H,) float32
    skip: Tensor | None = None  # (H,) float32, of `ssd`
    step_limits: tuple[float, float] = (0.0, math.inf)  # of `ssd`
    scales: Tensor | None = None  # (inputs,) the projection is multiplied by this
    # Of the norm after the recurrence, (H * columns,), or (norm_part,) for each part; None: no norm
    norm: Tensor | None
    norm_part: int  # elements that are normalised together
    norm_eps: float
    gate_first: bool = False  # whether the gate multiplies the input of the norm, not its result

    @property
    def width(self) -> int:
        return self.heads * self.columns

    @property
    def channels(self) -> int:
        return self.width + 2 * self.key_heads * self.rows

    @cached_property
    def compiled(self) -> CompiledRecurrence:
        """The layer in the CPU extension. Weights may be written later."""
        library = extension.load()
        return library.RecurrentLayer(
            kind=getattr(library.RecurrenceKind, self.kind),
            key_heads=self.key_heads,
            heads=self.heads,
            rows=self.rows,
            columns=self.columns,
            conv=self.conv,
            conv_bias=self.conv_bias,
            decay_log=self.decay_log,
            step_bias=self.step_bias,
            skip=self.skip,
            step_limits=self.step_limits,
            scales=self.scales,
            norm=self.norm,
            norm_part=self.norm_part,
            norm_eps=self.norm_eps,
            gate_first=self.gate_first,
        )


@kernel("recurrent.layer", cpu("recurrence"), triton("recurrent:recurrence"))
def recurrence(
    projected: Tensor, layer: Recurrence, states: LayerStates, rows: StateMetadata
) -> Tensor:
    """Convolve, run the recurrence, gate and normalise.

    projected (T, inputs); the layer's states, mutated  ->  (T, H * columns), dtype of projected

    Kernels take every token by itself, so that its bits do not depend on chunks.
    """
    if layer.scales is not None:
        projected = projected * layer.scales
    width, seen = layer.width, layer.channels
    if layer.kind == "ssd":
        gate, convolved, rates = _split(projected, width, seen, layer.heads)
    else:
        convolved, gate, rates = _split(projected, seen, width, 2 * layer.heads)
    mixed = causal_conv(convolved, layer.conv, layer.conv_bias, states.conv_states, rows)
    compute = _ssd_of if layer.kind == "ssd" else _gated_delta_of
    y = compute(layer, mixed, rates, states.recurrent_states, rows).flatten(1)
    if layer.norm is None:
        return (y * F.silu(gate.float())).to(gate.dtype)
    parts = width // layer.norm_part
    weight = layer.norm if len(layer.norm) == width else layer.norm.repeat(parts)
    return gated_rmsnorm(y, gate, weight, layer.norm_eps, parts, layer.gate_first)


def _split(x: Tensor, *sizes: int) -> list[Tensor]:
    """The columns of x as parts of these sizes."""
    starts = (sum(sizes[:place]) for place in range(len(sizes)))
    return [x[:, start : start + size] for start, size in zip(starts, sizes, strict=True)]


def _ssd_of(
    layer: Recurrence, mixed: Tensor, step: Tensor, states: Tensor, rows: StateMetadata
) -> Tensor:
    width, shared = layer.width, layer.key_heads * layer.rows
    x, b, c = _split(mixed, width, shared, shared)
    groups = (len(mixed), layer.key_heads, layer.rows)
    dt = F.softplus(step.float() + layer.step_bias).clamp(*layer.step_limits)
    assert layer.skip is not None, "every ssd has it"
    return ssd(
        x.reshape(len(mixed), layer.heads, layer.columns),
        dt,
        -torch.exp(layer.decay_log),
        b.reshape(groups),
        c.reshape(groups),
        layer.skip,
        states,
        rows,
    )


def _gated_delta_of(
    layer: Recurrence, mixed: Tensor, rates: Tensor, states: Tensor, rows: StateMetadata
) -> Tensor:
    keys = layer.key_heads * layer.rows
    q, k, v = _split(mixed, keys, keys, layer.width)
    heads = (len(mixed), layer.key_heads, layer.rows)
    learning, forgetting = rates.float().chunk(2, dim=-1)
    decay = -torch.exp(layer.decay_log) * F.softplus(forgetting + layer.step_bias)
    values = v.reshape(len(mixed), layer.heads, layer.columns)
    beta = torch.sigmoid(learning)
    return gated_delta(q.reshape(heads), k.reshape(heads), values, decay, beta, states, rows)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, rows: StateMetadata
) -> Tensor:
    """Convolve each channel with its last K tokens, and apply SiLU.

    Axes: T tokens, C channels, K taps, S states.
    x (T, C); weight (K, C), the last tap is the token itself; bias (C,); states (S, K - 1, C), the
    inputs of the last tokens, mutated  ->  (T, C), dtype of x; intermediate values are float32
    """
    taps, out = weight.float(), torch.empty_like(x)
    for decode_rows in rows.steps:
        seen = torch.cat(
            (decode_rows.read_states(states).to(x.dtype), decode_rows.gather(x).unsqueeze(1)), dim=1
        )
        decode_rows.write_states(states, seen[:, 1:])
        decode_rows.scatter(out, _activate((seen * taps).sum(dim=1), bias).to(out.dtype))
    for run in rows.scan_spans:
        own = x[run.begin : run.end]
        seen = torch.cat((run.initial_state(states).to(x.dtype), own))  # (K - 1 + tokens, C)
        states[run.write] = seen[len(own) :].to(states.dtype)
        seen = seen.float()
        mixed = seen[: len(own)] * taps[0]
        for tap in range(1, len(taps)):
            mixed.addcmul_(seen[tap : tap + len(own)], taps[tap])
        out[run.begin : run.end] = _activate(mixed, bias)
    return out


def _activate(mixed: Tensor, bias: Tensor | None) -> Tensor:
    return F.silu(mixed if bias is None else mixed + bias.float())


def ssd(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    states: Tensor,
    rows: StateMetadata,
) -> Tensor:
    """Run h = exp(dt a) h + dt x b^T, y = h c + d x, token by token.

    Axes: P channels of a head, G groups of heads, N state elements a channel.
    x (T, H, P); dt (T, H) float32, the step size, not negative; a (H,) float32, negative;
    b, c (T, G, N), each for H / G adjacent heads; d (H,) float32; states (S, H, N, P) float32,
    mutated  ->  (T, H, P) float32

    Decode tokens take one step, prefill chunks use the chunked scan: within a chunk as a masked
    matrix product, between chunks through the state. Everything is float32.

    Source: Dao and Gu 2024, arXiv:2405.21060, section 6.
    """
    x, b, c = x.float(), b.float(), c.float()
    out = x * d[:, None]
    for decode_rows in rows.steps:
        _ssd_step(decode_rows, x, dt, a, b, c, states, out)
    for run in rows.scan_spans:
        y, states[run.write] = _ssd_scan(run, x, dt, a, b, c, run.initial_state(states))
        out[run.begin : run.end] += y
    return out


def _ssd_step(
    decode_rows: DecodeRows,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    states: Tensor,
    out: Tensor,
) -> None:
    """One token of each row, added to out (T, H, P)."""
    x, dt, b, c = (decode_rows.gather(each) for each in (x, dt, b, c))
    shared = x.shape[1] // b.shape[1]
    b, c = (group.repeat_interleave(shared, dim=1) for group in (b, c))  # (B, H, N)
    inputs, y = (x * dt[..., None])[:, :, None], torch.empty_like(x)[:, :, None]  # (B, H, 1, P)
    factors = torch.exp(dt * a)[..., None, None]
    for row, state in enumerate(decode_rows.decayed_states(states, factors)):
        state.addcmul_(b[row][..., None], inputs[row])
        torch.bmm(c[row][:, None], state, out=y[row])
    decode_rows.scatter(out, decode_rows.gather(out) + y.squeeze(2))


def _ssd_scan(
    run: ScanSpan, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """A span: state (H, N, P)  ->  (tokens, H, P), and the state after it."""
    shared = x.shape[1] // b.shape[1]
    steps = run.chunked(dt).transpose(1, 2)  # (C, H, Q)
    inputs = run.chunked(x).transpose(1, 2) * steps[..., None]  # (C, H, Q, P)
    b, c = (run.chunked(each).transpose(1, 2) for each in (b, c))  # (C, G, Q, N)
    decay, left = chunk_decays(steps * a[:, None])  # (C, H, Q) and (C, H, Q, Q)
    scores = (c @ b.mT).repeat_interleave(shared, dim=1) * left
    within = scores @ inputs  # (C, H, Q, P)
    faded = inputs * torch.exp(decay[..., -1:] - decay)[..., None]
    updates = _by_group(b.mT, faded)  # (C, H, N, P)
    chunk_decay = torch.exp(decay[..., -1])[..., None, None]
    before: list[Tensor] = []
    for chunk, added in enumerate(updates):
        before.append(state)
        state = torch.addcmul(added, state, chunk_decay[chunk])
    carried = _by_group(c, torch.stack(before))  # (C, H, Q, P)
    y = torch.addcmul(within, carried, torch.exp(decay)[..., None])
    return run.unchunked(y.transpose(1, 2)), state


def _by_group(a: Tensor, b: Tensor) -> Tensor:
    """Products of what heads of a group share with each head's own: (C, G, I, J) @ (C, H, J, P)."""
    chunks, groups, outer, inner = a.shape
    own = b.view(chunks, groups, -1, inner, b.shape[-1])  # (C, G, H / G, J, P)
    product = a @ own.transpose(2, 3).reshape(chunks, groups, inner, -1)  # (C, G, I, H / G * P)
    by_head = product.view(chunks, groups, outer, own.shape[2], own.shape[4])
    return by_head.transpose(2, 3).reshape(chunks, b.shape[1], outer, b.shape[-1])


def chunk_decays(steps: Tensor) -> tuple[Tensor, Tensor]:
    """Decays within a chunk, from the logarithm of each token's: steps (..., Q), not positive.

    Returns (..., Q) the sums up to and with each token, and (..., Q, Q) the decay from each token
    to each later one; 0 for tokens that come later.
    """
    # In float64: a token that forgets nearly everything makes the sums large, and differences of
    # later sums would lose their digits.
    sums = torch.cumsum(steps.double(), dim=-1)
    between = (sums[..., :, None] - sums[..., None, :]).float()
    later = torch.ones(between.shape[-2:], dtype=torch.bool, device=steps.device).triu(1)
    return sums.float(), between.masked_fill_(later, -torch.inf).exp_()


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    rows: StateMetadata,
) -> Tensor:
    """Run h = exp(decay) h, h += k (beta (v - k^T h))^T, y = h^T q, token by token.

    Axes: H value heads, Y key heads, K elements of a key, V elements of a value.
    q, k (T, Y, K), normalised here to unit length, and q by K^-0.5 more; each serves H / Y adjacent
    value heads; v (T, H, V); decay (T, H) float32, not positive; beta (T, H) float32;
    states (S, H, K, V) float32, mutated  ->  (T, H, V) float32

    Decode tokens take one step, prefill chunks use the chunked scan: the corrections between the
    tokens of a chunk are a triangular system (the UT transform). Everything is float32.

    Source: Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464; the chunks after Yang et al. 2024,
    arXiv:2406.06484.
    """
    shared = v.shape[1] // q.shape[1]
    v = v.float()
    q = _unit(q.float()).mul_(q.shape[-1] ** -0.5).repeat_interleave(shared, dim=1)  # (T, H, K)
    k = _unit(k.float()).repeat_interleave(shared, dim=1)
    out = torch.empty_like(v)
    for decode_rows in rows.steps:
        _delta_step(decode_rows, q, k, v, decay, beta, states, out)
    for run in rows.scan_spans:
        y, states[run.write] = _delta_scan(run, q, k, v, decay, beta, run.initial_state(states))
        out[run.begin : run.end] = y
    return out


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + NORM_EPS)


def _delta_step(
    decode_rows: DecodeRows,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    out: Tensor,
) -> None:
    """One token of each row, written to out (T, H, V)."""
    q, k, v, decay, beta = (decode_rows.gather(each) for each in (q, k, v, decay, beta))
    v, weight = v[:, :, None], beta[..., None, None]
    y = torch.empty_like(v)  # (B, H, 1, V)
    for row, state in enumerate(
        decode_rows.decayed_states(states, torch.exp(decay)[..., None, None])
    ):
        known = torch.bmm(k[row][:, None], state)  # (H, 1, V)
        state.addcmul_(k[row][..., None], (v[row] - known) * weight[row])
        torch.bmm(q[row][:, None], state, out=y[row])
    decode_rows.scatter(out, y.squeeze(2))


def _delta_scan(
    run: ScanSpan, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """A span: state (H, K, V)  ->  (tokens, H, V), and the state after it."""
    q, k, v = (run.chunked(each).transpose(1, 2) for each in (q, k, v))  # (C, H, Q, K or V)
    weight = run.chunked(beta).transpose(1, 2)[..., None]  # (C, H, Q, 1)
    total, left = chunk_decays(run.chunked(decay).transpose(1, 2))  # (C, H, Q) and (C, H, Q, Q)
    grown = torch.exp(total)[..., None]  # decay of the state before the chunk
    weighted = k * weight
    # Solved for both at once: the values that the chunk's tokens write, and how they read the state
    # before the chunk, each without what the earlier tokens of the chunk contribute already.
    rhs = torch.cat((v * weight, weighted * grown), dim=-1)
    system = (weighted @ k.mT) * left
    solve = torch.linalg.solve_triangular  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    solved = cast("Tensor", solve(system, rhs, upper=False, unitriangular=True))
    updates, reading = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    within = (q @ k.mT) * left
    queries = q * grown
    fading_keys = k * torch.exp(total[..., -1:] - total)[..., None]
    chunk_decay = grown[:, :, -1:]  # (C, H, 1, 1)
    outs: list[Tensor] = []
    for chunk in range(len(q)):
        fresh = updates[chunk] - reading[chunk] @ state  # (H, Q, V)
        outs.append(queries[chunk] @ state + within[chunk] @ fresh)
        state = torch.baddbmm(state * chunk_decay[chunk], fading_keys[chunk].mT, fresh)
    return run.unchunked(torch.stack(outs).transpose(1, 2)), state


CHUNK_TOKENS = 64
"""Chunk size of scans, aligned to a sequence's first token and not to a row's: a prefill split at a
multiple of this is computed in the same chunks as an unsplit one."""
SPAN_TOKENS = 8 * CHUNK_TOKENS
"""Chunks that are computed in parallel. More would take memory without saving time."""

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """The state that a recurrent layer stores for a whole sequence."""

    channels: int  # inputs of its convolution that are sharded over ranks
    shared: int = 0  # its inputs that are sharded by `groups`, or replicated over more ranks
    groups: int = 1  # of the heads
    taps: int  # of the convolution: it stores one token fewer
    heads: int  # matrices of the recurrence, sharded over ranks
    rows: int  # of one matrix
    columns: int

    def convolved(self, ranks: int) -> tuple[int, int]:
        """The shape of the convolution's state, on one of `ranks` ranks: (tokens, channels)."""
        return self.taps - 1, self.channels // ranks + self.shared // min(ranks, self.groups)

    def matrices(self, ranks: int) -> tuple[int, int, int]:
        return self.heads // ranks, self.rows, self.columns

    def state_bytes(self, ranks: int, dtype: torch.dtype) -> int:
        kept = math.prod(self.convolved(ranks)) * dtype.itemsize
        return kept + math.prod(self.matrices(ranks)) * torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class LayerStates:
    """The states of one layer."""

    group: int  # index of its group of recurrent states, which selects the rows' metadata
    conv_states: Tensor  # (S, K - 1, C) the last inputs of the convolution
    recurrent_states: Tensor  # (S, H, I, J) float32, the state of the recurrence


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The rows of one token, which each take one step of the recurrence."""

    # (B,) indices into the pass's tokens; None when they are all of them, in order.
    tokens: Tensor | None
    reads: Tensor  # (B,) state indices; 0 for rows without earlier tokens
    writes: Tensor  # (B,) state indices
    fresh: Tensor | None  # (B,) bool, rows that start from a zero state; None: no row does
    # The state indices to read (negative: none) and to write, as in the plan.
    pairs: tuple[tuple[int, int], ...]

    def gather(self, x: Tensor) -> Tensor:
        """The entries of these rows: x (T, ...)  ->  (B, ...)."""
        return x if self.tokens is None else x.index_select(0, self.tokens)

    def read_states(self, states: Tensor) -> Tensor:
        """A copy of the states that the rows continue from: states (S, ...)  ->  (B, ...)."""
        found = states.index_select(0, self.reads)
        if self.fresh is not None:
            # Assigned, not multiplied by zero: index 0 stands in here and may contain a NaN.
            found[self.fresh] = 0
        return found

    def write_states(self, states: Tensor, after: Tensor) -> None:
        states.index_copy_(0, self.writes, after.to(states.dtype))

    def decayed_states(self, states: Tensor, factors: Tensor) -> Iterator[Tensor]:
        """The state of each row in turn, copied to its new index and multiplied by its decay.

        One row after the other: a state is large, and the caller's update finds it in the CPU
        cache. Doing all rows in parallel took three times as long with states of 786 KB.

        states (S, ...), mutated; factors (B, ...)  ->  B times (...), to be updated in place
        """
        for (read, write), factor in zip(self.pairs, factors, strict=True):
            after = states[write]
            if read < 0:
                after.zero_()
            else:
                torch.mul(states[read], factor, out=after)
            yield after

    def scatter(self, out: Tensor, y: Tensor) -> None:
        if self.tokens is None:
            out.copy_(y)
        else:
            out.index_copy_(0, self.tokens, y.to(out.dtype))


@dataclass(frozen=True, slots=True)
class ScanSpan:
    """A row of several tokens, or a span of it that starts at a multiple of `SPAN_TOKENS`.

    It is the pass's tokens from `begin` to `end`.
    """

    begin: int
    end: int
    read: int  # index of the state before it; negative: it is zero
    write: int  # index of the state after it
    offset: int  # tokens of its first chunk that come before it

    def initial_state(self, states: Tensor) -> Tensor:
        """The state that it continues from: states (S, ...)  ->  (...)."""
        return torch.zeros_like(states[self.write]) if self.read < 0 else states[self.read]

    def chunked(self, x: Tensor) -> Tensor:
        """Split its entries into chunks: x (T, ...)  ->  (chunks, tokens of a chunk, ...)."""
        # Padding is zero. A span within one chunk is not padded.
        own = x[self.begin : self.end]
        end = self.offset + len(own)
        if end <= CHUNK_TOKENS:
            return own.unsqueeze(0)
        chunks = -(-end // CHUNK_TOKENS)
        padded = own.new_zeros((chunks * CHUNK_TOKENS, *own.shape[1:]))
        padded[self.offset : end] = own
        return padded.view(chunks, CHUNK_TOKENS, *own.shape[1:])

    def unchunked(self, y: Tensor) -> Tensor:
        """Undo `chunked`: y (chunks, tokens of a chunk, ...)  ->  (tokens, ...)."""
        length = self.end - self.begin
        flat = y.flatten(0, 1)
        return flat if len(flat) == length else flat[self.offset : self.offset + length]


class StateRows(NamedTuple):
    """The rows of a pass as Triton kernels read them, int32."""

    rows: Tensor  # (3 + W, R): first token, tokens, the state read, and those written
    token_row: Tensor  # (T,) the row of each token


@dataclass(frozen=True)
class StateMetadata:
    """The rows of one forward pass. Made once a pass, used by each layer.

    Row r's tokens follow those of row r - 1.
    """

    reads: Ints  # (R,) index of the state after the tokens before the row; negative: there are none
    # (R, W) index for the state after the row's last token, or for one after each of its tokens, of
    # which there are at most W; -1 beyond these. No row of this pass reads them.
    writes: Ints
    query_len: Ints  # (R,) tokens of a row in this pass
    kv_len: Ints  # (R,) tokens of its sequence up to the end of the row
    upload: Upload = torch.as_tensor

    @cached_property
    def on_device(self) -> StateRows:
        """What Triton kernels read of the rows.

        Raises:
            RuntimeError: A row leaves neither one state nor one for each of its tokens.
        """
        left = np.count_nonzero(self.writes >= 0, axis=1)
        if len(wrong := np.flatnonzero((left != 1) & (left != self.query_len))):
            row = wrong.item(0)
            tokens, states = self.query_len.item(row), left.item(row)
            raise RuntimeError(f"row {row} of {tokens} tokens leaves {states} states")
        count = len(self.query_len)
        starts = np.cumsum(self.query_len, dtype=np.int32) - self.query_len
        rows = np.concatenate([[starts, self.query_len, self.reads], self.writes.T])
        size = rows.size + -rows.size % 4  # parts of 16 bytes
        token_row = np.repeat(np.arange(count, dtype=np.int32), self.query_len)
        packed = np.zeros(size + len(token_row), np.int32)
        packed[: rows.size], packed[size:] = rows.ravel(), token_row
        flat = self.upload(packed)
        return StateRows(flat[: rows.size].view(rows.shape), flat[size:])

    @cached_property
    def compiled(self) -> extension.CompiledStates:
        return self.compile()

    def compile(self) -> extension.CompiledStates:
        """The rows in the CPU extension.

        Raises:
            RuntimeError: A row leaves neither one state nor one for each of its tokens.
        """
        return extension.load().StateMetadata(
            reads=self.reads, writes=self.writes, query_len=self.query_len
        )

    @cached_property
    def steps(self) -> tuple[DecodeRows, ...]:
        """Steps of one token each, one after the other: first of each row that stores each state.

        Those are rows of one token, and rows whose later tokens are drafts.
        """
        stored = (self.writes >= 0).sum(axis=1)
        stored[(stored == 1) & (self.query_len > 1)] = 0  # only the last state: scanned
        starts = np.cumsum(self.query_len, dtype=np.int64) - self.query_len
        return tuple(
            self._step(np.flatnonzero(stored > step), starts, step)
            for step in range(int(stored.max(initial=0)))
        )

    def _step(self, rows: NDArray[np.intp], starts: NDArray[np.int64], step: int) -> DecodeRows:
        """Token `step` of these rows."""
        reads = self.writes[rows, step - 1] if step else self.reads[rows]
        writes = self.writes[rows, step]
        fresh = reads < 0
        every = len(rows) == int(self.query_len.sum())
        return DecodeRows(
            tokens=None if every else torch.as_tensor(starts[rows] + step),
            reads=torch.as_tensor(np.maximum(reads, 0).astype(np.int64)),
            writes=torch.as_tensor(writes.astype(np.int64)),
            fresh=torch.as_tensor(fresh) if fresh.any() else None,
            pairs=tuple(zip(reads.tolist(), writes.tolist(), strict=True)),
        )

    @cached_property
    def scan_spans(self) -> tuple[ScanSpan, ...]:
        runs: list[ScanSpan] = []
        begin = 0
        several = self.writes[:, 1] >= 0 if self.writes.shape[1] > 1 else np.zeros(len(self.reads))
        for row, length in enumerate(self.query_len.tolist()):
            if length > 1 and not several[row]:
                start = int(self.kv_len[row]) - length
                runs += _spans(begin, length, start, int(self.reads[row]), int(self.writes[row, 0]))
            begin += length
        return tuple(runs)


def _spans(begin: int, length: int, start: int, read: int, write: int) -> list[ScanSpan]:
    """Split a row that begins at token `start` of its sequence at multiples of `SPAN_TOKENS`."""
    ends = range((start // SPAN_TOKENS + 1) * SPAN_TOKENS, start + length, SPAN_TOKENS)
    cuts = [start, *ends, start + length]
    return [
        ScanSpan(
            begin=begin + here - start,
            end=begin + there - start,
            read=read if here == start else write,
            write=write,
            offset=here % CHUNK_TOKENS,
        )
        for here, there in pairwise(cuts)
    ]
