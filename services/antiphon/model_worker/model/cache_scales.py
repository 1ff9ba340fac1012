"""Scales of an 8-bit KV cache, read from a checkpoint or a file.

A checkpoint has a number for each layer and kind beside the layer's attention: `k_scale` and
`v_scale`, or `output_scale` of the key and value projections, or one `kv_scale` for both. A file is
that of SGLang's `--quantization-param-path`: a number for each layer, for both.
"""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from antiphon.kernels.kv import KvScales
from antiphon.model_worker.model.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from antiphon.model_worker.model.formats.stored_tensor import StoredTensor
    from antiphon.model_worker.model.weights import Checkpoint

_SCALE = re.compile(
    r"(?:^|\.)(?P<layer>\d+)\.(?:.*\.)?"
    r"(?:(?P<kind>k|v|kv)_scale|(?P<proj>k|v)_proj\.output_scale)$"
)


def take_scales(checkpoint: Checkpoint, layers: int) -> dict[int, KvScales]:
    """Remove the scales from a checkpoint, by layer: none of them is a weight.

    A layer that has a scale for keys alone, or for values alone, uses it for both.
    """
    found: dict[int, dict[str, float]] = {}
    for name in list(checkpoint.tensors):
        if (match := _SCALE.search(name)) is None:
            continue
        tensor = checkpoint.tensors.pop(name)
        if (layer := int(match["layer"])) < layers:
            found.setdefault(layer, {})[match["kind"] or match["proj"]] = _number(name, tensor)
    return {layer: _both(scales) for layer, scales in found.items()}


def _number(name: str, tensor: StoredTensor) -> float:
    if tensor.count != 1:
        raise ModelLoadError(f"weights: {name} has {tensor.count} elements instead of one")
    scale = float(tensor.decode(tensor.data.read()).float())
    tensor.data.release()
    return _positive(name, scale)


def _positive(name: str, scale: float) -> float:
    if not (math.isfinite(scale) and scale > 0):
        raise ModelLoadError(f"{name} is {scale}; it must be positive and finite")
    return scale


def _both(scales: Mapping[str, float]) -> KvScales:
    one = scales.get("kv") or max(scales.values())
    return KvScales(scales.get("k", one), scales.get("v", one))


class _Cache(msgspec.Struct):
    scaling_factor: dict[str, dict[str, float]]


class _KvScalesFile(msgspec.Struct):
    kv_cache: _Cache


def read_scales(path: str, layers: Iterable[int]) -> dict[int, KvScales]:
    """Read scales from `{"kv_cache": {"scaling_factor": {"0": {"0": 0.02, ...}}}}`, by layer."""
    try:
        file = msgspec.json.decode(Path(path).read_bytes(), type=_KvScalesFile)
    except (OSError, msgspec.DecodeError) as error:
        raise ModelLoadError(f"cache.scales = {path}: {error}") from error
    of_rank = file.kv_cache.scaling_factor.get("0", {})
    found: dict[int, KvScales] = {}
    for layer in layers:
        scale = of_rank.get(str(layer))
        if scale is None:
            raise ModelLoadError(f"cache.scales = {path}: layer {layer} has no scale")
        scale = _positive(f"{path}: layer {layer}", scale)
        found[layer] = KvScales(scale, scale)
    return found


def scales_digest(scales: Mapping[int, KvScales]) -> str:
    if not scales:
        return ""
    return hashlib.sha256(msgspec.msgpack.encode(sorted(scales.items()))).hexdigest()
