"""How many numbers a model's weights are, as the headers of its files say."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from antiphon.config.gguf_file import read_gguf
from antiphon.config.loading import LoadFormat
from antiphon.config.model import Dtype
from antiphon.config.safetensors_file import read_header

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from antiphon.config.model_files import ModelFiles

SAFETENSORS_DTYPES = {"BF16": Dtype.BFLOAT16, "F16": Dtype.FLOAT16, "F32": Dtype.FLOAT32}
GGUF_DTYPES = {0: Dtype.FLOAT32, 1: Dtype.FLOAT16, 30: Dtype.BFLOAT16}
"""Formats of numbers that are loaded as they are, as the two kinds of files name them."""


class Weights(msgspec.Struct, frozen=True):
    """What the headers add up to; zeros where a model has no weights here."""

    count: int
    bytes: int
    dtype: Dtype | None
    """The format of most parameters, if it is one that we load."""


def read_weights(files: ModelFiles, item_bytes: int) -> Weights:
    """Add up the headers of what is there; no tensor is read, and a file that is missing is none.

    Args:
        files: Of the model.
        item_bytes: Of a number in a format whose header says only how long all of them are.

    Raises:
        ConfigError: A file is not of its format.
    """
    there = [file for file in files.weights if file.exists()]
    if files.format is LoadFormat.PT:
        size_bytes = sum(file.stat().st_size for file in there)
        return Weights(count=size_bytes // item_bytes, bytes=size_bytes, dtype=None)
    counts: Counter[Dtype | None] = Counter()
    size_bytes = 0
    for file in there:
        read = _gguf if files.format is LoadFormat.GGUF else _safetensors
        for dtype, count, tensor_bytes in read(file):
            counts[dtype] += count
            size_bytes += tensor_bytes
    common = counts.most_common(1)
    return Weights(counts.total(), size_bytes, common[0][0] if common else None)


def _safetensors(file: Path) -> Iterator[tuple[Dtype | None, int, int]]:
    for entry in read_header(file).entries.values():
        start, end = entry.data_offsets
        yield SAFETENSORS_DTYPES.get(entry.dtype), math.prod(entry.shape), end - start


def _gguf(file: Path) -> Iterator[tuple[Dtype | None, int, int]]:
    tensors = list(read_gguf(file).tensors.values())
    ends = [*sorted(tensor.start for tensor in tensors)[1:], file.stat().st_size]
    in_order = sorted(tensors, key=lambda tensor: tensor.start)
    for tensor, end in zip(in_order, ends, strict=True):
        yield GGUF_DTYPES.get(tensor.kind), tensor.count, end - tensor.start
