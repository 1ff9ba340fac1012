"""The operations of the CPU extension: csrc/elementwise.h and csrc/attention.h.

Each rounds where its reference rounds; they differ from it in the order in which a norm sums
squares and in the last bits of an exponential.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from antiphon.kernels.cpu import extension
from antiphon.kernels.kv import UNSCALED, KvScales, key_pages_shape, store_kv, value_pages_shape

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.kernels.activation import ActivationKind
    from antiphon.kernels.attention import AttentionMetadata, TextRows
    from antiphon.kernels.recurrent import LayerStates, Recurrence, StateMetadata
    from antiphon.kernels.rotary import QkNormWeights


class CompiledQkNorms(Protocol):
    """QK norms of the CPU extension, which keep their weights."""


PASS_PAGE_TOKENS = 16
"""Tokens in a page of keys and values that are kept for one pass only."""


def __getattr__(name: str) -> object:
    """An operation that takes its arguments as they are: the extension's own function."""
    if name.startswith("__"):  # what an import asks for, also where the extension is not built
        raise AttributeError(name)
    return getattr(extension.load(), name)


def qk_norm_rope_store(
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    places: Tensor,
    norms: QkNormWeights | None,
    scales: KvScales = UNSCALED,
) -> Tensor:
    compiled = None if norms is None else compile_qk_norms(norms)
    return extension.load().qk_norm_rope_store(
        heads, cos, sin, keys, values, places, compiled, scales
    )


def recurrence(
    projected: Tensor, layer: Recurrence, states: LayerStates, rows: StateMetadata
) -> Tensor:
    return layer.compiled.forward(
        projected, states.conv_states, states.recurrent_states, rows.compiled
    )


def compile_qk_norms(norms: QkNormWeights) -> CompiledQkNorms:
    library = extension.load()
    return library.QkNorms(
        kind=getattr(library.NormKind, norms.kind),
        over_token=norms.over == "token",
        query=norms.query,
        key=norms.key,
        eps=norms.eps,
    )


def gate(gate_up: Tensor, activation: ActivationKind) -> Tensor:
    library = extension.load()
    return library.gate(gate_up, getattr(library.Activation, activation))


def activate(x: Tensor, activation: ActivationKind) -> Tensor:
    library = extension.load()
    return library.activate(x, getattr(library.Activation, activation))


def bidirectional_attention(
    q: Tensor, k: Tensor, v: Tensor, texts: TextRows, scale: float, window: int | None
) -> Tensor:
    # Only here: that module names the functions of this one.
    from antiphon.kernels.attention import AttentionMetadata, KvShape  # noqa: PLC0415

    heads, size = k.shape[1:]
    shape = KvShape(
        PASS_PAGE_TOKENS, heads, q.shape[1] // heads, size, q.dtype, window, bidirectional=True
    )
    rows = AttentionMetadata.of_texts(shape, np.array(texts.lengths, np.int32))
    pages = 1 + int(rows.page_table.max())
    room = (pages, PASS_PAGE_TOKENS, heads, size, q.dtype)
    keys, values = k.new_empty(key_pages_shape(*room)), v.new_empty(value_pages_shape(*room))
    store_kv(k, v, keys, values, rows.slot_mapping)
    return extension.load().paged_attention(
        q, keys, values, rows.compiled, scale, (UNSCALED.key, UNSCALED.value)
    )


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: AttentionMetadata,
    scale: float,
    scales: KvScales = UNSCALED,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    return extension.load().paged_attention(
        q, keys, values, rows.compiled, scale, scales, softcap, sinks
    )
