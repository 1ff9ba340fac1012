"""Safetensors: a header with the location of every tensor, then the tensors."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from antiphon.model_card.weight_headers import SafetensorsEntry, read_header
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.model.formats.stored_tensor import StoredTensor, numbers, open_file

if TYPE_CHECKING:
    from pathlib import Path

    from antiphon.model_worker.model.formats.stored_tensor import Part

DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes that a layer loads (each layer lists its own) or that checkpoints contain, as masks."""


def read_safetensors(file: Path, *, mapped: bool) -> dict[str, StoredTensor]:
    """Read the header of a file: its tensors by name."""
    header = read_header(file)
    if (size := file.stat().st_size) < header.bytes_expected:
        raise ModelLoadError(f"{file}: cut short: it has {size} of {header.bytes_expected} bytes")
    part = open_file(file, mapped=mapped)
    return {
        name: _stored(file, name, entry, header.data_start, part)
        for name, entry in header.entries.items()
    }


def _stored(
    file: Path, name: str, entry: SafetensorsEntry, data_start: int, part: Part
) -> StoredTensor:
    if entry.dtype not in DTYPES:
        raise ModelLoadError(
            f"{file}: {name} is {entry.dtype}: only {', '.join(DTYPES)} weights are read"
        )
    start, end = entry.data_offsets
    dtype = DTYPES[entry.dtype]
    data = part(data_start + start, end - start)
    decode = partial(numbers, dtype=dtype, shape=entry.shape)
    stored = StoredTensor(file, entry.shape, dtype, data, decode)
    if stored.count * dtype.itemsize != end - start:
        raise ModelLoadError(f"{file}: {name}: {end - start} bytes do not hold {entry.shape}")
    return stored
