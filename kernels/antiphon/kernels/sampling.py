"""Sampling from logits: one uniform number a token, inverted through the distribution.

Also what changes single logits before that (penalties, masks, biases), and the normaliser of
logprobs.

Axes: L rows of logits, V vocabulary, C candidates, N blocks of the vocabulary, E single logits, T
tokens of a pass, S slots of requests.

Gumbel noise would need a random number for each vocabulary entry (17 times slower, measured); here
the noise is one number and the sum runs in the fixed order of the vocabulary. A row's result
depends on that row alone. Its number comes from a counter-based generator, which has no state: the
number for (seed, choice, position) is the same whatever else is in the batch, on every
worker, before and after a migration.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", Philox 4x32 with ten
rounds; the tests contain its published vectors.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (its name in every torch program)
from numpy.typing import NDArray
from torch import Tensor

from antiphon.kernels.cpu.extension import cpu
from antiphon.kernels.op import kernel
from antiphon.kernels.triton.backend import triton

BLOCK = 256
CANDIDATES = 256
"""Enough for almost every row's top-k and top-p; the other rows are sorted in full."""

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROUNDS = 10

Words = NDArray[np.uint64]


@kernel("sampling.penalize", triton("logits:penalize"), invariant=True)
def penalize(
    logits: Tensor,
    rows: Tensor,
    token_ids: Tensor,
    counts: Tensor,
    frequency: Tensor,
    presence: Tensor,
    repetition: Tensor,
) -> None:
    """Penalise tokens that were sampled before, in place: frequency and presence, then repetition.

    logits (L, V) float32; rows, token_ids (E,) int64, each pair once; the others (E,) float32:
    counts, how often each was sampled, at least once; frequency, subtracted for each time;
    presence, subtracted once; repetition, which divides logits that are positive then, and
    multiplies the others

    Source: the first two as the OpenAI API defines them; Keskar et al. 2019, arXiv:1909.05858,
    section 4.1, in the form that covers negative logits, too.
    """
    seen = logits[rows, token_ids] - counts * frequency - presence
    logits[rows, token_ids] = torch.where(seen > 0, seen / repetition, seen * repetition)


