"""Sampling without a sort.

One pass over the logits keeps the peak and the mass of each block; the second one reads the chosen
block alone. For rows with top-k or top-p, the smallest weight that is kept is found in between, bit
by bit: a weight is kept if fewer than k are greater, and these have no more than p of all mass.
Peaks and masses of blocks bound it from below, so that only the blocks that reach the bound are
read once more, and few weights are left; if there are many, these blocks are read for every bit.

Axes: L rows of logits, V vocabulary, N blocks of it.
"""

# pyright: basic, reportGeneralTypeIssues=false

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from antiphon.kernels.sampling import BLOCK
from antiphon.kernels.triton.launch import ceil_div, launch, power_of_2

PASS = 1024
"""Logits that a program reads at a time."""
CANDIDATES = 2048
"""Weights of a row among which the smallest one that top-k and top-p keep is found at once."""


@triton.jit
def _logits_at(logits, row, place, vocabulary):
    """Logits of a row; -inf behind its last."""
    source = logits + row.to(tl.int64) * vocabulary + place
    return tl.load(source, mask=place < vocabulary, other=-float("inf"))


@triton.jit
def block_kernel(
    logits,
    temperature,
    peaks,
    sums,
    vocabulary: tl.constexpr,
    blocks: tl.constexpr,
    BLOCK: tl.constexpr,
    EACH: tl.constexpr,
):
    """The peak of each block, and the sum of its weights relative to that peak."""
    row = tl.program_id(0)
    block = tl.program_id(1) * EACH + tl.arange(0, EACH)
    place = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    value = _logits_at(logits, row, place, vocabulary)
    peak = tl.max(value, axis=1)
    base = tl.where(peak == -float("inf"), 0.0, peak)
    weights = tl.exp((value - base[:, None]) / tl.load(temperature + row))
    at = row * blocks + block
    tl.store(peaks + at, peak, mask=block < blocks)
    tl.store(sums + at, tl.sum(weights.to(tl.float64), axis=1), mask=block < blocks)


@triton.jit
def _row_sums(peaks, sums, row, blocks, temperature, BLOCKS: tl.constexpr):
    """The peak of a row, and the mass of each of its blocks relative to that, (BLOCKS,)."""
    block = tl.arange(0, BLOCKS)
    at = row * blocks + block
    peak = tl.load(peaks + at, mask=block < blocks, other=-float("inf"))
    mass = tl.load(sums + at, mask=block < blocks, other=0.0)
    highest = tl.max(peak, axis=0)
    return highest, mass * tl.exp((peak - highest) / temperature).to(tl.float64)


@triton.jit
def _too_much(count, mass, rank_max, mass_max):
    """Whether so many weights of so much mass are more than the filters keep before one more."""
    return (count >= rank_max) | (mass > mass_max)


