"""Layouts of AWQ, GPTQ and llama.cpp, packed as they are documented, number by number.

Written without looking at the reader, which takes whole tensors apart at once.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of a word's eight columns lies at its first four bits, its next four, and so on."""


def awq_words(steps: Tensor) -> Tensor:
    """Rows of numbers of four bits, eight columns to a word: (N, O)  ->  (N, O / 8) int32."""
    words = np.zeros((steps.shape[0], steps.shape[1] // 8), dtype=np.uint32)
    for word in range(words.shape[1]):
        for place, column in enumerate(AWQ_ORDER):
            number = steps[:, 8 * word + column].numpy().astype(np.uint32)
            words[:, word] |= number << np.uint32(4 * place)
    return torch.from_numpy(words.view(np.int32))


def gptq_rows(steps: Tensor, bits: int) -> Tensor:
    """Consecutive inputs to a word: (I, O)  ->  (I * bits / 32, O) int32."""
    each = 32 // bits
    words = np.zeros((steps.shape[0] // each, steps.shape[1]), dtype=np.uint32)
    for row in range(steps.shape[0]):
        number = steps[row].numpy().astype(np.uint32)
        words[row // each] |= number << np.uint32(bits * (row % each))
    return torch.from_numpy(words.view(np.int32))


def gptq_columns(zeros: Tensor, bits: int) -> Tensor:
    """Consecutive outputs to a word: (G, O)  ->  (G, O * bits / 32) int32."""
    return gptq_rows(zeros.t(), bits).t().contiguous()


def q4_k(scale: float, least: float, scales: Tensor, mins: Tensor, steps: Tensor) -> bytes:
    """A block of 256: eight runs of 32, each with a scale and a minimum of six bits.

    The first four runs' six bits lie in bytes of their own; of the others, four bits lie in the
    last four bytes and two above those of the first.
    """
    packed = bytearray(12)
    for run in range(8):
        one, other = int(scales[run]), int(mins[run])
        if run < 4:
            packed[run] |= one
            packed[run + 4] |= other
        else:
            packed[run + 4] |= (one & 15) | ((other & 15) << 4)
            packed[run - 4] |= (one >> 4) << 6
            packed[run] |= (other >> 4) << 6
    nibbles = bytearray(128)
    for number, step in enumerate(steps.flatten().tolist()):
        pair, within = divmod(number, 64)
        nibbles[32 * pair + within % 32] |= step << (4 * (within // 32))
    return np.array([scale, least], dtype=np.float16).tobytes() + bytes(packed) + bytes(nibbles)


def q6_k(scale: float, scales: Tensor, steps: Tensor) -> bytes:
    """A block of 256: sixteen runs of 16 with a signed byte each, steps of six bits from -32.

    Of each half of 128, four runs of 32 share bytes: two their low four bits, all four the byte of
    their high two.
    """
    low, high = bytearray(128), bytearray(64)
    for number, step in enumerate((steps.flatten() + 32).tolist()):
        half, within = divmod(number, 128)
        quarter, lane = divmod(within, 32)
        low[64 * half + 32 * (quarter % 2) + lane] |= (step & 15) << (4 * (quarter // 2))
        high[32 * half + lane] |= (step >> 4) << (2 * quarter)
    runs = scales.to(torch.int8).numpy().tobytes()
    return bytes(low) + bytes(high) + runs + np.array([scale], dtype=np.float16).tobytes()
