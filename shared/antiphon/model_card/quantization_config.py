"""Parses `quantization_config` of config.json, in each tool's form, to `QuantizationConfig`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, TypeVar

import msgspec

import antiphon.config.quantization as schemes
from antiphon.config.errors import ConfigError
from antiphon.config.quantization import Pattern, QuantizationConfig, QuantizationMethod, Rule
from antiphon.model_card.config_json import parse_json

T = TypeVar("T")

_SOURCE = "config.json: quantization_config"
CACHE_SCALES = (".q_scale", ".k_zero_point", ".v_zero_point")
"""Suffixes for a quantized KV cache, besides the scales of keys and values."""
ACTIVATION_SCALES = (
    *(".input_scale", ".activation_scale", ".output_scale"),
    *(".input_zero_point", ".input_global_scale"),
)
"""Suffixes of static activation scales, which are not used."""


def read_quantization(config: bytes) -> QuantizationConfig | None:
    """Read the quantization from config.json; None: not quantized."""
    parsed = _decode(config, _ModelQuantization)
    written = (parsed.quantization_config, parsed.compression_config)
    if (raw := next((raw for raw in written if bytes(raw) != b"null"), None)) is None:
        return None
    method = _decode(raw, _Method).quant_method
    if method not in METHODS:
        raise _refused(f"quant_method {method!r} is not supported, only {', '.join(METHODS)}")
    return _decode(raw, METHODS[method]).config()


class _ModelQuantization(msgspec.Struct):
    # Not `Raw | None`, which msgspec treats as None alone.
    quantization_config: msgspec.Raw = msgspec.Raw(b"null")
    compression_config: msgspec.Raw = msgspec.Raw(b"null")
    """Its name in the first versions of compressed-tensors."""


class _Method(msgspec.Struct):
    quant_method: str = ""


Names = list[str] | None


class _Unconverted(msgspec.Struct, kw_only=True):
    modules_to_not_convert: Names = None


class _Fp8(_Unconverted):
    activation_scheme: str = "dynamic"
    weight_block_size: tuple[int, int] | None = None
    ignored_layers: Names = None

    def config(self) -> QuantizationConfig:
        scheme = schemes.Fp8(scale="tensor")
        if self.weight_block_size is not None:
            scheme = schemes.Fp8(scale="block", block=self.weight_block_size)
        return QuantizationConfig(
            method=QuantizationMethod.FP8,
            rules=schemes.every_linear(scheme),
            plain=_modules(self.modules_to_not_convert or self.ignored_layers),
            ignored=(*ACTIVATION_SCALES, *CACHE_SCALES),
            # Multiplied despite its name: the weights were divided by its inverse.
            spelled={".weight_scale_inv": ".weight_scale"},
        )


class _W8a8(_Unconverted):
    ignore: Names = None

    def config(self) -> QuantizationConfig:
        plain = _modules(self.modules_to_not_convert or self.ignore)
        return msgspec.structs.replace(schemes.W8A8_INT8, plain=plain)


class _Awq(_Unconverted):
    bits: int = 4
    group_size: int = 128
    version: str = "gemm"
    zero_point: bool = True

    def config(self) -> QuantizationConfig:
        _only("version", self.version.lower(), "gemm")
        _only("bits", self.bits, 4)
        if not self.zero_point:
            raise _refused("zero_point false is not supported")
        scheme = schemes.Awq(weight=".qweight", count=8, group=_group(self.group_size))
        plain = _modules(self.modules_to_not_convert)
        return QuantizationConfig(
            method=QuantizationMethod.AWQ, rules=schemes.every_linear(scheme), plain=plain
        )


class _Gptq(_Unconverted):
    bits: int
    group_size: int = 128
    desc_act: bool = False
    checkpoint_format: str = "gptq"
    lm_head: bool = False
    modules_in_block_to_quantize: list[list[str] | str] | None = None
    dynamic: Mapping[str, msgspec.Raw] | None = None

    def config(self) -> QuantizationConfig:
        _only("bits", self.bits, 2, 4, 8)
        _only("checkpoint_format", self.checkpoint_format or "gptq", "gptq", "gptq_v2")
        scheme = schemes.Gptq(
            weight=".qweight",
            count=32 // self.bits,
            bits=self.bits,
            group=_group(self.group_size),
            ordered=self.desc_act,
            zero_added=0 if self.checkpoint_format == "gptq_v2" else 1,
        )
        within = self.modules_in_block_to_quantize or ()
        named = [name for some in within for name in ([some] if isinstance(some, str) else some)]
        return QuantizationConfig(
            method=QuantizationMethod.GPTQ,
            rules=(Rule(_modules(named, head=True) or (schemes.EVERY,), scheme),),
            plain=(
                *_modules(self.modules_to_not_convert, head=self.lm_head),
                *_skipped(self.dynamic),
            ),
            head=self.lm_head,
            # With inputs in order, the tensor of group indices is redundant.
            ignored=() if self.desc_act else (".g_idx",),
            # AutoGPTQ writes a bias for every linear layer.
            blank=(".bias",),
        )


def _skipped(dynamic: Mapping[str, msgspec.Raw] | None) -> tuple[Pattern, ...]:
    """GPTQModel's rules for single layers: `-:` and a regular expression excludes them."""
    for rule in dynamic or ():
        if not rule.startswith("-:"):
            raise _refused(f"dynamic: {rule!r}: only -: rules are read")
    return tuple(_pattern(rule.removeprefix("-:"), "regex") for rule in dynamic or ())


