"""Loads a model folder."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import math
import re
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

import antiphon.config.quantization as schemes
from antiphon.config.errors import ConfigError
from antiphon.config.model import LoadFormat
from antiphon.kernels.kv import KvScales, KvSpec
from antiphon.kernels.latent import LatentSizes
from antiphon.kernels.triton.backend import INTERPRETER
from antiphon.layers.methods import LinearMethod, unsupported_reason
from antiphon.layers.quantization.eight_bit import (
    Fp8Storage,
    Int8Storage,
    LlmInt8Storage,
    OnlineFp8Storage,
    TorchaoInt8Storage,
)
from antiphon.layers.quantization.four_bit import (
    BitsAndBytesStorage,
    Mxfp4Storage,
    Nvfp4Storage,
    TorchaoInt4Storage,
)
from antiphon.layers.quantization.word_packed import AwqStorage, GptqStorage, PackQuantizedStorage
from antiphon.layers.weights import BuildContext, CheckpointQuantization, Pp, SingleRank, Tp
from antiphon.model_card.files import ModelFiles, ModelLocation, files_at
from antiphon.model_card.quantization_config import read_quantization
from antiphon.model_worker.model.config_file import read_config
from antiphon.model_worker.model.decoder import Decoder
from antiphon.model_worker.model.draft_head import DraftHead
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.model.llama_parts import read_spec
from antiphon.model_worker.model.registry import family_of
from antiphon.model_worker.model.spec import HeadSpec, ModelSpec
from antiphon.model_worker.model.transformers_backend.support import load_transformers
from antiphon.model_worker.model.weights import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from antiphon.layers.quantization.storage import StorageLayout
    from antiphon.model_worker.model.formats.files import StoredTensor
    from antiphon.model_worker.model.transformers_backend.model import TransformersDecoder
    from antiphon.resolve.resolved_config import ResolvedConfig

log = logging.getLogger(__name__)

_BASE = "model."
"""The prefix of tensor names in most checkpoints of models with a head."""
_SCALE = re.compile(
    r"(?:^|\.)(?P<layer>\d+)\.(?:.*\.)?"
    r"(?:(?P<kind>k|v|kv)_scale|(?P<proj>k|v)_proj\.output_scale)$"
)
"""Scales of an 8-bit KV cache, a number for each layer and kind beside its attention: `k_scale` and
`v_scale`, or `output_scale` of the key and value projections, or one `kv_scale` for both."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CACHE_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""Dtypes of an 8-bit KV cache."""
LAYOUTS: Mapping[type[schemes.QuantizationScheme], type[Any]] = {
    schemes.Fp8: Fp8Storage,
    schemes.OnlineFp8: OnlineFp8Storage,
    schemes.Int8: Int8Storage,
    schemes.LlmInt8: LlmInt8Storage,
    schemes.TorchaoInt8: TorchaoInt8Storage,
    schemes.TorchaoInt4: TorchaoInt4Storage,
    schemes.Awq: AwqStorage,
    schemes.Gptq: GptqStorage,
    schemes.Packed: PackQuantizedStorage,
    schemes.BitsAndBytes4: BitsAndBytesStorage,
    schemes.Mxfp4: Mxfp4Storage,
    schemes.Nvfp4: Nvfp4Storage,
}
"""The layout of each scheme, whose fields are those of the scheme by name."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder with its weights, on one rank.

    Attributes:
        kv_scales: Scales of the 8-bit KV cache by layer; layers that are not listed have scale 1.
    """

    spec: ModelSpec
    decoder: Decoder | DraftHead | TransformersDecoder
    build: BuildContext
    kv_scales: Mapping[int, KvScales] = field(default_factory=dict[int, "KvScales"])

    @property
    def own_decoder(self) -> Decoder:
        assert isinstance(self.decoder, Decoder), "its layers are those of transformers"
        return self.decoder

    @property
    def draft_head(self) -> DraftHead:
        assert isinstance(self.decoder, DraftHead), "a model on its own"
        return self.decoder


