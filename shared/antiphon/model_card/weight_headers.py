"""Reads the headers of weight files, not the tensors, and adds up their parameters."""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import IO, TYPE_CHECKING, Annotated

import msgspec

from antiphon.config.errors import ConfigError
from antiphon.config.model import Dtype, LoadFormat
from antiphon.config.quantization import grouped_bytes
from antiphon.model_card.config_json import text_name

if TYPE_CHECKING:
    from pathlib import Path

    from antiphon.config.quantization import QuantizationConfig
    from antiphon.model_card.files import ModelFiles


MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
"""Alignment of tensors, unless `general.alignment` is set."""
COUNT_MAX = 1 << 24
"""Maximum count of metadata values, tensors or list items; more means a file that is not GGUF."""

_STRING, _ARRAY = 8, 9
_FORMATS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
"""Struct formats of numbers, by GGUF type code."""

Value = str | int | float | bool
Values = tuple[str, ...] | tuple[int | float | bool, ...]


class GgufTensor(msgspec.Struct, frozen=True):
    """One tensor. `kind` is ggml's type code, `start` the offset in the file."""

    shape: tuple[int, ...]
    kind: int
    start: int

    @property
    def count(self) -> int:
        return math.prod(self.shape)


class GgufHeader(msgspec.Struct, frozen=True):
    """Metadata values, lists if requested, and tensors by name.

    `size_bytes` is the offset of the header's end.
    """

    settings: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]
    lists: Mapping[str, Values] = {}
    size_bytes: int = 0


def read_gguf(file: Path, *, lists: bool = False) -> GgufHeader:
    """Read a header without the tensors; `lists` are vocabularies with their scores and types."""
    try:
        with file.open("rb") as stream:
            return _GgufReader(stream, file, lists=lists).header()
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error


class _GgufReader:
    def __init__(self, stream: IO[bytes], file: Path, *, lists: bool) -> None:
        self._stream, self._file, self._keeps_lists = stream, file, lists

    def header(self) -> GgufHeader:
        magic = self._stream.read(len(MAGIC))
        if magic != MAGIC:
            raise ConfigError(f"{self._file}: not a GGUF file: it begins with {magic!r}")
        version = self._number("I")
        if version not in VERSIONS:
            raise ConfigError(f"{self._file}: GGUF version {version}: only 2 and 3 are read")
        tensors, settings_count = self._count(), self._count()
        settings: dict[str, Value] = {}
        lists: dict[str, Values] = {}
        for _ in range(settings_count):
            key, value = self._string(), self._value(int(self._number("I")))
            if isinstance(value, tuple):
                lists[key] = value
            elif value is not None:
                settings[key] = value
        placed = {self._string(): self._tensor() for _ in range(tensors)}
        alignment = settings.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ConfigError(f"{self._file}: general.alignment = {alignment!r}")
        size_bytes = self._stream.tell()
        start = -(-size_bytes // alignment) * alignment
        for name, at in placed.items():
            placed[name] = msgspec.structs.replace(at, start=start + at.start)
        return GgufHeader(settings, placed, lists, size_bytes)

    def _tensor(self) -> GgufTensor:
        sizes = [int(self._number("Q")) for _ in range(int(self._number("I")))]
        kind, offset = int(self._number("I")), int(self._number("Q"))
        # The file names the innermost dimension first.
        return GgufTensor(tuple(reversed(sizes)), kind, offset)

    def _value(self, kind: int) -> Value | Values | None:
        """A list that is not requested is skipped."""
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(self._format(kind))
        item, count = int(self._number("I")), self._count()
        if item == _ARRAY:
            for _ in range(count):
                self._value(item)
            return None
        if item == _STRING:
            strings = tuple(self._string() for _ in range(count))
            return strings if self._keeps_lists else None
        form = self._format(item)
        content = self._bytes(count * struct.calcsize(form))
        return struct.unpack(f"<{count}{form}", content) if self._keeps_lists else None

    def _format(self, kind: int) -> str:
        if kind not in _FORMATS:
            raise ConfigError(f"{self._file}: not a GGUF file: a setting of type {kind}")
        return _FORMATS[kind]

    def _string(self) -> str:
        return self._bytes(self._count()).decode(errors="replace")

    def _count(self) -> int:
        count = int(self._number("Q"))
        if count > COUNT_MAX:
            raise ConfigError(f"{self._file}: not a GGUF file: {count} items")
        return count

    def _number(self, form: str) -> int | float | bool:
        (number,) = struct.unpack(f"<{form}", self._bytes(struct.calcsize(f"<{form}")))
        return number

    def _bytes(self, size: int) -> bytes:
        data = self._stream.read(size)
        if len(data) < size:
            raise ConfigError(f"{self._file}: cut short: its header does not end")
        return data


HEADER_BYTES_MAX = 100 * 1000**2
"""The limit of safetensors itself; a larger length means a file in another format."""

Offset = Annotated[int, msgspec.Meta(ge=0)]


class SafetensorsEntry(msgspec.Struct, frozen=True):
    """One tensor; its offsets are relative to the end of the header."""

    dtype: str
    shape: tuple[Offset, ...]
    data_offsets: tuple[Offset, Offset]


class SafetensorsHeader(msgspec.Struct, frozen=True):
    """The header of a file. `data_start` is the offset of the tensors."""

    data_start: int
    entries: dict[str, SafetensorsEntry]

    @property
    def bytes_expected(self) -> int:
        ends = (entry.data_offsets[1] for entry in self.entries.values())
        return self.data_start + max(ends, default=0)


def read_header(file: Path) -> SafetensorsHeader:
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > HEADER_BYTES_MAX:
                raise ConfigError(f"{file}: not a safetensors file: no header")
            text = stream.read(length)
        if len(text) < length:
            raise ConfigError(f"{file}: cut short: its header has {len(text)} of {length} bytes")
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = {
            name: msgspec.json.decode(entry, type=SafetensorsEntry) for name, entry in raw.items()
        }
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file}: not a safetensors file: {error}") from error
    return SafetensorsHeader(8 + length, entries)


