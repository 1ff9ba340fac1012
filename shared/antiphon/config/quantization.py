"""Quantization schemes of checkpoints, and how quantized linear layers are loaded.

Does not need torch, since the plan computes memory before anything is loaded. The tensors of each
scheme, and the arithmetic, are in `antiphon.layers.quantization`; see also docs/quantization.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

import msgspec

from antiphon.config.errors import ConfigError


class QuantizationMethod(StrEnum):
    """Quantization methods, by their names for `--quantization`."""

    FP8 = "fp8"
    W8A8_INT8 = "w8a8_int8"
    AWQ = "awq"
    AWQ_MARLIN = "awq_marlin"
    GPTQ = "gptq"
    GPTQ_MARLIN = "gptq_marlin"
    MARLIN = "marlin"
    COMPRESSED_TENSORS = "compressed-tensors"
    BITSANDBYTES = "bitsandbytes"
    GGUF = "gguf"
    MXFP4 = "mxfp4"
    MODELOPT = "modelopt"
    MODELOPT_FP4 = "modelopt_fp4"
    TORCHAO = "torchao"
    TORCHAO_INT8WO = "torchao-int8wo"
    TORCHAO_INT4WO_32 = "torchao-int4wo-32"
    TORCHAO_INT4WO_64 = "torchao-int4wo-64"
    TORCHAO_INT4WO_128 = "torchao-int4wo-128"


INT4_GROUPS: Mapping[QuantizationMethod, int] = {
    QuantizationMethod.TORCHAO_INT4WO_32: 32,
    QuantizationMethod.TORCHAO_INT4WO_64: 64,
    QuantizationMethod.TORCHAO_INT4WO_128: 128,
}
"""Group sizes of the methods with groups."""
TORCHAO = (QuantizationMethod.TORCHAO_INT8WO, *INT4_GROUPS)
"""Methods of the torchao package that quantize at load time."""
ONLINE = (QuantizationMethod.FP8, *TORCHAO)
"""Methods that can quantize an unquantized checkpoint at load time."""
GPU_KERNELS: Mapping[QuantizationMethod, QuantizationMethod] = {
    QuantizationMethod.AWQ_MARLIN: QuantizationMethod.AWQ,
    QuantizationMethod.GPTQ_MARLIN: QuantizationMethod.GPTQ,
    QuantizationMethod.MARLIN: QuantizationMethod.GPTQ,
}
"""GPU kernels for the weights of another method."""


class QuantizationScheme(msgspec.Struct, frozen=True, kw_only=True):
    """Storage of some linear layers: the suffix of the weight's name, and weights per element."""

    weight: str = ".weight"
    count: int = 1

    def grouped_bytes(self, scale_bytes: int) -> float | None:
        """Bytes of a weight whose codes and scales are packed; None: it is not stored in groups."""
        return None

    def group_of(self, inputs: int) -> int:
        """How many of the inputs of a linear share what ranks cannot divide."""
        return 1


class Fp8(QuantizationScheme, frozen=True, kw_only=True):
    """FP8 (e4m3); `block` is the block size in outputs and inputs."""

    scale: Literal["tensor", "channel", "block"]
    block: tuple[int, int] = (128, 128)

    def group_of(self, inputs: int) -> int:
        return self.block[1] if self.scale == "block" else 1


class OnlineFp8(QuantizationScheme, frozen=True, kw_only=True):
    """Quantized to FP8 (e4m3) at load time."""


class Int8(QuantizationScheme, frozen=True, kw_only=True):
    """Int8. `rounds` is whether activations are quantized dynamically."""

    scale: Literal["tensor", "channel", "group"] = "channel"
    group: int = 0
    zero_point: bool = False
    rounds: bool = False

    def grouped_bytes(self, scale_bytes: int) -> float | None:
        if self.scale != "group" and not self.zero_point:
            return None
        return grouped_bytes(8, self.group, zeros=self.zero_point, scale_bytes=scale_bytes)

    def group_of(self, inputs: int) -> int:
        if self.scale == "group":
            return self.group
        return inputs if self.zero_point else 1


class LlmInt8(QuantizationScheme, frozen=True, kw_only=True):
    """Int8 in bitsandbytes' format."""


class TorchaoInt8(QuantizationScheme, frozen=True, kw_only=True):
    """Quantized to int8 at load time, by torchao."""


class TorchaoInt4(QuantizationScheme, frozen=True, kw_only=True):
    """Quantized to int4 at load time, by torchao; `group` is the group size."""

    group: int

    def grouped_bytes(self, scale_bytes: int) -> float | None:
        return grouped_bytes(4, self.group, zeros=True, scale_bytes=scale_bytes)

    def group_of(self, inputs: int) -> int:
        return _group_of(self.group, inputs)


class Awq(QuantizationScheme, frozen=True, kw_only=True):
    """Int4, eight outputs per word."""

    group: int

    def grouped_bytes(self, scale_bytes: int) -> float | None:
        return grouped_bytes(4, self.group, zeros=True, scale_bytes=scale_bytes)

    def group_of(self, inputs: int) -> int:
        return _group_of(self.group, inputs)


