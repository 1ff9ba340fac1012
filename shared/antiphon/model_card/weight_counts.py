"""Parameter counts of a model, from the headers of its weight files."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from antiphon.config.model import Dtype, LoadFormat
from antiphon.model_card.config_json import text_name
from antiphon.model_card.gguf_header import read_gguf
from antiphon.model_card.safetensors_header import read_header

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from antiphon.config.quantization import QuantizationConfig
    from antiphon.model_card.files import ModelFiles

SAFETENSORS_DTYPES = {"BF16": Dtype.BFLOAT16, "F16": Dtype.FLOAT16, "F32": Dtype.FLOAT32}
GGUF_DTYPES = {0: Dtype.FLOAT32, 1: Dtype.FLOAT16, 30: Dtype.BFLOAT16}
"""Dtypes that are loaded unchanged, by their GGUF type code."""
NOT_WEIGHTS = ("I64", "BOOL")
"""Dtypes of positions, shapes and masks in safetensors files, which are not weights."""


class Weights(msgspec.Struct, frozen=True):
    """Totals of the headers; zeros if the model has no weights here."""

    count: int
    bytes: int
    """Size of the files' tensors."""
    dtype: Dtype | None
    """The dtype of most unquantized parameters, if it is supported."""
    quantized: int = 0
    """Number of quantized parameters."""


def read_weights(
    files: ModelFiles,
    item_bytes: int,
    quantization: QuantizationConfig | None = None,
    passed_over: tuple[str, ...] = (),
) -> Weights:
    """Add up the headers of existing files; tensors are not read, missing files are skipped.

    `item_bytes` are the bytes per element where a header has only the total size. Tensors that
    begin with one of `passed_over` are not loaded.
    """
    there = [file for file in files.weights if file.exists()]
    if files.format is LoadFormat.PT:
        size_bytes = sum(file.stat().st_size for file in there)
        return Weights(count=size_bytes // item_bytes, bytes=size_bytes, dtype=None)
    counts: Counter[Dtype | None] = Counter()
    size_bytes = quantized = 0
    for file in there:
        read = _gguf if files.format is LoadFormat.GGUF else _safetensors
        for name, dtype, count, tensor_bytes in read(file):
            if name.startswith(passed_over):
                continue
            size_bytes += tensor_bytes
            if dtype is None and files.format is not LoadFormat.GGUF:
                quantized += (
                    count if quantization is None else quantization.weight_count(name, count)
                )
            elif quantization is None or not quantization.is_auxiliary(name):
                counts[dtype] += count
    common = counts.most_common(1)
    dtype = common[0][0] if common else None
    return Weights(counts.total() + quantized, size_bytes, dtype, quantized)


def _safetensors(file: Path) -> Iterator[tuple[str, Dtype | None, int, int]]:
    for name, entry in read_header(file).entries.items():
        if entry.dtype in NOT_WEIGHTS:
            continue
        start, end = entry.data_offsets
        dtype = SAFETENSORS_DTYPES.get(entry.dtype)
        yield text_name(name), dtype, math.prod(entry.shape), end - start


def _gguf(file: Path) -> Iterator[tuple[str, Dtype | None, int, int]]:
    in_order = sorted(read_gguf(file).tensors.items(), key=lambda item: item[1].start)
    ends = [*(tensor.start for _, tensor in in_order[1:]), file.stat().st_size]
    for (name, tensor), end in zip(in_order, ends, strict=True):
        yield name, GGUF_DTYPES.get(tensor.kind), tensor.count, end - tensor.start
