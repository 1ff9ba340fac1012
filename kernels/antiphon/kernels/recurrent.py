"""Recurrences over states: a short causal convolution, Mamba 2 (SSD) and the gated delta rule.

Axes: T tokens, H heads, S states; in chunks: C chunks, Q tokens of a chunk, B rows of one token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F  # noqa: N812 (its name in every torch program)
from torch import Tensor

from antiphon.kernels.op import kernel

if TYPE_CHECKING:
    from antiphon.kernels.states import DecodeRows, ScanSpan, StateMetadata

NORM_EPS = 1e-6
"""Added to the squared norm of queries and keys, as checkpoints were trained."""


@kernel("recurrent.conv")
def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, rows: StateMetadata
) -> Tensor:
    """Convolve each channel with its last K tokens, and apply SiLU.

    Axes: T tokens, C channels, K taps, S states.
    x (T, C); weight (C, K), the last tap is the token itself; bias (C,); states (S, K - 1, C), the
    inputs of the last tokens, mutated  ->  (T, C), dtype of x
    """
    taps = weight.t()  # (K, C)
    out = torch.empty_like(x)
    if (decode_rows := rows.decode_rows) is not None:
        seen = torch.cat(
            (decode_rows.read_states(states).to(x.dtype), decode_rows.gather(x).unsqueeze(1)), dim=1
        )
        decode_rows.write_states(states, seen[:, 1:])
        decode_rows.scatter(out, _activate((seen * taps).sum(dim=1), bias))
    for run in rows.scan_spans:
        own = x[run.begin : run.end]
        seen = torch.cat((run.initial_state(states).to(x.dtype), own))  # (K - 1 + tokens, C)
        states[run.write] = seen[len(own) :].to(states.dtype)
        mixed = seen[: len(own)] * taps[0]
        for tap in range(1, len(taps)):
            mixed.addcmul_(seen[tap : tap + len(own)], taps[tap])
        out[run.begin : run.end] = _activate(mixed, bias)
    return out


def _activate(mixed: Tensor, bias: Tensor | None) -> Tensor:
    return F.silu(mixed if bias is None else mixed + bias)


@kernel("recurrent.ssd")
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
    if (decode_rows := rows.decode_rows) is not None:
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


@kernel("recurrent.gated_delta")
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
    if (decode_rows := rows.decode_rows) is not None:
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
    solved = _solve(system, rhs)
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


def _solve(system: Tensor, rhs: Tensor) -> Tensor:
    """(1 + the strictly lower triangle of system)^-1 wanted."""
    solve = torch.linalg.solve_triangular  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    return cast("Tensor", solve(system, rhs, upper=False, unitriangular=True))
