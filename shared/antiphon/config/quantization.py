"""How a checkpoint stores its linears in fewer bits, and what is made of it.

Known without torch, since the plan counts memory before anything is loaded. What the tensors of a
scheme hold, and the arithmetic, is in `antiphon.layers.quantization`; docs/quantization.md has all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

import msgspec

from antiphon.config.errors import ConfigError


class QuantizationMethod(StrEnum):
    """Quantization methods, as `--quantization` names them."""

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
"""Inputs of a group, of the methods that have such."""
TORCHAO = (QuantizationMethod.TORCHAO_INT8WO, *INT4_GROUPS)
"""Methods by which the torchao package rounds at loading."""
ONLINE = (QuantizationMethod.FP8, *TORCHAO)
"""Methods that also round a checkpoint of plain numbers, as it is loaded."""
GPU_KERNELS: Mapping[QuantizationMethod, QuantizationMethod] = {
    QuantizationMethod.AWQ_MARLIN: QuantizationMethod.AWQ,
    QuantizationMethod.GPTQ_MARLIN: QuantizationMethod.GPTQ,
    QuantizationMethod.MARLIN: QuantizationMethod.GPTQ,
}
"""Faster ways on a GPU to multiply what another method stores."""


class QuantizationScheme(msgspec.Struct, frozen=True, kw_only=True):
    """How the weights of some linears are stored.

    Attributes:
        weight: Ending of the tensor that holds the weights.
        count: Weights in one number of it.
    """

    weight: str = ".weight"
    count: int = 1

    @property
    def int8_exact(self) -> bool:
        """Whether weights are whole multiples, up to 128, of one scale an output."""
        return False

    @property
    def dynamic_activations(self) -> bool:
        """Whether the checkpoint asks for activations to be rounded too, each token by itself."""
        return False


class Fp8(QuantizationScheme, frozen=True, kw_only=True):
    """e4m3; `block` is outputs and inputs of a block."""

    scale: Literal["tensor", "channel", "block"]
    block: tuple[int, int] = (128, 128)


class OnlineFp8(QuantizationScheme, frozen=True, kw_only=True):
    """Rounded to e4m3 at loading."""


class Int8(QuantizationScheme, frozen=True, kw_only=True):
    """Bytes. `rounds` is what `dynamic` says."""

    scale: Literal["tensor", "channel", "group"] = "channel"
    group: int = 0
    zero_point: bool = False
    rounds: bool = False

    @property
    def int8_exact(self) -> bool:
        """Only where zero is zero."""
        return self.scale != "group" and not self.zero_point

    @property
    def dynamic_activations(self) -> bool:
        """As its config says of activations."""
        return self.rounds


class LlmInt8(QuantizationScheme, frozen=True, kw_only=True):
    """Bytes, as bitsandbytes stores them."""

    @property
    def int8_exact(self) -> bool:
        """Always."""
        return True


class TorchaoInt8(QuantizationScheme, frozen=True, kw_only=True):
    """Rounded to bytes at loading, by torchao."""

    @property
    def int8_exact(self) -> bool:
        """Always."""
        return True


class TorchaoInt4(QuantizationScheme, frozen=True, kw_only=True):
    """Rounded to four bits at loading, by torchao; `group` is inputs of a group."""

    group: int


class Awq(QuantizationScheme, frozen=True, kw_only=True):
    """Four bits, eight outputs to a word."""

    group: int


class Gptq(QuantizationScheme, frozen=True, kw_only=True):
    """Consecutive inputs to a word. `zero_added`: 1 in version 1 of the format, 0 in version 2."""

    bits: int
    group: int
    ordered: bool
    zero_added: int


class Packed(QuantizationScheme, frozen=True, kw_only=True):
    """The packed format of compressed-tensors."""

    bits: int
    group: int
    zero_point: bool = False
    ordered: bool = False


class BitsAndBytes4(QuantizationScheme, frozen=True, kw_only=True):
    """Four bits that a table explains."""

    kind: Literal["nf4", "fp4"]
    nested: bool


class Mxfp4(QuantizationScheme, frozen=True, kw_only=True):
    """E2M1, with a power of two for each 32."""


class Pattern(msgspec.Struct, frozen=True):
    """Names of linears.

    Attributes:
        text: What config.json says.
        style: `whole` is a name; `regex` matches from its start; `module` is one of transformers',
            which means whole modules from the start of a name, or any end of it; `all` is any.
    """

    text: str
    style: Literal["whole", "regex", "module", "all"]

    def matches(self, name: str) -> bool:
        """Whether a linear is one of them."""
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


class Rule(msgspec.Struct, frozen=True):
    """Linears that are stored by one scheme."""

    targets: tuple[Pattern, ...]
    scheme: QuantizationScheme


class QuantizationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a model's linears are stored as.

    Attributes:
        method: Of the checkpoint, or of the operator.
        rules: The first that names a linear is its own.
        plain: Linears that are stored in plain numbers all the same.
        head: Whether the output head is a linear like the others.
        online: Whether plain numbers are rounded as they are loaded.
        ignored: Endings of tensors that may be there and that nothing is done with.
        blank: Endings of tensors that may be there if all their numbers are zero.
        spelled: Endings that some tools write, and those that they stand for.
    """

    method: QuantizationMethod
    rules: tuple[Rule, ...]
    plain: tuple[Pattern, ...] = ()
    head: bool = False
    online: bool = False
    ignored: tuple[str, ...] = ()
    blank: tuple[str, ...] = ()
    spelled: Mapping[str, str] = {}

    def scheme(self, name: str) -> QuantizationScheme | None:
        """How a linear is stored, by its name in the checkpoint; None: in plain numbers."""
        if any(pattern.matches(name) for pattern in self.plain):
            return None
        for rule in self.rules:
            if any(pattern.matches(name) for pattern in rule.targets):
                return rule.scheme
        return None

    def weight_count(self, tensor: str, items: int) -> int:
        """How many weights a tensor of a checkpoint holds that is not of plain numbers.

        Returns:
            None at all of what belongs to another tensor, such as what stands for zero.
        """
        for rule in self.rules:
            name = tensor.removesuffix(rule.scheme.weight)
            if name != tensor and self.scheme(name) is rule.scheme:
                return items * rule.scheme.count
        return 0

    def is_auxiliary(self, tensor: str) -> bool:
        """Whether a tensor of plain numbers belongs to the weight of a linear, such as scales."""
        return tensor.endswith(AUXILIARY_TENSORS) and not self.online

    @property
    def int8_exact(self) -> bool:
        """Whether all stored weights are whole multiples of one scale an output."""
        return all(rule.scheme.int8_exact for rule in self.rules)

    @property
    def dynamic_activations(self) -> bool:
        """Whether the checkpoint asks for rounded activations in all stored linears."""
        return all(rule.scheme.dynamic_activations for rule in self.rules)


