"""Files of torch (.bin, .pt): pickles, of which only tensors are accepted."""

from __future__ import annotations

import pickle  # noqa: TID251 (the name of torch's refusal; nothing is unpickled here)
import re
import zipfile
from typing import TYPE_CHECKING, cast

import torch

from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.model.formats.safetensors import DTYPES as SAFETENSORS_DTYPES
from antiphon.model_worker.model.formats.stored_tensor import (
    InMemory,
    Mapped,
    StoredTensor,
    unchanged,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from antiphon.model_worker.model.formats.stored_tensor import TensorData

DTYPES = tuple(SAFETENSORS_DTYPES.values())


def read_torch(file: Path, *, mapped: bool) -> dict[str, StoredTensor]:
    """Read the structure of a file: its tensors by name."""
    # Files older than torch 1.6 cannot be mapped.
    mappable = mapped and zipfile.is_zipfile(file)
    return {
        name: _stored(file, name, tensor, mapped=mappable)
        for name, tensor in _outline(file, mapped=mappable).items()
    }


def _outline(file: Path, *, mapped: bool) -> Mapping[str, Tensor]:
    try:
        content: object = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        # The rest of the message is advice on how to allow the code.
        code = re.search(r"GLOBAL (\S+)", str(error))
        what = f"it would run {code[1]}" if code else "not a file of torch, or cut short"
        raise ModelLoadError(f"{file}: refused: {what}") from error
    except FileNotFoundError as error:
        raise ModelLoadError(f"{file}: {error.strerror}") from error
    except (RuntimeError, EOFError, OSError) as error:
        line = str(error).partition("\n")[0]
        raise ModelLoadError(f"{file}: cut short, or not a file of torch: {line}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file}: contains a {type(content).__name__}, not a dict of tensors")
    named = cast("dict[object, object]", content)
    for name, value in named.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise ModelLoadError(f"{file}: {name} is a {type(value).__name__}, not a tensor")
    return cast("dict[str, Tensor]", named)


def _stored(file: Path, name: str, tensor: Tensor, *, mapped: bool) -> StoredTensor:
    if tensor.dtype not in DTYPES:
        raise ModelLoadError(
            f"{file}: {name} is {str(tensor.dtype).removeprefix('torch.')}: only "
            f"{', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES)} weights are read"
        )
    data: TensorData = Mapped(tensor) if mapped and tensor.is_contiguous() else InMemory(tensor)
    return StoredTensor(file, tuple(tensor.shape), tensor.dtype, data, unchanged)