SAFETENSORS_DTYPES = {"BF16": Dtype.BFLOAT16, "F16": Dtype.FLOAT16, "F32": Dtype.FLOAT32}
GGUF_DTYPES = {0: Dtype.FLOAT32, 1: Dtype.FLOAT16, 30: Dtype.BFLOAT16}
"""Dtypes that are loaded unchanged, by their GGUF type code."""
SCALE_BYTES = 2
GGUF_GROUPED_BYTES = {
    2: grouped_bytes(4, 32, zeros=False, scale_bytes=SCALE_BYTES),  # Q4_0
    3: grouped_bytes(4, 32, zeros=True, scale_bytes=SCALE_BYTES),  # Q4_1
    6: grouped_bytes(5, 32, zeros=False, scale_bytes=SCALE_BYTES),  # Q5_0
    7: grouped_bytes(5, 32, zeros=True, scale_bytes=SCALE_BYTES),  # Q5_1
    8: grouped_bytes(8, 32, zeros=False, scale_bytes=SCALE_BYTES),  # Q8_0
    12: grouped_bytes(4, 32, zeros=True, scale_bytes=SCALE_BYTES),  # Q4_K
    13: grouped_bytes(5, 32, zeros=True, scale_bytes=SCALE_BYTES),  # Q5_K
    14: grouped_bytes(6, 16, zeros=False, scale_bytes=SCALE_BYTES),  # Q6_K
    20: grouped_bytes(4, 32, zeros=False, scale_bytes=SCALE_BYTES),  # IQ4_NL
    39: grouped_bytes(4, 32, zeros=False, scale_bytes=SCALE_BYTES),  # MXFP4
}
"""Bytes of a weight whose codes and scales are packed, by its GGUF type code."""
GGUF_GPU_BYTES = GGUF_GROUPED_BYTES | {
    6: grouped_bytes(8, 32, zeros=False, scale_bytes=SCALE_BYTES),  # Q5_0
    7: grouped_bytes(8, 32, zeros=True, scale_bytes=SCALE_BYTES),  # Q5_1
    13: grouped_bytes(8, 32, zeros=True, scale_bytes=SCALE_BYTES),  # Q5_K
    14: grouped_bytes(8, 16, zeros=False, scale_bytes=SCALE_BYTES),  # Q6_K
    20: grouped_bytes(8, 32, zeros=False, scale_bytes=SCALE_BYTES),  # IQ4_NL
}
"""The same on a GPU, which has codes of other widths, and of values in no order, as bytes."""
GGUF_TABLES = ("token_embd.", "output.")
"""The embedding and the head, which a GPU has in the model's dtype."""
GGUF_WIDE_SCALES = {12: 4 / 32, 13: 4 / 32, 14: 2 / 16}
"""Bytes more if activations are float32, of the types whose scales have two levels."""
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
    grouped: int = 0
    """Those in blocks of a GGUF file whose codes and scales can be packed."""
    grouped_bytes: int = 0
    """Their size when packed."""
    gpu_grouped: int = 0
    """Those of them that a GPU keeps so, too."""
    gpu_grouped_bytes: int = 0
    """Their size there."""
    wide_scale_bytes: int = 0
    """What their scales take more if activations are float32."""


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
    if files.format is LoadFormat.GGUF:
        return _gguf(there, passed_over)
    counts: Counter[Dtype | None] = Counter()
    size_bytes = quantized = 0
    for file in there:
        for name, dtype, count, tensor_bytes in _safetensors(file):
            if name.startswith(passed_over):
                continue
            size_bytes += tensor_bytes
            if dtype is None:
                weights = quantization and quantization.weight_count(name, count)
                quantized += count if weights is None else weights
            elif quantization is None or not quantization.is_auxiliary(name):
                counts[dtype] += count
    ((dtype, _),) = counts.most_common(1) or ((None, 0),)
    return Weights(counts.total() + quantized, size_bytes, dtype, quantized)


