"""The Mamba 2 recurrence (SSD): a state with a scalar decay a head and outer-product updates.

Axes: T tokens, H heads, P channels of a head, G groups of heads, N state elements a channel,
S states; in chunks: C chunks, Q tokens of a chunk, B rows of one token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from antiphon.kernels.op import kernel

if TYPE_CHECKING:
    from antiphon.kernels.states import DecodeRows, ScanSpan, StateMetadata


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
        _step(decode_rows, x, dt, a, b, c, states, out)
    for run in rows.scan_spans:
        y, states[run.write] = _scan(run, x, dt, a, b, c, run.initial_state(states))
        out[run.begin : run.end] += y
    return out


def _step(
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


def _scan(
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

    Returns:
        (..., Q) the sums up to and with each token, and (..., Q, Q) the decay from each token to
        each later one; 0 for tokens that come later. The sums are float64 in between: a token that
        forgets nearly everything makes them large, and differences of later sums would lose their
        digits.
    """
    sums = torch.cumsum(steps.double(), dim=-1)
    between = (sums[..., :, None] - sums[..., None, :]).float()
    later = torch.ones(between.shape[-2:], dtype=torch.bool, device=steps.device).triu(1)
    return sums.float(), between.masked_fill_(later, -torch.inf).exp_()
