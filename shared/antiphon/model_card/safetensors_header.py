"""Reads the header of a safetensors file: names and offsets of tensors, not the tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from antiphon.config.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

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