@kernel("sampling.mask", triton("logits:mask"), invariant=True)
def mask(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Set the logits of tokens whose bit is not set to -inf, in place.

    logits (L, V) float32; rows (G,) int64, at least one, each once; words (G, ceil(V / 32)) int32:
    token i is bit i % 32 of word i // 32
    """
    # A table lookup for eight tokens at once, and a sum: a masked fill mispredicts the branch of
    # each token and took twenty times as long (64 rows of 49,152).
    octets = words.view(torch.uint8).flatten().int()  # the low bits first
    added = _octets(words.device).index_select(0, octets).view(len(words), -1)
    logits.index_add_(0, rows, added[:, : logits.shape[-1]])


@kernel("sampling.bias", triton("logits:bias"), invariant=True)
def bias(logits: Tensor, rows: Tensor, token_ids: Tensor, values: Tensor) -> None:
    """Add to single logits, in place. Each pair of row and token occurs once.

    logits (L, V) float32; rows, token_ids (E,) int64; values (E,) float32, finite or -inf
    """
    logits[rows, token_ids] += values


@kernel("sampling.log_mass", triton("sampling:logsumexp"), invariant=True)
def logsumexp(logits: Tensor, temperature: Tensor) -> Tensor:
    """The log of the softmax denominator: a scaled logit minus it is a logprob.

    logits (L, V) float32; temperature (L,) float32, above 0  ->  (L,) float32
    """
    peak = logits.amax(dim=-1, keepdim=True)
    mass = _block_sums(_weights(logits, peak, temperature)).sum(dim=-1)  # (L,) float64
    return peak[:, 0] / temperature + mass.log().float()


@kernel("sampling.greedy", cpu("argmax"), triton("sampling:argmax"), invariant=True)
def argmax(logits: Tensor) -> Tensor:
    """The first of the highest logits. logits (L, V)  ->  (L,) int64."""
    return logits.argmax(dim=-1)


@kernel("sampling.draw", triton("sampling:sample"), invariant=True)
def sample(
    logits: Tensor,
    uniform: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> Tensor:
    """Sample a token a row: temperature, softmax, then top-k, top-p and min-p on its full mass.

    Nothing is renormalised between the filters: top-p drops a token when the mass before it, in
    descending order, exceeds p of all mass; min-p when it is less likely than p times the most
    likely. Tokens as likely as the last one kept are kept too.

    logits (L, V) float32; uniform (L,) float64 in [0, 1); temperature (L,) float32, above 0;
    top_k (L,) int64, 0 keeps all; top_p (L,) float32 in (0, 1], 1 keeps all; min_p (L,) float32 in
    [0, 1], 0 keeps all  ->  (L,) int64 token ids
    """
    weights = _weights(logits, logits.amax(dim=-1, keepdim=True), temperature)
    floor = min_p.clone()  # weights are relative to the most likely token, so this is min-p
    filtered = ((top_k > 0) | (top_p < 1)).nonzero().squeeze(-1)
    if len(filtered) > 0:
        count = _floor(weights[filtered], top_k[filtered], top_p[filtered])
        floor[filtered] = torch.maximum(floor[filtered], count)
    return _invert(weights.masked_fill_(weights < floor[:, None], 0.0), uniform)


@kernel("futures.resolve", triton("futures:resolve"), invariant=True)
def resolve_futures(tokens: Tensor, last: Tensor) -> Tensor:
    """The ids of tokens that the host may not have read yet: -1 - s is the last one of slot s.

    tokens (T,) int32; last (S,) int32  ->  (T,) int64
    """
    wide = tokens.long()
    return torch.where(wide < 0, last[(-1 - wide).clamp(min=0)].long(), wide)


@kernel("futures.record", triton("futures:record"), invariant=True)
def record_futures(
    last: Tensor, slots: Tensor, sampled: Tensor, finite: Tensor, vocabulary: int
) -> None:
    """Record the last token of each slot, in place: 0 where there is none, which is read safely.

    There is none where logits are not finite, or the sampled number is no id.

    last (S,) int32; slots (L,) int32, each once, or -1: not recorded; sampled (L,) int64; finite
    (L,) bool
    """
    known = (slots >= 0).nonzero()[:, 0]
    token = sampled[known]
    there = finite[known] & (token >= 0) & (token < vocabulary)
    last[slots[known].long()] = torch.where(there, token, 0).int()


@cache
def _octets(device: torch.device) -> Tensor:
    """The values to add to eight tokens' logits, by the byte of their bits, (256, 8): 0 or -inf."""
    octet, token = torch.arange(256), torch.arange(8)
    allowed = torch.bitwise_right_shift(octet[:, None], token) & 1
    return torch.where(allowed == 1, 0.0, -torch.inf).to(device)


def _weights(logits: Tensor, peak: Tensor, temperature: Tensor) -> Tensor:
    """The terms of the softmax sum, (L, V), 1 at the most likely token.

    The peak is subtracted before the division: a low temperature would make both infinite.
    """
    return torch.exp((logits - peak) / temperature[:, None])


def _floor(weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The smallest weight that top-k and top-p keep, (L,)."""
    vocabulary = weights.shape[-1]
    mass = _block_sums(weights).sum(dim=-1)  # (L,) float64
    mass_max = torch.where(top_p < 1, top_p.double() * mass, torch.inf)
    rank_max = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary)
    candidates = weights.topk(min(CANDIDATES, vocabulary), dim=-1).values  # (L, C), descending
    count = _count_passing(candidates, rank_max, mass_max)
    floor = candidates.gather(-1, count[:, None] - 1).squeeze(-1)
    short = ((count == candidates.shape[-1]) & (count < rank_max)).nonzero().squeeze(-1)
    if len(short) > 0:
        ordered = weights[short].sort(dim=-1, descending=True).values
        count = _count_passing(ordered, rank_max[short], mass_max[short])
        floor[short] = ordered.gather(-1, count[:, None] - 1).squeeze(-1)
    return floor


def _count_passing(falling: Tensor, rank_max: Tensor, mass_max: Tensor) -> Tensor:
    """How many of the most likely tokens pass, (L,), at least one."""
    wide = falling.double()
    before = wide.cumsum(dim=-1) - wide  # (L, C) mass of more likely tokens
    rank = torch.arange(falling.shape[-1], device=falling.device)
    passes = (before <= mass_max[:, None]) & (rank < rank_max[:, None])
    return passes.sum(dim=-1).clamp(min=1)


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first token at which the running sum of weights exceeds `uniform` of the total, (L,)."""
    blocks = _blocks(weights)  # (L, N, BLOCK)
    running = _block_sums(weights).cumsum(dim=-1)  # (L, N) float64
    target = uniform * running[:, -1]
    block = (running <= target[:, None]).sum(dim=-1).clamp(max=blocks.shape[1] - 1)
    before = F.pad(running, (1, 0)).gather(-1, block[:, None])  # (L, 1)
    inside = blocks[torch.arange(len(blocks), device=blocks.device), block]  # (L, BLOCK)
    passed = inside.double().cumsum(dim=-1) <= target[:, None] - before
    # The sum inside a block may round below the block's own sum: never past its last kept token.
    last = BLOCK - 1 - (inside > 0).flip(-1).int().argmax(dim=-1)
    return block * BLOCK + torch.minimum(passed.sum(dim=-1), last)


def _block_sums(weights: Tensor) -> Tensor:
    return _blocks(weights).sum(dim=-1, dtype=torch.float64)


def _blocks(weights: Tensor) -> Tensor:
    spare = -weights.shape[-1] % BLOCK
    return F.pad(weights, (0, spare)).view(len(weights), -1, BLOCK)


def uniform(
    seed: NDArray[np.int64], choice: NDArray[np.int32], position: NDArray[np.int64]
) -> NDArray[np.float64]:
    """One number in [0, 1) a row, with 52 random bits.

    seed, choice, position (L,): position is the index in its sequence of the token being sampled.
    52 bits, not 53: then the product with any sum is below that sum, after rounding too.
    """
    bits = seed.view(np.uint64)
    zeros = np.zeros_like(bits)
    low, high = position.astype(np.uint64) & _LOW, choice.astype(np.uint64) & _LOW
    first, second, _, _ = philox4x32((low, high, zeros, zeros), (bits & _LOW, bits >> _HALF))
    mantissa = ((first >> np.uint64(6)) << np.uint64(26)) | (second >> np.uint64(6))
    return mantissa.astype(np.float64) * 2.0**-52


def philox4x32(
    counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]
) -> tuple[Words, Words, Words, Words]:
    """Ten rounds of Philox over 32-bit words, each held in the low half of a uint64."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        left, right = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = (right >> _HALF) ^ b ^ k0, right & _LOW, (left >> _HALF) ^ d ^ k1, left & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return a, b, c, d