def _safetensors(file: Path) -> Iterator[tuple[str, Dtype | None, int, int]]:
    for name, entry in read_header(file).entries.items():
        if entry.dtype in NOT_WEIGHTS:
            continue
        start, end = entry.data_offsets
        dtype = SAFETENSORS_DTYPES.get(entry.dtype)
        yield text_name(name), dtype, math.prod(entry.shape), end - start


def _gguf(files: list[Path], passed_over: tuple[str, ...]) -> Weights:
    counts: Counter[Dtype | None] = Counter()
    size_bytes = grouped = gpu_grouped = 0
    packed_bytes = wide_scale_bytes = gpu_bytes = 0.0
    for file in files:
        in_order = sorted(read_gguf(file).tensors.items(), key=lambda item: item[1].start)
        ends = [*(tensor.start for _, tensor in in_order[1:]), file.stat().st_size]
        for (name, tensor), end in zip(in_order, ends, strict=True):
            if name.startswith(passed_over):
                continue
            counts[GGUF_DTYPES.get(tensor.kind)] += tensor.count
            size_bytes += end - tensor.start
            if (each := GGUF_GROUPED_BYTES.get(tensor.kind)) is not None:
                grouped += tensor.count
                packed_bytes += tensor.count * each
                wide_scale_bytes += tensor.count * GGUF_WIDE_SCALES.get(tensor.kind, 0.0)
                if not name.startswith(GGUF_TABLES):
                    gpu_grouped += tensor.count
                    gpu_bytes += tensor.count * GGUF_GPU_BYTES[tensor.kind]
    ((dtype, _),) = counts.most_common(1) or ((None, 0),)
    return Weights(
        counts.total(),
        size_bytes,
        dtype,
        grouped=grouped,
        grouped_bytes=round(packed_bytes),
        gpu_grouped=gpu_grouped,
        gpu_grouped_bytes=round(gpu_bytes),
        wide_scale_bytes=round(wide_scale_bytes),
    )