class _BitsAndBytes(msgspec.Struct):
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_quant_storage: str | None = "uint8"
    llm_int8_skip_modules: Names = None

    def config(self) -> QuantizationConfig:
        _only("bnb_4bit_quant_storage", self.bnb_4bit_quant_storage or "uint8", "uint8")
        if self.load_in_4bit == self.load_in_8bit:
            raise _refused("one of load_in_4bit and load_in_8bit has to be true")
        scheme: schemes.QuantizationScheme = schemes.LlmInt8()
        if self.load_in_4bit:
            kind, nested = self.bnb_4bit_quant_type, self.bnb_4bit_use_double_quant
            scheme = schemes.BitsAndBytes4(count=2, kind=kind, nested=nested)
        return QuantizationConfig(
            method=QuantizationMethod.BITSANDBYTES,
            rules=schemes.every_linear(scheme),
            plain=_modules(self.llm_int8_skip_modules),
            ignored=(".weight_format",),
        )


class _Mxfp4(_Unconverted):
    def config(self) -> QuantizationConfig:
        plain = _modules(self.modules_to_not_convert)
        rules = schemes.every_linear(schemes.Mxfp4(weight="_blocks", count=2))
        return QuantizationConfig(method=QuantizationMethod.MXFP4, rules=rules, plain=plain)


class _Typed(msgspec.Struct, rename={"type": "_type", "data": "_data"}):
    type: str
    data: msgspec.Raw = msgspec.Raw(b"{}")


class _TorchaoData(msgspec.Struct):
    granularity: _Typed | None = None


class _Torchao(_Unconverted):
    quant_type: Mapping[str, _Typed]

    def config(self) -> QuantizationConfig:
        _only("quant_type", sorted(self.quant_type), ["default"])
        kind = self.quant_type["default"]
        _only("quant_type", kind.type, "Int8WeightOnlyConfig", "Float8WeightOnlyConfig")
        data = _decode(kind.data, _TorchaoData)
        if data.granularity is not None:
            _only("quant_type: granularity", data.granularity.type, "PerRow")
        weight = "._weight_qdata"
        scheme: schemes.QuantizationScheme = schemes.Int8(weight=weight)
        if kind.type == "Float8WeightOnlyConfig":
            scheme = schemes.Fp8(scale="channel", weight=weight)
        return QuantizationConfig(
            method=QuantizationMethod.TORCHAO,
            rules=schemes.every_linear(scheme),
            plain=_modules(self.modules_to_not_convert),
            spelled={weight: ".weight", "._weight_scale": ".weight_scale"},
            blank=("._weight_zero_point",),
        )


