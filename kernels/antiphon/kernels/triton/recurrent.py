"""Recurrences over states: a token at a time, with a part of a head's state in registers.

A state has independent columns, so a program has a few of one head of a row, and walks through the
row's tokens: what a token gets does not depend on chunks, nor on the rows beside it. States are
read at one index and written at others, as in `antiphon.kernels.recurrent`.

Axes: R rows, T tokens of all rows, C channels of the convolution, K taps, H heads, I rows and J
columns of a head's state, S states, W states that a row may write.

Source: Dao and Gu 2024, arXiv:2405.21060 (Mamba 2); Yang, Kautz and Hatamizadeh 2024,
arXiv:2412.06464 (the gated delta rule).
"""

# pyright: basic, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from antiphon.kernels.triton.launch import ceil_div, launch, power_of_2, warps_of

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.kernels.recurrent import LayerStates, Recurrence, StateMetadata

CHANNELS = 512
"""Channels that a program convolves."""
STATE = 4096
"""Elements of a state that a program has, if a column has fewer."""


@triton.jit
def _seen(
    x,
    states,
    start,
    read,
    at,
    channel,
    inside,
    STRIDE: tl.constexpr,
    TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Inputs of the convolution at a token of a row, which the state has of tokens before it."""
    here = channel * 0 + at >= 0
    kept = channel * 0 + read >= 0
    own = x + (start + at).to(tl.int64) * STRIDE + channel
    before = states + (read.to(tl.int64) * (TAPS - 1) + TAPS - 1 + at) * CHANNELS + channel
    value = tl.load(own, mask=inside & here, other=0.0).to(tl.float32)
    past = tl.load(before, mask=inside & kept & (channel * 0 + at < 0), other=0.0).to(tl.float32)
    return tl.where(here, value, past)


@triton.jit(do_not_specialize=["row_count"])
def convolve_kernel(
    x,
    weight,
    bias,
    states,
    rows,
    token_row,
    out,
    row_count,
    STRIDE: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some channels of a token, by SiLU."""
    token = tl.program_id(0)
    row = tl.load(token_row + token)
    start, read = tl.load(rows + row), tl.load(rows + 2 * row_count + row)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    mixed = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        at = token - start - (TAPS - 1 - tap)
        value = _seen(x, states, start, read, at, channel, inside, STRIDE, TAPS, CHANNELS)
        factor = tl.load(weight + tap * CHANNELS + channel, mask=inside, other=0.0)
        mixed += value * factor.to(tl.float32)
    if BIAS:
        mixed += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    mixed = mixed / (1.0 + tl.exp(-mixed))
    place = out + token.to(tl.int64) * CHANNELS + channel
    tl.store(place, mixed.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["row_count", "writes"])
def keep_kernel(
    x,
    states,
    rows,
    row_count,
    writes,
    STRIDE: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The last inputs of some channels of a row, up to its end or up to one of its tokens."""
    row, number = tl.program_id(0), tl.program_id(1)
    write = tl.load(rows + (3 + number) * row_count + row)
    if write >= 0:
        start, length = tl.load(rows + row), tl.load(rows + row_count + row)
        read = tl.load(rows + 2 * row_count + row)
        second = tl.load(rows + 4 * row_count + row, mask=writes > 1, other=-1)
        end = tl.where(second >= 0, number + 1, length)
        channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        inside = channel < CHANNELS
        for back in tl.static_range(TAPS - 1):
            at = end - (TAPS - 1) + back
            value = _seen(x, states, start, read, at, channel, inside, STRIDE, TAPS, CHANNELS)
            place = states + (write.to(tl.int64) * (TAPS - 1) + back) * CHANNELS + channel
            tl.store(place, value.to(states.dtype.element_ty), mask=inside)


@triton.jit
def _softplus(x):
    """The logarithm of 1 + e^x, which is x where that is far larger than 1."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))


@triton.jit
def _unit(x):
    """Elements scaled to unit length, by the epsilon of `antiphon.kernels.recurrent`."""
    return x * (1.0 / tl.sqrt(tl.sum(x * x, axis=0) + 1e-6))


@triton.jit(do_not_specialize=["row_count", "writes"])
def scan_kernel(
    mixed,
    rates,
    decay_log,
    step_bias,
    skip,
    states,
    rows,
    out,
    row_count,
    writes,
    query_scale,
    least_step,
    most_step,
    MIXED_STRIDE: tl.constexpr,
    RATES_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DELTA: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """Some columns of a head, through all tokens of a row."""
    row, head = tl.program_id(0), tl.program_id(1)
    start, length = tl.load(rows + row), tl.load(rows + row_count + row)
    read = tl.load(rows + 2 * row_count + row)
    # A row that writes a second state writes one after each of its tokens.
    second = tl.load(rows + 4 * row_count + row, mask=writes > 1, other=-1)
    i = tl.arange(0, BLOCK_I)
    j = tl.program_id(2) * BLOCK_J + tl.arange(0, BLOCK_J)
    known_i, known_j = i < ROWS, j < COLUMNS
    inside = known_i[:, None] & known_j[None, :]
    within = (head * ROWS + i[:, None]) * COLUMNS + j[None, :]
    size = HEADS * ROWS * COLUMNS
    kept = inside & (i * 0 + read >= 0)[:, None]
    state = tl.load(states + read.to(tl.int64) * size + within, mask=kept, other=0.0)
    rate = tl.exp(tl.load(decay_log + head))
    shift = tl.load(step_bias + head)
    key_head = head // (HEADS // KEY_HEADS)
    for number in range(length):
        token = (start + number).to(tl.int64)
        numbers = mixed + token * MIXED_STRIDE
        own = rates + token * RATES_STRIDE + head
        if DELTA:
            query = tl.load(numbers + key_head * ROWS + i, mask=known_i, other=0.0)
            key = tl.load(numbers + (KEY_HEADS + key_head) * ROWS + i, mask=known_i, other=0.0)
            place = numbers + 2 * KEY_HEADS * ROWS + head * COLUMNS + j
            value = tl.load(place, mask=known_j, other=0.0).to(tl.float32)
            query = _unit(query.to(tl.float32)) * query_scale
            key = _unit(key.to(tl.float32))
            learning = 1.0 / (1.0 + tl.exp(-tl.load(own).to(tl.float32)))
            forgetting = _softplus(tl.load(own + HEADS).to(tl.float32) + shift)
            state = state * tl.exp(-rate * forgetting)
            fresh = (value - tl.sum(key[:, None] * state, axis=0)) * learning
            state += key[:, None] * fresh[None, :]
            made = tl.sum(query[:, None] * state, axis=0)
        else:
            value = tl.load(numbers + head * COLUMNS + j, mask=known_j, other=0.0).to(tl.float32)
            place = numbers + HEADS * COLUMNS + key_head * ROWS + i
            key = tl.load(place, mask=known_i, other=0.0).to(tl.float32)
            query = tl.load(place + KEY_HEADS * ROWS, mask=known_i, other=0.0).to(tl.float32)
            step = _softplus(tl.load(own).to(tl.float32) + shift)
            step = tl.minimum(tl.maximum(step, least_step), most_step)
            state = state * tl.exp(-rate * step) + key[:, None] * (value * step)[None, :]
            made = tl.sum(query[:, None] * state, axis=0) + value * tl.load(skip + head)
        tl.store(out + (token * HEADS + head) * COLUMNS + j, made, mask=known_j)
        if second >= 0:
            write = tl.load(rows + (3 + number) * row_count + row)
            target = states + write.to(tl.int64) * size + within
            tl.store(target, state, mask=inside)
    if second < 0:
        write = tl.load(rows + 3 * row_count + row)
        target = states + write.to(tl.int64) * size + within
        tl.store(target, state, mask=inside)


@triton.jit
def gate_kernel(
    x,
    gates,
    weight,
    out,
    eps,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    PART: tl.constexpr,
    WHOLE: tl.constexpr,
    NORM: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A part of a token that is normalised together, if anything is, and its gate."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    within = tl.arange(0, BLOCK)
    column = part * PART + within
    inside = (within < PART) & (column < WIDTH)
    value = tl.load(x + token * WIDTH + column, mask=inside, other=0.0)
    gate = tl.load(gates + token * STRIDE + column, mask=inside, other=0.0).to(tl.float32)
    opening = gate / (1.0 + tl.exp(-gate))
    if NORM:
        if GATE_FIRST:
            value = value * opening
        mean_square = tl.sum(value * value, axis=0) / PART
        place = column if WHOLE else within
        factor = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
        value = value * (1.0 / tl.sqrt(mean_square + eps)) * factor
        if not GATE_FIRST:
            value = value * opening
    else:
        value = value * opening
    tl.store(out + token * WIDTH + column, value.to(out.dtype.element_ty), mask=inside)


def recurrence(
    projected: Tensor, layer: Recurrence, states: LayerStates, rows: StateMetadata
) -> Tensor:
    """As `antiphon.kernels.recurrent.recurrence`."""
    if layer.scales is not None:
        projected = projected * layer.scales
    projected, made = projected.contiguous(), rows.on_device
    width, seen, stride = layer.width, layer.channels, projected.shape[1]
    delta = layer.kind == "gated_delta"
    # Parts of a projection, in order: gate, convolved, rates; or convolved, gate, rates.
    convolved = projected[:, 0 if delta else width :]
    gate, rates = projected[:, seen if delta else 0 :], projected[:, width + seen :]
    tokens, count, writes = len(projected), made.rows.shape[1], len(made.rows) - 3
    mixed = torch.empty((tokens, seen), dtype=projected.dtype, device=projected.device)
    taps, block = len(layer.conv), min(CHANNELS, power_of_2(seen))
    launch(
        convolve_kernel,
        (tokens, ceil_div(seen, block)),
        convolved,
        layer.conv,
        layer.conv if layer.conv_bias is None else layer.conv_bias,
        states.conv_states,
        made.rows,
        made.token_row,
        mixed,
        count,
        warps=warps_of(block * projected.itemsize),
        STRIDE=stride,
        CHANNELS=seen,
        TAPS=taps,
        BIAS=layer.conv_bias is not None,
        BLOCK=block,
    )
    launch(
        keep_kernel,
        (count, writes, ceil_div(seen, block)),
        convolved,
        states.conv_states,
        made.rows,
        count,
        writes,
        warps=warps_of(block * projected.itemsize),
        STRIDE=stride,
        CHANNELS=seen,
        TAPS=taps,
        BLOCK=block,
    )
    y = torch.empty((tokens, width), dtype=torch.float32, device=projected.device)
    block_i = power_of_2(layer.rows)
    block_j = max(1, min(power_of_2(layer.columns), STATE // block_i))
    least, most = layer.step_limits
    launch(
        scan_kernel,
        (count, layer.heads, ceil_div(layer.columns, block_j)),
        mixed,
        rates,
        layer.decay_log,
        layer.step_bias,
        layer.decay_log if layer.skip is None else layer.skip,
        states.recurrent_states,
        made.rows,
        y,
        count,
        writes,
        layer.rows**-0.5,
        float(least),
        float(most),
        MIXED_STRIDE=seen,
        RATES_STRIDE=stride,
        HEADS=layer.heads,
        KEY_HEADS=layer.key_heads,
        ROWS=layer.rows,
        COLUMNS=layer.columns,
        DELTA=delta,
        BLOCK_I=block_i,
        BLOCK_J=block_j,
    )
    out = torch.empty((tokens, width), dtype=projected.dtype, device=projected.device)
    norm, part = layer.norm, layer.norm_part
    launch(
        gate_kernel,
        (tokens, width // part),
        y,
        gate,
        y if norm is None else norm,
        out,
        float(layer.norm_eps),
        warps=warps_of(power_of_2(part) * y.itemsize),
        STRIDE=stride,
        WIDTH=width,
        PART=part,
        WHOLE=norm is not None and len(norm) == width,
        NORM=norm is not None,
        GATE_FIRST=layer.gate_first,
        BLOCK=power_of_2(part),
    )
    return out