AUXILIARY_TENSORS = (
    ".weight_scale",
    ".weight_scale_inv",
    "._weight_scale",
    ".scales",
    ".SCB",
    ".absmax",
    ".quant_map",
    ".nested_absmax",
    ".nested_quant_map",
    ".input_scale",
    ".activation_scale",
    ".output_scale",
    ".k_scale",
    ".v_scale",
)
"""Endings of what is stored with a weight, in plain numbers."""


ROUTERS = Pattern(r".*\.(gate|router|shared_expert_gate)$", "regex")
"""Small linears that choose experts: rounding them chooses others."""


def online_quantization(method: QuantizationMethod) -> QuantizationConfig:
    """What rounds the linears of a checkpoint of plain numbers as they are loaded."""
    scheme: QuantizationScheme = OnlineFp8() if method is QuantizationMethod.FP8 else TorchaoInt8()
    if method in INT4_GROUPS:
        scheme = TorchaoInt4(group=INT4_GROUPS[method])
    return QuantizationConfig(
        method=method,
        rules=(Rule((Pattern("", "all"),), scheme),),
        plain=(ROUTERS,),
        online=True,
    )


def choose_quantization(
    stored: QuantizationConfig | None, requested: QuantizationMethod | None, *, gguf: bool = False
) -> QuantizationConfig | None:
    """What a model's linears are loaded by, of what its config and its operator say.

    Args:
        stored: What config.json says.
        requested: The operator's method; unset: the checkpoint's.
        gguf: Whether the weights are in a GGUF file, which says by itself how they are stored.

    Raises:
        ConfigError: The two do not agree.
    """
    if requested is None or (gguf and requested is QuantizationMethod.GGUF):
        return None if gguf else stored
    if gguf or requested is QuantizationMethod.GGUF:
        what = "is a GGUF file" if gguf else "is not a GGUF file"
        raise ConfigError(f"model.quantization = {requested}: the checkpoint {what}")
    if stored is None and requested in ONLINE:
        return online_quantization(requested)
    if stored is None and requested is QuantizationMethod.W8A8_INT8:
        return W8A8_INT8
    if stored is None:
        raise ConfigError(
            f"model.quantization = {requested}: the checkpoint is not quantized; only fp8 and the "
            "torchao methods quantize while loading"
        )
    if _agrees(stored, requested):
        return stored
    raise ConfigError(
        f"model.quantization = {requested}: the checkpoint is quantized with {stored.method}"
    )


def _agrees(stored: QuantizationConfig, requested: QuantizationMethod) -> bool:
    if requested is QuantizationMethod.MARLIN:
        return stored.method in (QuantizationMethod.GPTQ, QuantizationMethod.AWQ)
    if (
        requested is QuantizationMethod.W8A8_INT8
        and stored.method is QuantizationMethod.COMPRESSED_TENSORS
    ):
        # The same weights, by the name of SGLang's kernel for them.
        return stored.int8_exact and stored.dynamic_activations
    return GPU_KERNELS.get(requested, requested) is stored.method


W8A8_INT8 = QuantizationConfig(
    method=QuantizationMethod.W8A8_INT8,
    rules=(Rule((Pattern("", "all"),), Int8(scale="channel", rounds=True)),),
    ignored=(".input_scale",),
)
"""Bytes with a scale an output, and activations rounded to bytes, a scale a token."""