class _Arguments(msgspec.Struct):
    num_bits: int = 8
    type: Literal["int", "float"] = "int"
    symmetric: bool = True
    strategy: str | None = None
    group_size: int | None = None
    block_structure: tuple[int, int] | str | None = None
    dynamic: bool | str = False
    actorder: str | bool | None = None


class _Group(msgspec.Struct):
    targets: list[str]
    weights: _Arguments | None = None
    input_activations: _Arguments | None = None
    output_activations: _Arguments | None = None
    format: str | None = None


class _Sparsity(msgspec.Struct):
    format: str = "dense"


class _Compressed(msgspec.Struct):
    format: str = "dense"
    quantization_status: str = "compressed"
    config_groups: Mapping[str, _Group] = {}
    ignore: Names = None
    sparsity_config: _Sparsity | None = None
    transform_config: Mapping[str, msgspec.Raw] | None = None

    def config(self) -> QuantizationConfig:
        # The first versions saved the in-memory status of the model in compressed checkpoints.
        _only("quantization_status", self.quantization_status, "compressed", "frozen")
        if self.sparsity_config is not None:
            _only("sparsity_config.format", self.sparsity_config.format, "dense")
        if self.transform_config:
            raise _refused("transform_config: rotated weights are not supported")
        rules = tuple(
            Rule(tuple(map(_target, each.targets)), _scheme(name, each, each.format or self.format))
            for name, each in self.config_groups.items()
        )
        if not rules:
            raise _refused("config_groups has no weights")
        return QuantizationConfig(
            method=QuantizationMethod.COMPRESSED_TENSORS,
            rules=rules,
            plain=tuple(map(_target, self.ignore or ())),
            head=True,
            ignored=(*ACTIVATION_SCALES, *CACHE_SCALES),
        )


class _ModelOpt(msgspec.Struct):
    """What ModelOpt writes to config.json, or to hf_quant_config.json with `exclude_modules`."""

    quant_algo: str = ""
    group_size: int | None = None
    config_groups: Mapping[str, _Group] = {}
    ignore: Names = None
    exclude_modules: Names = None

    def config(self) -> QuantizationConfig:
        _only("quant_algo", self.quant_algo, "NVFP4")
        _only("group_size", self.group_size, None, schemes.NV_GROUP)
        for name, group in self.config_groups.items():
            if group.weights is not None:
                _nvfp4(f"config_groups.{name}.weights", group.weights, None)
        return QuantizationConfig(
            method=QuantizationMethod.MODELOPT_FP4,
            rules=schemes.every_linear(schemes.Nvfp4(count=2, divides=False)),
            plain=tuple(map(_wildcard, [*(self.ignore or ()), *(self.exclude_modules or ())])),
            head=True,
            ignored=(*ACTIVATION_SCALES, *CACHE_SCALES),
        )


def _wildcard(text: str) -> Pattern:
    """ModelOpt's names of modules, with `*` for anything: those, and all within them."""
    return _pattern(rf"{'.*'.join(map(re.escape, text.split('*')))}(\.|$)", "regex")


def _target(text: str) -> Pattern:
    """The pattern of a target: a regular expression, all linear layers, or a name."""
    if text.startswith("re:"):
        return _pattern(text.removeprefix("re:"), "regex")
    return schemes.EVERY if text == "Linear" else Pattern(text, "whole")