def load(
    place: ModelLocation,
    plan: ResolvedConfig,
    *,
    tp: Tp | None = None,
    pp: Pp | None = None,
    attention: Tp | None = None,
) -> LoadedModel:
    """Build the decoder that config.json describes and load its weights as planned.

    A plan that pools leaves out the head that computes logits, even if the checkpoint has it.
    `tp` is this rank in a tensor-parallel group, unset for a single rank; `pp` likewise its stage,
    and `attention` the ranks that attend to the same requests, where not all do.

    Raises:
        ModelLoadError: Anything is missing, unknown or does not fit; raised before anything runs.
    """
    own = plan.implementation.value != "transformers"
    try:
        files = files_at(place)
        config = read_config(files)
        spec = read_spec(family_of(config.architectures, files), config) if own else None
        stored = _quantization(files, plan.quantization.value)
    except ConfigError as error:
        raise ModelLoadError(str(error)) from error
    dtype, device = DTYPES[plan.dtype.value], _device(plan.device.value)
    linear, quantized = LinearMethod(plan.linear.value), LinearMethod(plan.quantized.value)
    for method in {linear, quantized}:
        if lacks := unsupported_reason(method, device, dtype):
            raise ModelLoadError(
                f"linear weights cannot be stored as {method.value!r} here: {lacks}"
            )
    cache_dtype = CACHE_DTYPES.get(plan.cache_dtype.value)
    build = BuildContext(
        tp or SingleRank(),
        dtype,
        device,
        cache_dtype=cache_dtype,
        ep_ranks=plan.ep_ranks.value,
        pp=pp,
        attention=attention,
        interpreted=plan.device.value == INTERPRETER,
    )
    if spec is None:
        log.info(
            "transformers' own modules run this model",
            extra={"architectures": config.architectures, "reason": plan.implementation.reason},
        )
        decoder = load_transformers(
            files, config, build, linear.value, quantized=stored is not None
        )
        spec, scales = decoder.spec, {}
        if cache_dtype:
            scales = take_scales(Checkpoint.open(files), len(spec.layers))
    else:
        if build.ep_ranks > 1 and not spec.has_experts:
            raise ModelLoadError(f"{files.folder}: parallel.ep_size: this model has no experts")
        if plan.pooling.value is not None:
            spec = _without_logits(spec)
        if stored is not None:
            build = replace(build, quantization=quantized_linears(stored, spec, quantized))
        elif files.format is LoadFormat.GGUF and quantized is LinearMethod.GROUPED:
            # The gguf package is slow to import.
            from antiphon.model_worker.model.formats.gguf import gguf_storage  # noqa: PLC0415

            storage = gguf_storage(files.weights)
            build = replace(build, quantization=CheckpointQuantization(quantized, storage))
        try:
            decoder = (Decoder if spec.draft_head is None else DraftHead)(spec, build, linear)
            checkpoint = Checkpoint.open(files, list(decoder.sources()))
            scales = take_scales(checkpoint, len(spec.layers))
            load_weights(decoder, checkpoint, spec, stored)
        except ValueError as error:
            raise ModelLoadError(f"{files.folder}: {error}") from error
    scales = _scales(scales, spec, build, plan.cache_scales.value)
    return LoadedModel(spec, decoder, build, scales)


def _device(name: str) -> torch.device:
    return torch.device("cpu" if name == INTERPRETER else name)


def load_weights(
    decoder: Decoder | DraftHead,
    checkpoint: Checkpoint,
    spec: ModelSpec,
    quantization: schemes.QuantizationConfig | None = None,
) -> None:
    """Copy a checkpoint into a decoder that has all layers."""
    sources = list(decoder.sources())
    # The checkpoint of a tied model may still contain the head, which equals the embedding.
    ignored = spec.ignored
    if isinstance(spec.head, HeadSpec) and spec.head.tied:
        ignored += (f"{spec.head.name}.weight",)
    based = isinstance(spec.head, HeadSpec) and spec.embedding.name.startswith(_BASE)
    heads = (f"{spec.head.name}.",) if isinstance(spec.head, HeadSpec) else ()
    checkpoint.add_prefix(_BASE if based else spec.prefix, (*heads, *spec.passed_over))
    checkpoint.rename_endings(dict(spec.old_endings))
    blank: tuple[str, ...] = ()
    if quantization is not None:
        checkpoint.rename_endings(quantization.spelled)
        ignored += quantization.ignored
        blank = quantization.blank
    checkpoint.unstack_experts(source.name for source in sources)
    count = len(spec.layers)
    further = range(count, count + spec.further_layers)
    passed_over = spec.passed_over
    if isinstance(decoder, Decoder):
        passed_over += decoder.elsewhere
    passed_over += tuple(spec.layer_name.format(index) + "." for index in further)
    checkpoint.compare(sources, ignored, blank, passed_over)
    if unread := sum(name.startswith(passed_over) for name in checkpoint.tensors):
        log.info("tensors of other parts are passed over", extra={"tensors": unread})
    checkpoint.load(sources)
    decoder.pack()


