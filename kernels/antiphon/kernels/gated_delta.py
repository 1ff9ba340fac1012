"""The gated delta rule: a state that decays and replaces the value stored under each key.

Axes: T tokens, H value heads, Y key heads, K elements of a key, V elements of a value, S states;
in chunks: C chunks, Q tokens of a chunk, B rows of one token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from antiphon.kernels.op import kernel
from antiphon.kernels.ssd import chunk_decays

if TYPE_CHECKING:
    from antiphon.kernels.states import DecodeRows, ScanSpan, StateMetadata

NORM_EPS = 1e-6
"""Added to the squared norm of queries and keys, as checkpoints were trained."""


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
        _step(decode_rows, q, k, v, decay, beta, states, out)
    for run in rows.scan_spans:
        y, states[run.write] = _scan(run, q, k, v, decay, beta, run.initial_state(states))
        out[run.begin : run.end] = y
    return out


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + NORM_EPS)


def _step(
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


def _scan(
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