@triton.jit
def bound_kernel(
    temperatures,
    top_k,
    top_p,
    peaks,
    sums,
    highests,
    bounds,
    listed,
    vocabulary: tl.constexpr,
    blocks: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The peak of a row, a weight that its floor is not below, and the blocks that reach it.

    A block whose peak is above a weight has one weight above it, at least, and these have its mass
    but for what its other weights, none of which is above, may have.
    """
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    block = tl.arange(0, BLOCKS)
    at = row * blocks + block
    highest, mass = _row_sums(peaks, sums, row, blocks, temperature, BLOCKS)
    peak = tl.load(peaks + at, mask=block < blocks, other=-float("inf"))
    best = tl.exp((peak - highest) / temperature)
    rank_max, mass_max = _limits(top_k, top_p, row, vocabulary, mass)
    # Sums of weights relative to the block's peak were rounded before they were made relative to
    # the row's.
    mass_max *= 1.0001
    bits = tl.zeros([1], tl.int32)
    for step in range(30):
        tried = bits + (1 << (29 - step))
        pivot = tl.sum((tried - 1).to(tl.float32, bitcast=True), axis=0)
        above = best > pivot
        least = tl.maximum(best.to(tl.float64), mass - (BLOCK - 1) * pivot.to(tl.float64))
        count = tl.sum(above.to(tl.int32), axis=0)
        certain = tl.sum(tl.where(above, least, 0.0), axis=0)
        bits = tl.where(_too_much(count, certain, rank_max, mass_max), tried, bits)
    bound = tl.sum(bits.to(tl.float32, bitcast=True), axis=0)
    reaches = (best >= bound) & (block < blocks)
    place = tl.cumsum(reaches.to(tl.int32), axis=0) - 1
    tl.store(highests + row, highest)
    tl.store(bounds + row, bound)
    tl.store(listed + row * (blocks + 1), tl.sum(reaches.to(tl.int32), axis=0))
    tl.store(listed + row * (blocks + 1) + 1 + place, block, mask=reaches)


@triton.jit
def _limits(top_k, top_p, row, vocabulary, mass):
    """The rank and the mass before a token from which on the filters drop it."""
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    rank_max = tl.where(k > 0, k, vocabulary)
    mass_max = tl.where(p < 1.0, p.to(tl.float64) * tl.sum(mass, axis=0), float("inf"))
    return rank_max, mass_max


@triton.jit
def _listed_weights(
    logits, listed, start, row, vocabulary, blocks, highest, temperature, BLOCK: tl.constexpr,
    PASS: tl.constexpr,
):  # fmt: skip
    """Weights of the listed blocks of a row, from the `start`-th on; -1 behind the last."""
    lane = start + tl.arange(0, PASS)
    length = tl.load(listed + row * (blocks + 1)) * BLOCK
    block = tl.load(listed + row * (blocks + 1) + 1 + lane // BLOCK, mask=lane < length, other=0)
    place = block * BLOCK + lane % BLOCK
    inside = (lane < length) & (place < vocabulary)
    value = tl.load(logits + row.to(tl.int64) * vocabulary + place, mask=inside, other=0.0)
    return tl.where(inside, tl.exp((value - highest) / temperature), -1.0)


@triton.jit
def candidates_kernel(
    logits,
    temperatures,
    top_k,
    top_p,
    peaks,
    bounds,
    listed,
    weights,
    counts,
    vocabulary: tl.constexpr,
    blocks: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PASS: tl.constexpr,
):
    """The weights of a row from its bound on, in order, and how many; one too many if too many."""
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    block = tl.arange(0, BLOCKS)
    peak = tl.load(peaks + row * blocks + block, mask=block < blocks, other=-float("inf"))
    highest = tl.max(peak, axis=0)
    bound = tl.load(bounds + row)
    filtered = (tl.load(top_k + row) > 0) | (tl.load(top_p + row) < 1.0)
    length = tl.where(filtered, tl.load(listed + row * (blocks + 1)) * BLOCK, 0)
    found, start = 0, 0
    while (start < length) & (found <= CANDIDATES):
        weight = _listed_weights(
            logits, listed, start, row, vocabulary, blocks, highest, temperature, BLOCK, PASS
        )
        wanted = weight >= bound
        place = found + tl.cumsum(wanted.to(tl.int32), axis=0) - 1
        tl.store(weights + row * CANDIDATES + place, weight, mask=wanted & (place < CANDIDATES))
        found += tl.sum(wanted.to(tl.int32), axis=0)
        start += PASS
    tl.store(counts + row, found)


@triton.jit
def floor_kernel(
    logits,
    temperatures,
    top_k,
    top_p,
    min_p,
    peaks,
    sums,
    listed,
    weights,
    counts,
    floors,
    vocabulary: tl.constexpr,
    blocks: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PASS: tl.constexpr,
):
    """The smallest weight that a row keeps."""
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    highest, mass = _row_sums(peaks, sums, row, blocks, temperature, BLOCKS)
    floor = tl.load(min_p + row)
    if (tl.load(top_k + row) > 0) | (tl.load(top_p + row) < 1.0):
        rank_max, mass_max = _limits(top_k, top_p, row, vocabulary, mass)
        candidate = tl.arange(0, CANDIDATES)
        found = tl.load(counts + row)
        weight = tl.load(weights + row * CANDIDATES + candidate, mask=candidate < found, other=-1.0)
        length = tl.load(listed + row * (blocks + 1)) * BLOCK
        # Weights are in [0, 1], and the order of such numbers is that of their bits.
        bits = tl.zeros([1], tl.int32)
        for step in range(30):
            # The largest bits that keep too much, so far: those of the floor are one more.
            tried = bits + (1 << (29 - step))
            pivot = tl.sum((tried - 1).to(tl.float32, bitcast=True), axis=0)
            if found <= CANDIDATES:
                above = weight > pivot
                count = tl.sum(above.to(tl.int32), axis=0)
                heavier = tl.sum(tl.where(above, weight, 0.0).to(tl.float64), axis=0)
            else:
                counted = tl.zeros([PASS], tl.int32)
                summed = tl.zeros([PASS], tl.float64)
                for start in range(0, length, PASS):
                    read = _listed_weights(
                        logits, listed, start, row, vocabulary, blocks, highest, temperature,
                        BLOCK, PASS,
                    )  # fmt: skip
                    counted += (read > pivot).to(tl.int32)
                    summed += tl.where(read > pivot, read, 0.0).to(tl.float64)
                count, heavier = tl.sum(counted, axis=0), tl.sum(summed, axis=0)
            bits = tl.where(_too_much(count, heavier, rank_max, mass_max), tried, bits)
        floor = tl.maximum(floor, tl.sum(bits.to(tl.float32, bitcast=True), axis=0))
    tl.store(floors + row, floor)


@triton.jit
def floored_kernel(
    logits,
    temperatures,
    floors,
    highests,
    peaks,
    sums,
    out,
    vocabulary: tl.constexpr,
    blocks: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The mass of what each block keeps, relative to the peak of the row."""
    row, block = tl.program_id(0), tl.program_id(1)
    temperature, highest = tl.load(temperatures + row), tl.load(highests + row)
    floor = tl.load(floors + row)
    at = row * blocks + block
    best = tl.exp((tl.load(peaks + at) - highest) / temperature)
    kept = tl.load(sums + at) * best.to(tl.float64)
    if best < floor:
        kept = kept * 0.0  # nothing of it is kept, and nothing is read
    elif floor > 0.0:
        place = block * BLOCK + tl.arange(0, BLOCK)
        value = _logits_at(logits, row, place, vocabulary)
        weight = tl.exp((value - highest) / temperature)
        kept = tl.sum(tl.where(weight < floor, 0.0, weight).to(tl.float64), axis=0)
    tl.store(out + at, kept)


@triton.jit
def invert_kernel(
    logits,
    uniform,
    temperatures,
    floors,
    peaks,
    masses,
    tokens,
    vocabulary: tl.constexpr,
    blocks: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The first token at which the running mass exceeds `uniform` of all."""
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    block = tl.arange(0, BLOCKS)
    at = row * blocks + block
    peak = tl.load(peaks + at, mask=block < blocks, other=-float("inf"))
    mass = tl.load(masses + at, mask=block < blocks, other=0.0)
    highest = tl.max(peak, axis=0)
    running = tl.cumsum(mass, axis=0)
    target = tl.load(uniform + row) * tl.max(running, axis=0)
    chosen = tl.minimum(tl.sum((running <= target).to(tl.int32), axis=0), blocks - 1)
    before = tl.sum(tl.where(block < chosen, mass, 0.0), axis=0)
    place = chosen * BLOCK + tl.arange(0, BLOCK)
    value = _logits_at(logits, row, place, vocabulary)
    weight = tl.exp((value - highest) / temperature)
    weight = tl.where(weight < tl.load(floors + row), 0.0, weight)
    inside = tl.cumsum(weight.to(tl.float64), axis=0)
    passed = tl.sum((inside <= target - before).to(tl.int32), axis=0)
    # The sum inside a block may round below the block's own sum: never past its last kept token.
    last = tl.max(tl.where(weight > 0.0, tl.arange(0, BLOCK), 0), axis=0)
    tl.store(tokens + row, (chosen * BLOCK + tl.minimum(passed, last)).to(tl.int64))


@triton.jit
def argmax_kernel(logits, tokens, vocabulary: tl.constexpr, PASS: tl.constexpr):
    row = tl.program_id(0)
    best = tl.full([PASS], -float("inf"), tl.float32)
    where = tl.zeros([PASS], tl.int32) + vocabulary
    for start in range(0, vocabulary, PASS):
        place = start + tl.arange(0, PASS)
        value = _logits_at(logits, row, place, vocabulary).to(tl.float32)
        better = (value > best) | ((where == vocabulary) & (place < vocabulary))
        where = tl.where(better, place, where)
        best = tl.where(better, value, best)
    highest = tl.max(best, axis=0)
    first = tl.min(tl.where(best == highest, where, vocabulary), axis=0)
    tl.store(tokens + row, tl.minimum(first, vocabulary - 1).to(tl.int64))


@triton.jit
def log_mass_kernel(peaks, sums, temperatures, out, blocks: tl.constexpr, BLOCKS: tl.constexpr):
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    highest, mass = _row_sums(peaks, sums, row, blocks, temperature, BLOCKS)
    total = tl.log(tl.sum(mass, axis=0)).to(tl.float32)
    tl.store(out + row, highest / temperature + total)


def argmax(logits: Tensor) -> Tensor:
    """As `antiphon.kernels.sampling.argmax`."""
    logits = logits.contiguous()
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    vocabulary = logits.shape[1]
    size = min(PASS, power_of_2(vocabulary))
    launch(argmax_kernel, (len(logits),), logits, tokens, vocabulary=vocabulary, PASS=size)
    return tokens


def sample(
    logits: Tensor,
    uniform: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> Tensor:
    """As `antiphon.kernels.sampling.sample`."""
    logits = logits.contiguous()
    peaks, sums = _blocks(logits, temperature)
    rows, blocks = peaks.shape
    width = power_of_2(blocks)
    vocabulary = logits.shape[1]
    floors, kept = torch.empty_like(temperature), torch.empty_like(sums)
    made = partial(torch.empty, device=logits.device)
    listed, counts = made((rows, blocks + 1), dtype=torch.int32), made(rows, dtype=torch.int32)
    weights = made((rows, CANDIDATES))
    bounds, highests = torch.empty_like(temperature), torch.empty_like(temperature)
    launch(
        bound_kernel,
        (rows,),
        temperature,
        top_k,
        top_p,
        peaks,
        sums,
        highests,
        bounds,
        listed,
        # With fewer, registers are kept in memory on sm_120.
        warps=8,
        vocabulary=vocabulary,
        blocks=blocks,
        BLOCK=BLOCK,
        BLOCKS=width,
    )
    launch(
        candidates_kernel,
        (rows,),
        logits,
        temperature,
        top_k,
        top_p,
        peaks,
        bounds,
        listed,
        weights,
        counts,
        vocabulary=vocabulary,
        blocks=blocks,
        BLOCK=BLOCK,
        BLOCKS=width,
        CANDIDATES=CANDIDATES,
        PASS=PASS,
    )
    launch(
        floor_kernel,
        (rows,),
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        peaks,
        sums,
        listed,
        weights,
        counts,
        floors,
        warps=8,
        vocabulary=vocabulary,
        blocks=blocks,
        BLOCK=BLOCK,
        BLOCKS=width,
        CANDIDATES=CANDIDATES,
        PASS=PASS,
    )
    launch(
        floored_kernel,
        (rows, blocks),
        logits,
        temperature,
        floors,
        highests,
        peaks,
        sums,
        kept,
        warps=1,
        vocabulary=vocabulary,
        blocks=blocks,
        BLOCK=BLOCK,
    )
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    launch(
        invert_kernel,
        (rows,),
        logits,
        uniform,
        temperature,
        floors,
        peaks,
        kept,
        tokens,
        vocabulary=vocabulary,
        blocks=blocks,
        BLOCK=BLOCK,
        BLOCKS=width,
    )
    return tokens


def logsumexp(logits: Tensor, temperature: Tensor) -> Tensor:
    """As `antiphon.kernels.sampling.logsumexp`."""
    logits, temperature = logits.contiguous(), temperature.contiguous()
    peaks, sums = _blocks(logits, temperature)
    rows, blocks = peaks.shape
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    launch(
        log_mass_kernel,
        (rows,),
        peaks,
        sums,
        temperature,
        out,
        blocks=blocks,
        BLOCKS=power_of_2(blocks),
    )
    return out


def _blocks(logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """The peak and the mass of each block, (L, N) float32 and float64."""
    rows, vocabulary = logits.shape
    blocks = ceil_div(vocabulary, BLOCK)
    peaks = torch.empty((rows, blocks), dtype=torch.float32, device=logits.device)
    sums = torch.empty((rows, blocks), dtype=torch.float64, device=logits.device)
    each = PASS // BLOCK
    grid = (rows, ceil_div(blocks, each))
    launch(
        block_kernel,
        grid,
        logits,
        temperature,
        peaks,
        sums,
        vocabulary=vocabulary,
        blocks=blocks,
        BLOCK=BLOCK,
        EACH=each,
    )
    return peaks, sums