def _quantization(files: ModelFiles, planned: str) -> schemes.QuantizationConfig | None:
    gguf = files.format is LoadFormat.GGUF
    method = None if planned == "none" else schemes.QuantizationMethod(planned)
    quantization = schemes.choose_quantization(read_quantization(files.config()), method, gguf=gguf)
    if files.format is LoadFormat.DUMMY and quantization is not None and not quantization.online:
        raise ConfigError(
            "dummy weights are plain numbers, and config.json says quantization_config: override "
            'it with {"quantization_config": null}'
        )
    if method in schemes.TORCHAO and importlib.util.find_spec("torchao") is None:
        raise ConfigError(f"model.quantization = {method}: the torchao package is missing")
    return quantization


def _scales(
    stored: dict[int, KvScales], spec: ModelSpec, build: BuildContext, file: str
) -> dict[int, KvScales]:
    """The KV cache scales by layer: those of the configured file, or else the checkpoint's."""
    if build.cache_dtype is None:
        return {}
    keeping = [
        layer
        for cache, layers in spec.cache_groups()
        if isinstance(cache, KvSpec | LatentSizes)
        for layer in layers
    ]
    scales = read_scales(file, keeping) if file else stored
    if missing := len(set(keeping) - scales.keys()):
        log.warning("no scales of keys and values: they are 1.0", extra={"layers_without": missing})
    return scales


def _without_logits(spec: ModelSpec) -> ModelSpec:
    """A model that outputs its residual stream: its checkpoint may lack the name prefix, too."""
    if not isinstance(spec.head, HeadSpec):
        return spec
    named = spec.embedding.name.startswith(_BASE)
    return msgspec.structs.replace(
        spec,
        head=None,
        ignored=(*spec.ignored, f"{spec.head.name}.weight", f"{spec.head.name}.bias"),
        prefix=_BASE if named else spec.prefix,
    )


def storage_of(scheme: schemes.QuantizationScheme) -> StorageLayout:
    layout = LAYOUTS[type(scheme)]
    return layout(**{field.name: getattr(scheme, field.name) for field in fields(layout)})


def quantized_linears(
    config: schemes.QuantizationConfig, spec: ModelSpec, method: LinearMethod
) -> CheckpointQuantization:
    """What a model's layers need to know of the quantization of config.json or of the settings."""
    return CheckpointQuantization(method, partial(_storage, config, spec))


def _storage(
    config: schemes.QuantizationConfig, spec: ModelSpec, name: str
) -> StorageLayout | None:
    head = isinstance(spec.head, HeadSpec) and name == spec.head.name
    inputs = spec.per_layer_embedding
    # Embedding tables are never quantized.
    looked_up = {spec.embedding.name, *(() if inputs is None else (inputs.table,))}
    if name in looked_up or (head and not config.head):
        return None
    scheme = config.scheme(name)
    return None if scheme is None else storage_of(scheme)


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
    """Read scales from `{"kv_cache": {"scaling_factor": {"0": {"0": 0.02, ...}}}}`, by layer.

    The file is that of SGLang's `--quantization-param-path`: a number for each layer, for both.
    """
    try:
        file = msgspec.json.decode(Path(path).read_bytes(), type=_KvScalesFile)
    except (OSError, msgspec.DecodeError) as error:
        raise ModelLoadError(f"cache.scales = {path}: {error}") from error
    of_rank = file.kv_cache.scaling_factor.get("0", {})
    found: dict[int, KvScales] = {}
    for layer in layers:
        if (scale := of_rank.get(str(layer))) is None:
            raise ModelLoadError(f"cache.scales = {path}: layer {layer} has no scale")
        scale = _positive(f"{path}: layer {layer}", scale)
        found[layer] = KvScales(scale, scale)
    return found


def scales_digest(scales: Mapping[int, KvScales]) -> str:
    if not scales:
        return ""
    return hashlib.sha256(msgspec.msgpack.encode(sorted(scales.items()))).hexdigest()