class Gptq(QuantizationScheme, frozen=True, kw_only=True):
    """Consecutive inputs per word. `zero_added`: 1 in version 1 of the format, 0 in version 2."""

    bits: int
    group: int
    ordered: bool
    zero_added: int

    def grouped_bytes(self, scale_bytes: int) -> float | None:
        return (
            None
            if self.ordered
            else grouped_bytes(max(self.bits, 4), self.group, zeros=True, scale_bytes=scale_bytes)
        )

    def group_of(self, inputs: int) -> int:
        return _group_of(self.group, inputs)


class Packed(QuantizationScheme, frozen=True, kw_only=True):
    """The pack-quantized format of compressed-tensors."""

    bits: int
    group: int
    zero_point: bool = False
    ordered: bool = False

    def grouped_bytes(self, scale_bytes: int) -> float | None:
        return (
            None
            if self.ordered
            else grouped_bytes(
                self.bits, self.group, zeros=self.zero_point, scale_bytes=scale_bytes
            )
        )

    def group_of(self, inputs: int) -> int:
        return _group_of(self.group, inputs)


class BitsAndBytes4(QuantizationScheme, frozen=True, kw_only=True):
    """Four-bit indices of a lookup table (NF4, FP4)."""

    kind: Literal["nf4", "fp4"]
    nested: bool


class Mxfp4(QuantizationScheme, frozen=True, kw_only=True):
    """MXFP4: E2M1 with a power-of-two scale per 32 weights."""

    def grouped_bytes(self, scale_bytes: int) -> float | None:
        return grouped_bytes(4, MX_GROUP, zeros=False, scale_bytes=MX_SCALE_BYTES)

    def group_of(self, inputs: int) -> int:
        return MX_GROUP


class Nvfp4(QuantizationScheme, frozen=True, kw_only=True):
    """NVFP4: E2M1 with an FP8 (e4m3) scale per 16 weights, and a float32 one for the tensor.

    `divides` is whether the tensor's scale is stored as its reciprocal, as compressed-tensors does.
    """

    divides: bool

    def grouped_bytes(self, scale_bytes: int) -> float | None:
        return grouped_bytes(4, NV_GROUP, zeros=False, scale_bytes=scale_bytes)

    def group_of(self, inputs: int) -> int:
        return NV_GROUP


NV_GROUP = 16
"""Weights of NVFP4 that share a scale."""
NV_SCALE_BYTES = 1
"""On a GPU, which keeps e4m3; a CPU has products of both scales."""
MX_GROUP = 32
"""Weights that share a scale."""
MX_SCALE_BYTES = 2
"""Powers of two are exact in bfloat16."""


def grouped_bytes(bits: int, group: int, *, zeros: bool, scale_bytes: int) -> float:
    """Bytes of a weight of so many bits, whose group has a scale and, with zeros, a minimum.

    A group of 0 is a whole output.
    """
    shared = scale_bytes * (2 if zeros else 1) / group if group > 0 else 0.0
    return bits / 8 + shared


def _group_of(group: int, inputs: int) -> int:
    return group if group > 0 else inputs


class Pattern(msgspec.Struct, frozen=True):
    """A pattern for names of linear layers.

    `whole` is a full name; `regex` matches from the start; `module` is transformers' rule, which
    matches full modules from the start of a name, or any suffix; `all` is any.
    """

    text: str
    style: Literal["whole", "regex", "module", "all"]

    def matches(self, name: str) -> bool:
        match self.style:
            case "all":
                return True
            case "whole":
                return name == self.text
            case "regex":
                return re.match(self.text, name) is not None
            case "module":
                whole = rf"(?:{self.text})(?:(?<=\.)|(?=\.|$))"
                return re.match(whole, name) is not None or name.endswith(self.text)


EVERY = Pattern("", "all")


class Rule(msgspec.Struct, frozen=True):
    targets: tuple[Pattern, ...]
    scheme: QuantizationScheme


def every_linear(scheme: QuantizationScheme) -> tuple[Rule, ...]:
    return (Rule((EVERY,), scheme),)