def _scheme(name: str, group: _Group, format_: str) -> schemes.QuantizationScheme:
    weights = group.weights
    if weights is None:
        raise _refused(f"config_groups.{name} has no weights")
    formats = ("int-quantized", "float-quantized", "naive-quantized")
    formats = (*formats, "pack-quantized", "nvfp4-pack-quantized")
    _only(f"config_groups.{name}: format", format_, *formats)
    where = f"config_groups.{name}.weights"
    if format_ == "pack-quantized":
        return _packed(where, weights)
    if format_ == "nvfp4-pack-quantized":
        return _nvfp4(where, weights, "tensor_group")
    if weights.type == "float":
        return _floats(where, weights)
    _only(f"{where}.num_bits", weights.num_bits, 8)
    scale = weights.strategy or ("group" if weights.group_size else "tensor")
    if scale not in ("tensor", "channel", "group"):
        raise _refused(f"{where}.strategy {scale!r} is not supported")
    inputs = group.input_activations
    rounds = inputs is not None and inputs.dynamic is True and inputs.num_bits == 8
    group_size = _group(weights.group_size or 0)
    return schemes.Int8(
        scale=scale, group=group_size, zero_point=not weights.symmetric, rounds=rounds
    )


def _floats(where: str, weights: _Arguments) -> schemes.QuantizationScheme:
    _only(f"{where}.num_bits", weights.num_bits, 8)
    scale = weights.strategy or "tensor"
    if scale not in ("tensor", "channel", "block"):
        raise _refused(f"{where}.strategy {scale!r} is not supported")
    block = weights.block_structure or (128, 128)
    if isinstance(block, str):
        block = _decode(f"[{block.replace('x', ',')}]".encode(), tuple[int, int])
    return schemes.Fp8(scale=scale, block=block)


def _packed(where: str, weights: _Arguments) -> schemes.QuantizationScheme:
    _only(f"{where}.type", weights.type, "int")
    _only(f"{where}.num_bits", weights.num_bits, 4, 8)
    _only(f"{where}.strategy", weights.strategy or "group", "group", "channel")
    return schemes.Packed(
        weight=".weight_packed",
        count=32 // weights.num_bits,
        bits=weights.num_bits,
        group=_group(weights.group_size or 0),
        zero_point=not weights.symmetric,
        ordered=weights.actorder in ("group", "dynamic", True),
    )


def _nvfp4(where: str, weights: _Arguments, strategy: str | None) -> schemes.QuantizationScheme:
    """The scheme of compressed-tensors; ModelOpt's arguments have the same bits and groups."""
    _only(f"{where}.type", weights.type, "float")
    _only(f"{where}.num_bits", weights.num_bits, 4)
    _only(f"{where}.strategy", weights.strategy or strategy, strategy)
    _only(f"{where}.group_size", weights.group_size or schemes.NV_GROUP, schemes.NV_GROUP)
    return schemes.Nvfp4(weight=".weight_packed", count=2, divides=True)


def _group(size: int) -> int:
    """Group size in inputs, 0 for all of them."""
    if size < -1:
        raise _refused(f"group_size {size} is invalid; must be at least -1")
    return max(size, 0)


def _modules(names: Names, *, head: bool = False) -> tuple[Pattern, ...]:
    """Modules that are not quantized: the named ones, and the head unless `head` is set."""
    always = [] if head else ["lm_head"]
    return tuple(_pattern(name, "module") for name in [*(names or ()), *always])


def _pattern(text: str, style: Literal["regex", "module"]) -> Pattern:
    try:
        re.compile(text)
    except re.error as error:
        raise _refused(f"{text!r} is not a valid regular expression: {error}") from error
    return Pattern(text, style)


def _only(what: str, found: object, *known: object) -> None:
    if found not in known:
        listed = " or ".join(str(value) for value in known)
        raise _refused(f"{what} {found!r} is not supported, only {listed}")


def _refused(why: str) -> ConfigError:
    return ConfigError(f"{_SOURCE}: {why}")


def _decode(content: bytes | msgspec.Raw, type_: type[T]) -> T:
    return parse_json(content, type_, _SOURCE)


METHODS = {
    "fp8": _Fp8,
    "w8a8_int8": _W8a8,
    "awq": _Awq,
    "gptq": _Gptq,
    "bitsandbytes": _BitsAndBytes,
    "compressed-tensors": _Compressed,
    "mxfp4": _Mxfp4,
    "modelopt": _ModelOpt,
    "modelopt_fp4": _ModelOpt,
    "torchao": _Torchao,
}
"""The form of each tool, by `quant_method`."""
