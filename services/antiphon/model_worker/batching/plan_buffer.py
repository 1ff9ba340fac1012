"""A plan as one contiguous buffer, as a recording keeps it.

A plan is built of arrays of its own, since it shares most of them with the plan before it; what
sends it elsewhere packs it, beside the loop and not in it. Layout: the length of the header, the
header in MessagePack, in which an array is its type, shape and offset, then all arrays, each
aligned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, cast

import msgspec
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.generic]

Packed = TypeVar("Packed", bound=msgspec.Struct)

_ALIGNMENT = 8
_LENGTH_BYTES = 8


def pack(value: msgspec.Struct) -> bytearray:
    """A plan, an outcome, or a struct of them, as one buffer."""
    arrays: list[tuple[int, Array]] = []
    size = 0

    def place(found: object) -> tuple[str, tuple[int, ...], int]:
        nonlocal size
        assert isinstance(found, np.ndarray), f"{type(found)} is no part of a plan"
        array, offset = cast("Array", found), size
        arrays.append((offset, array))
        size = _aligned(offset + array.nbytes)
        return array.dtype.str, array.shape, offset

    header = msgspec.msgpack.encode(value, enc_hook=place)
    first = _aligned(_LENGTH_BYTES + len(header))
    buffer = bytearray(first + size)
    buffer[:_LENGTH_BYTES] = len(header).to_bytes(_LENGTH_BYTES, "little")
    buffer[_LENGTH_BYTES : _LENGTH_BYTES + len(header)] = header
    for offset, array in arrays:
        _view(buffer, array.dtype, array.shape, first + offset)[...] = array
    return buffer


def unpack(buffer: bytearray, kind: type[Packed]) -> Packed:
    """What was packed; its arrays are views of the buffer, and as writable as that.

    Raises:
        msgspec.DecodeError: The buffer is damaged, or holds something else.
    """
    length = int.from_bytes(buffer[:_LENGTH_BYTES], "little")
    header = memoryview(buffer)[_LENGTH_BYTES : _LENGTH_BYTES + length]
    first = _aligned(_LENGTH_BYTES + length)

    def view(_: type, value: object) -> Array:
        dtype, shape, offset = msgspec.convert(value, tuple[str, tuple[int, ...], int])
        return _view(buffer, np.dtype(dtype), shape, first + offset)

    try:
        return msgspec.msgpack.decode(header, type=kind, dec_hook=view)
    except (ValueError, TypeError, OverflowError) as error:
        raise msgspec.DecodeError(str(error)) from error


def _view(buffer: bytearray, dtype: np.dtype[np.generic], shape: tuple[int, ...], at: int) -> Array:
    return np.ndarray(shape, dtype, buffer, at)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
