"""Tensors of a checkpoint, described before they are read, and the bytes of their files.

They are in safetensors or torch files, or are random weights without a file.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import math
import mmap
import os
import pickle  # noqa: TID251 (the name of torch's refusal; nothing is unpickled here)
import re
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from antiphon.model_card.weight_headers import SafetensorsEntry, read_header
from antiphon.model_worker.model.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from antiphon.layers.weights import WeightSource

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
DEVIATION = 0.02
"""Standard deviation of random weights: most models are initialised so, and nothing diverges."""
# `MADV_POPULATE_READ` of Linux 5.14, which the `mmap` module does not define; older kernels refuse
# it, and pages are then read one by one on access.
POPULATE_READ = 22

_LIBC = ctypes.CDLL(None)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _nothing() -> None:
    """The `prefetch` and `release` of data that is freed with its last reference."""


@dataclass(frozen=True, slots=True)
class TensorData:
    """The data of one tensor. Any thread may read it."""

    size_bytes: int
    read: Callable[[], Tensor]  # into memory; the result must not be written to
    prefetch: Callable[[], None] = _nothing  # starts reading ahead; returns before it is done
    release: Callable[[], None] = _nothing  # memory that the result of `read` does not own
    # The same data, of which only the bytes of a range are read; the others are undefined, or are
    # read when they are used. None: it is read as a whole.
    cut: Callable[[int, int], TensorData] | None = None


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint: its type and location.

    Attributes:
        shape: As the model needs it.
        dtype: Of the decoded elements.
        decode: Decodes bytes, (…,)  ->  `shape`.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    data: TensorData
    decode: Callable[[Tensor], Tensor]

    @property
    def count(self) -> int:
        return math.prod(self.shape)


def mapped_data(view: Tensor, first: int = 0, end: int | None = None) -> TensorData:
    """A part of a mapped file that is never written to. Its memory is the page cache."""
    wanted = view if end is None else view[first:end]

    def read() -> Tensor:
        _advise(wanted, POPULATE_READ)
        return view

    # Dropped pages are read again by a later access.
    prefetch, release = (
        partial(_advise, wanted, advice) for advice in (mmap.MADV_WILLNEED, mmap.MADV_DONTNEED)
    )
    return TensorData(wanted.nbytes, read, prefetch, release, partial(mapped_data, view))


def copied_data(
    file: Path, start: int, size_bytes: int, first: int = 0, end: int | None = None
) -> TensorData:
    """A part of a file, read into memory of its own."""
    wanted = (size_bytes if end is None else end) - first

    def prefetch() -> None:
        if not hasattr(os, "posix_fadvise"):
            return
        with contextlib.suppress(OSError), file.open("rb", buffering=0) as stream:
            os.posix_fadvise(stream.fileno(), start + first, wanted, os.POSIX_FADV_WILLNEED)

    def read() -> Tensor:
        copy = torch.empty(size_bytes, dtype=torch.uint8)
        rest, at = copy.numpy().data[first : first + wanted], start + first
        try:
            with file.open("rb", buffering=0) as stream:
                while rest:
                    count = os.preadv(stream.fileno(), [rest], at)
                    if count == 0:
                        raise ModelLoadError(f"{file}: cut short while it was read, at {at}")
                    rest, at = rest[count:], at + count
        except OSError as error:
            raise ModelLoadError(f"{file}: {error.strerror}") from error
        return copy

    return TensorData(wanted, read, prefetch, cut=partial(copied_data, file, start, size_bytes))


Part = Callable[[int, int], TensorData]
"""Returns a part of a file by its first byte and its size in bytes."""


def open_file(file: Path, *, mapped: bool) -> Part:
    """Open a file and return a function that gives its parts, mapped or copied."""
    if not mapped:
        return partial(copied_data, file)
    try:
        with file.open("rb") as stream:
            # Copy-on-write, since torch has no read-only tensors; nothing is written.
            content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file}: {error}") from error
    whole = torch.frombuffer(content, dtype=torch.uint8)
    return lambda start, size: mapped_data(whole[start : start + size])


def numbers(data: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """View bytes (N,) as elements of a shape; copied if the file does not align them."""
    aligned = data if data.data_ptr() % dtype.itemsize == 0 else data.clone()
    return aligned.view(dtype).view(shape)


def _advise(mapped: Tensor, advice: int) -> None:
    """Hint at a tensor's pages, on Linux; other threads run meanwhile.

    By address and not by `mmap.madvise`, which holds the interpreter lock while a disk is read, and
    which does not know mappings that torch made.
    """
    if sys.platform != "linux" or mapped.nbytes == 0:
        return
    # Whole pages; a dropped page that a neighbour shares is read again on access.
    start = mapped.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    end = -(-(mapped.data_ptr() + mapped.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    _LIBC.madvise(start, end - start, advice)


def trim() -> None:
    """Return freed memory to the system, where the C library can."""
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)


def read_safetensors(file: Path, *, mapped: bool) -> dict[str, StoredTensor]:
    """Read the header of a safetensors file: its tensors by name."""
    header = read_header(file)
    if (size := file.stat().st_size) < header.bytes_expected:
        raise ModelLoadError(f"{file}: cut short: it has {size} of {header.bytes_expected} bytes")
    part = open_file(file, mapped=mapped)
    return {
        name: _of_safetensors(file, name, entry, header.data_start, part)
        for name, entry in header.entries.items()
    }


def _of_safetensors(
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


def read_torch(file: Path, *, mapped: bool) -> dict[str, StoredTensor]:
    """Read the structure of a torch file (.bin, .pt): its tensors by name.

    Such a file is a pickle, of which only tensors are accepted.
    """
    # Files older than torch 1.6 cannot be mapped.
    mappable = mapped and zipfile.is_zipfile(file)
    return {
        name: _of_torch(file, name, tensor, mapped=mappable)
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


def _of_torch(file: Path, name: str, tensor: Tensor, *, mapped: bool) -> StoredTensor:
    if tensor.dtype not in DTYPES.values():
        raise ModelLoadError(
            f"{file}: {name} is {_dtype_names(tensor.dtype)}: only "
            f"{_dtype_names(*DTYPES.values())} weights are read"
        )
    data = (
        replace(mapped_data(tensor), cut=None)
        if mapped and tensor.is_contiguous()
        else TensorData(tensor.nbytes, lambda: tensor)
    )
    return StoredTensor(file, tuple(tensor.shape), tensor.dtype, data, _unchanged)


def _dtype_names(*dtypes: torch.dtype) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def dummy_weights(sources: Iterable[WeightSource]) -> dict[str, StoredTensor]:
    """Random weights: to measure speed and memory of a model from its config alone."""
    tensors: dict[str, StoredTensor] = {}
    for source in sources:
        name, shape, dtype = source.name, source.shape, torch.float32
        data = TensorData(math.prod(shape) * dtype.itemsize, partial(_random, name, shape))
        tensors[name] = StoredTensor(Path("dummy"), shape, dtype, data, _unchanged)
    return tensors


def _random(name: str, shape: tuple[int, ...]) -> Tensor:
    """A matrix that is seeded by its name, so that order and rank do not matter.

    A vector keeps a signal unchanged.
    """
    if len(shape) == 1:
        return torch.full(shape, 0.0 if name.endswith("bias") else 1.0)
    digest = hashlib.sha256(name.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    return torch.empty(shape).normal_(0.0, DEVIATION, generator=generator)


def _unchanged(tensor: Tensor) -> Tensor:
    """The `decode` of data that needs none."""
    return tensor
