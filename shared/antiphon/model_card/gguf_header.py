"""Reads the header of a GGUF file: its metadata, and the names and offsets of its tensors.

Parsed here and not by the `gguf` package, since processes without numpy need it as well, and since
that package makes an array of each string of a vocabulary: 6.6 s for 150,000 strings, here 0.2 s.

Source: the format's specification, docs/gguf.md of the ggml project, versions 2 and 3.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING

import msgspec

from antiphon.config.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

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
        placed = [self._tensor() for _ in range(tensors)]
        alignment = settings.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ConfigError(f"{self._file}: general.alignment = {alignment!r}")
        size_bytes = self._stream.tell()
        start = -(-size_bytes // alignment) * alignment
        tensors_at = {
            name: msgspec.structs.replace(at, start=start + at.start) for name, at in placed
        }
        return GgufHeader(settings, tensors_at, lists, size_bytes)

    def _tensor(self) -> tuple[str, GgufTensor]:
        name = self._string()
        sizes = [int(self._number("Q")) for _ in range(int(self._number("I")))]
        kind, offset = int(self._number("I")), int(self._number("Q"))
        # The file names the innermost dimension first.
        return name, GgufTensor(tuple(reversed(sizes)), kind, offset)

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
