"""Triton's language in its interpreter: narrow floats, and functions replaced once a launch.

The interpreter computes bfloat16 and float8 as integers, as numpy has no such types. A value of
them is a float32 here that such a type has: each operation computes in float32, as a GPU does, and
its result is rounded by torch. In memory they have their own bytes.

The interpreter replaces the functions of the language for a launch, and again for each call of a
function within a kernel, which took 0.6 of the time of some launches: here it does so once.
"""

# pyright: basic, reportAttributeAccessIssue=false
# ruff: noqa: ANN401, SLF001 (parts of the interpreter)

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

if TYPE_CHECKING:
    from types import FunctionType

    from numpy.typing import NDArray

_TYPES = {
    tl.bfloat16: (torch.bfloat16, torch.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8),
    tl.float8e5: (torch.float8_e5m2, torch.uint8),
}
"""By Triton's type torch's, and integers of as many bits."""
_WIDE = np.dtype(np.float32)
_builder = interpreter.InterpreterBuilder
_np_dtype, _fits = interpreter._get_np_dtype, interpreter._validate_np_data_size
_load, _store = _builder.create_masked_load, _builder.create_masked_store
_cast, _convert, _bitcast = _builder.cast_impl, _builder.create_fp_to_fp, _builder.create_bitcast
_absolute, _dot = _builder.create_fabs, _builder.create_dot
Handle = interpreter.TensorHandle
_patch = interpreter._patch_lang


def install() -> None:
    """Let this process's interpreter do so."""
    interpreter._patch_lang = _patch_once
    interpreter._get_np_dtype = _numpy_dtype
    interpreter._validate_np_data_size = _valid_size
    Handle.__post_init__ = _round
    _builder.create_masked_load = _masked_load
    _builder.create_masked_store = _masked_store
    _builder.cast_impl = _cast_impl
    _builder.create_fp_to_fp = _fp_to_fp
    _builder.create_bitcast = _no_bitcast
    _builder.create_fabs = _fabs
    _builder.create_dot = _matmul
    _builder.get_bf16 = lambda _, value: Handle(np.array([value], _WIDE), tl.bfloat16)


def _is_narrow(kind: Any) -> bool:
    return not kind.scalar.is_ptr() and kind.scalar in _TYPES


def _numpy_dtype(kind: Any) -> np.dtype[Any]:
    return _WIDE if _is_narrow(kind) else _np_dtype(kind)


def _valid_size(data: NDArray[Any], kind: Any) -> bool:
    return data.itemsize <= _WIDE.itemsize if _is_narrow(kind) else _fits(data, kind)


def _round(handle: Any) -> None:
    """Every result of an operation passes here."""
    if not _valid_size(handle.data, handle.dtype):
        raise ValueError(f"{handle.data.dtype} is wider than {handle.dtype}")
    if _is_narrow(handle.dtype) and handle.data.dtype != np.bool_:  # of a comparison
        handle.data = _rounded(handle.data, handle.dtype.scalar).float().numpy()


def _rounded(data: NDArray[Any], kind: Any) -> torch.Tensor:
    wide = np.ascontiguousarray(data, _WIDE).reshape(data.shape)
    return torch.from_numpy(wide).to(_TYPES[kind][0])


def _bits(data: NDArray[Any], kind: Any) -> NDArray[Any]:
    return _rounded(data, kind).view(_TYPES[kind][1]).numpy()


def _masked_load(
    self: Any, ptrs: Any, mask: Any, other: Any, cache: Any, eviction: Any, is_volatile: Any
) -> Any:
    kind = ptrs.get_element_ty()
    if not _is_narrow(kind):
        return _load(self, ptrs, mask, other, cache, eviction, is_volatile)
    replaced = np.zeros(ptrs.data.shape, _WIDE) if other is None else other.data
    bits = _bits(replaced, kind)
    loaded = interpreter._interpreter.load(ptrs.data, mask.data, bits, bits.dtype)
    return Handle(torch.from_numpy(loaded).view(_TYPES[kind][0]).float().numpy(), kind)


def _masked_store(self: Any, ptrs: Any, value: Any, mask: Any, cache: Any, eviction: Any) -> Any:
    kind = ptrs.get_element_ty()
    if not _is_narrow(kind):
        return _store(self, ptrs, value, mask, cache, eviction)
    bits = _bits(value.data, kind)
    return interpreter._interpreter.store(ptrs.data, bits, mask.data)


def _cast_impl(self: Any, source: Any, kind: Any) -> Any:
    if _is_narrow(source.dtype) or _is_narrow(kind):
        return Handle(source.data.astype(_numpy_dtype(kind)), kind.scalar)
    return _cast(self, source, kind)


def _fp_to_fp(self: Any, source: Any, kind: Any, rounding: Any) -> Any:
    if _is_narrow(source.dtype) or _is_narrow(kind):
        return _cast_impl(self, source, kind)
    return _convert(self, source, kind, rounding)


def _no_bitcast(self: Any, source: Any, kind: Any) -> Any:
    assert not _is_narrow(source.dtype), "the bits of a narrow float are in memory only"
    assert not _is_narrow(kind), "the bits of a narrow float are in memory only"
    return _bitcast(self, source, kind)


def _fabs(self: Any, source: Any) -> Any:
    if _is_narrow(source.dtype):
        return Handle(np.abs(source.data), source.dtype.scalar)
    return _absolute(self, source)


def _matmul(self: Any, left: Any, right: Any, total: Any, precision: Any, imprecise: Any) -> Any:
    if _is_narrow(left.dtype) or _is_narrow(right.dtype):
        products = np.matmul(left.data, right.data, dtype=total.data.dtype)
        return Handle(products + total.data, total.dtype.scalar)
    return _dot(self, left, right, total, precision, imprecise)


class _Patches:
    """What a launch and the functions that it calls have replaced."""

    def __init__(self) -> None:
        self._scopes: list[Any] = []
        self._modules: list[Any] = []

    def add(self, function: FunctionType) -> None:
        modules = [each for each in (tl, tl.core) if _sees(function, each)]
        if any(each not in self._modules for each in modules):
            self._modules += modules
            self._scopes.append(_patch(function))

    def restore(self) -> None:
        _open.remove(self)
        for scope in reversed(self._scopes):
            scope.restore()


def _patch_once(function: FunctionType) -> _Patches:
    """Called for a kernel, which restores what it gets, and for functions, which do not."""
    if not _open:
        _open.append(_Patches())
    _open[0].add(function)
    return _open[0]


def _sees(function: FunctionType, module: Any) -> bool:
    return any(value is module for value in function.__globals__.values())


_open: list[_Patches] = []
"""Those of the launch that runs."""
