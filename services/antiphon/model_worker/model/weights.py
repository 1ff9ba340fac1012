"""Checkpoints in safetensors: what they hold is compared with what is wanted before any is read."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec
import torch

from antiphon.model_worker.model.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import Tensor

    from antiphon.layers.weights import WeightSource

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
INDEX = "model.safetensors.index.json"
HEADER_BYTES_MAX = 100 * 1000**2
"""The limit of safetensors itself."""
NAMED_MAX = 5
"""Tensors that an error names; the rest are counted."""


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


Offset = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[Offset, Offset]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint: where its bytes are."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    """Of its bytes, from the beginning of the file."""

    @property
    def count(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)


class Checkpoint:
    """The tensors of a model folder, read by mapping the files into memory."""

    def __init__(self, tensors: dict[str, StoredTensor]) -> None:
        self.tensors = tensors

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read the headers of all files of the folder.

        Raises:
            ModelLoadError: A file is missing, cut short, or not safetensors.
        """
        tensors: dict[str, StoredTensor] = {}
        for file in _files(folder):
            tensors.update(_read_header(file))
        if not tensors:
            raise ModelLoadError(f"{folder}: the .safetensors files hold no tensors")
        return cls(tensors)

    def compare(self, sources: Iterable[WeightSource], ignored: tuple[str, ...]) -> None:
        """Hold the checkpoint against what the model takes.

        Raises:
            ModelLoadError: Tensors are missing, of another shape, or taken by nobody.
        """
        wanted = {source.name: source.shape for source in sources}
        held = {name for name in self.tensors if not name.endswith(ignored)}
        complaints = (
            _listed("missing", sorted(wanted.keys() - held)),
            _listed("unexpected", sorted(held - wanted.keys())),
            _listed(
                "of another shape",
                [
                    f"{name} {self.tensors[name].shape}, not {shape}"
                    for name, shape in wanted.items()
                    if name in held and self.tensors[name].shape != shape
                ],
            ),
        )
        if any(complaints):
            raise ModelLoadError("weights: " + "; ".join(filter(None, complaints)))

    def load(self, sources: Iterable[WeightSource]) -> None:
        """Copy every source's tensor to its layer. Call `compare` first."""
        mapped: dict[Path, Tensor] = {}
        for source in sources:
            tensor = self.tensors[source.name]
            if tensor.file not in mapped:
                mapped[tensor.file] = _map(tensor.file)
            size = tensor.count * tensor.dtype.itemsize
            data = mapped[tensor.file][tensor.start : tensor.start + size]
            source.load(_as(data, tensor))


def _as(data: Tensor, tensor: StoredTensor) -> Tensor:
    """Bytes as numbers. Headers need not align tensors, and a view must be aligned."""
    aligned = data if data.data_ptr() % tensor.dtype.itemsize == 0 else data.clone()
    return aligned.view(tensor.dtype).view(tensor.shape)


def _map(file: Path) -> Tensor:
    with file.open("rb") as stream:
        # Copy-on-write, since torch has no read-only tensors; nothing is written.
        return torch.frombuffer(
            mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8
        )


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.exists():
        try:
            parsed = msgspec.json.decode(index.read_bytes(), type=_Index)
        except msgspec.DecodeError as error:
            raise ModelLoadError(f"{index}: {error}") from error
        files = [folder / name for name in sorted(set(parsed.weight_map.values()))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelLoadError(f"{folder}: there is no .safetensors file")
    return files


def _read_header(file: Path) -> dict[str, StoredTensor]:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > HEADER_BYTES_MAX:
                raise ModelLoadError(f"{file}: not a safetensors file: no header")
            text = stream.read(length)
        if len(text) < length:
            raise ModelLoadError(f"{file}: cut short: its header has {len(text)} of {length} bytes")
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(item, type=_Entry) for name, item in raw.items()}
    except OSError as error:
        raise ModelLoadError(f"{file}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ModelLoadError(f"{file}: not a safetensors file: {error}") from error
    data = 8 + length
    expected = data + max((entry.data_offsets[1] for entry in entries.values()), default=0)
    if size < expected:
        raise ModelLoadError(f"{file}: cut short: it has {size} of {expected} bytes")
    return {name: _stored(file, name, entry, data) for name, entry in entries.items()}


def _stored(file: Path, name: str, entry: _Entry, data: int) -> StoredTensor:
    if entry.dtype not in DTYPES:
        raise ModelLoadError(
            f"{file}: {name} is {entry.dtype}: only {', '.join(DTYPES)} weights are read"
        )
    start, end = entry.data_offsets
    stored = StoredTensor(file, entry.shape, DTYPES[entry.dtype], data + start)
    if stored.count * stored.dtype.itemsize != end - start:
        raise ModelLoadError(f"{file}: {name}: {end - start} bytes do not hold {entry.shape}")
    return stored


def _listed(what: str, names: list[str]) -> str | None:
    if not names:
        return None
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return f"{what}: {', '.join(names[:NAMED_MAX])}{more}"