class QuantizationConfig(msgspec.Struct, frozen=True, kw_only=True):
    method: QuantizationMethod
    """The checkpoint's method, or the configured one."""
    rules: tuple[Rule, ...]
    """The first matching rule applies."""
    plain: tuple[Pattern, ...] = ()
    """Linear layers that are not quantized."""
    head: bool = False
    """Whether the output head is quantized like other linear layers."""
    online: bool = False
    """Whether unquantized weights are quantized at load time."""
    ignored: tuple[str, ...] = ()
    """Suffixes of tensors that are ignored."""
    blank: tuple[str, ...] = ()
    """Suffixes of tensors that are ignored if all their elements are zero."""
    spelled: Mapping[str, str] = {}
    """Suffixes that some tools write, and the standard ones."""

    def scheme(self, name: str) -> QuantizationScheme | None:
        if any(pattern.matches(name) for pattern in self.plain):
            return None
        for rule in self.rules:
            if any(pattern.matches(name) for pattern in rule.targets):
                return rule.scheme
        return None

    def weight_count(self, tensor: str, items: int) -> int:
        """Number of weights in a quantized tensor; 0 for zero points and the like."""
        for rule in self.rules:
            name = tensor.removesuffix(rule.scheme.weight)
            if name != tensor and self.scheme(name) is rule.scheme:
                return items * rule.scheme.count
        return 0

    def is_auxiliary(self, tensor: str) -> bool:
        """Whether an unquantized tensor belongs to a linear layer's weight, such as scales."""
        return tensor.endswith(AUXILIARY_TENSORS) and not self.online

    @property
    def fp8(self) -> bool:
        """Whether all weights are in FP8, or are quantized to it."""
        return all(isinstance(rule.scheme, Fp8 | OnlineFp8) for rule in self.rules)

    @property
    def int8_exact(self) -> bool:
        """Whether all weights are int8 multiples of one scale per output, so that int8 is exact."""
        return all(_int8_exact(rule.scheme) for rule in self.rules)

    def grouped_bytes(self, scale_bytes: int) -> float | None:
        """Bytes of a weight with the codes and scales as stored; None: some are not in groups."""
        each = [rule.scheme.grouped_bytes(scale_bytes) for rule in self.rules]
        sizes = [size for size in each if size is not None]
        return max(sizes) if sizes and len(sizes) == len(each) else None

    @property
    def dynamic_activations(self) -> bool:
        return all(isinstance(rule.scheme, Int8) and rule.scheme.rounds for rule in self.rules)


def _int8_exact(scheme: QuantizationScheme) -> bool:
    if isinstance(scheme, Int8):
        return scheme.scale != "group" and not scheme.zero_point
    return isinstance(scheme, LlmInt8 | TorchaoInt8)


AUXILIARY_TENSORS = (
    *(".weight_scale", ".weight_scale_inv", "._weight_scale", ".scales", ".SCB", ".absmax"),
    *(".quant_map", ".nested_absmax", ".nested_quant_map", ".k_scale", ".v_scale"),
    *(".input_scale", ".activation_scale", ".output_scale"),
    *(".weight_scale_2", ".weight_global_scale", ".input_global_scale"),
)
"""Suffixes of unquantized tensors that are stored with a weight."""


ROUTERS = Pattern(r".*\.(gate|router|shared_expert_gate)$", "regex")
"""Small linear layers that route to experts: quantizing them would change the choice."""


def online_quantization(method: QuantizationMethod) -> QuantizationConfig:
    """The config that quantizes an unquantized checkpoint at load time."""
    scheme: QuantizationScheme = OnlineFp8() if method is QuantizationMethod.FP8 else TorchaoInt8()
    if method in INT4_GROUPS:
        scheme = TorchaoInt4(group=INT4_GROUPS[method])
    rules = every_linear(scheme)
    return QuantizationConfig(method=method, rules=rules, plain=(ROUTERS,), online=True)


def choose_quantization(
    stored: QuantizationConfig | None, requested: QuantizationMethod | None, *, gguf: bool = False
) -> QuantizationConfig | None:
    """Choose the quantization by config.json and the settings. A GGUF file has types of its own."""
    if requested is None or (gguf and requested is QuantizationMethod.GGUF):
        return None if gguf else stored
    if gguf or requested is QuantizationMethod.GGUF:
        what = "is a GGUF file" if gguf else "is not a GGUF file"
    elif stored is None and requested in ONLINE:
        return online_quantization(requested)
    elif stored is None and requested is QuantizationMethod.W8A8_INT8:
        return W8A8_INT8
    elif stored is None:
        what = "is not quantized; only fp8 and the torchao methods quantize while loading"
    elif _agrees(stored, requested):
        return stored
    else:
        what = f"is quantized with {stored.method}"
    raise ConfigError(f"model.quantization = {requested}: the checkpoint {what}")


def _agrees(stored: QuantizationConfig, requested: QuantizationMethod) -> bool:
    if requested is QuantizationMethod.MARLIN:
        return stored.method in (QuantizationMethod.GPTQ, QuantizationMethod.AWQ)
    kinds = (requested, stored.method)
    if kinds == (QuantizationMethod.W8A8_INT8, QuantizationMethod.COMPRESSED_TENSORS):
        # The same weights, under the name of SGLang's kernel for them.
        return stored.int8_exact and stored.dynamic_activations
    if requested is QuantizationMethod.MODELOPT:
        return stored.method is QuantizationMethod.MODELOPT_FP4
    return GPU_KERNELS.get(requested, requested) is stored.method


W8A8_INT8 = QuantizationConfig(
    method=QuantizationMethod.W8A8_INT8,
    rules=every_linear(Int8(scale="channel", rounds=True)),
    ignored=(".input_scale",),
)
"""Int8 weights with per-output scales, and int8 activations with per-token scales."""
