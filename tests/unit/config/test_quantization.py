"""What config.json and the operator say of quantization: read, agreed upon, or refused by name."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.unit.config.test_card import CONFIG, write_model, write_weights
from tests.unit.config.test_resolve import CARD, DEVICE, GIB, decide
from tests.unit.config.test_sglang import serve

from antiphon.config.errors import ConfigError
from antiphon.config.model import Dtype, LinearFormat
from antiphon.config.quantization import (
    Nvfp4,
    Pattern,
    QuantizationConfig,
    QuantizationMethod,
    choose_quantization,
)
from antiphon.model_card.card import ExpertsCard, ModelCard, read_card
from antiphon.model_card.quantization_config import read_quantization
from antiphon.model_card.weight_headers import Weights
from antiphon.resolve.resolved_value import ResolvedValue

if TYPE_CHECKING:
    from pathlib import Path

    from antiphon.resolve.device import HostDevice
    from antiphon.resolve.resolved_config import ResolvedConfig


def said(**config: object) -> QuantizationConfig:
    text = json.dumps({"quantization_config": config}).encode()
    found = read_quantization(text)
    assert found is not None
    return found


GROUP = {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}}
AWQ = said(quant_method="awq", group_size=64)
GPTQ = said(quant_method="gptq", bits=4)
W8A8 = said(
    quant_method="compressed-tensors",
    format="int-quantized",
    config_groups={"a": GROUP | {"input_activations": {"dynamic": True}}},
)

NVFP4 = {"num_bits": 4, "type": "float", "group_size": 16}


def compressed(**change: object) -> dict[str, object]:
    fields = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    return fields | {"config_groups": {"a": GROUP}} | change


@pytest.mark.parametrize("config", [b"{}", b'{"quantization_config": null}'])
def test_most_checkpoints_say_nothing(config: bytes) -> None:
    assert read_quantization(config) is None


@pytest.mark.parametrize("status", ["compressed", "frozen"])
@pytest.mark.parametrize("field", ["quantization_config", "compression_config"])
def test_compressed_tensors_are_read_as_all_their_versions_say_it(field: str, status: str) -> None:
    config = {field: compressed(quantization_status=status)}
    assert read_quantization(json.dumps(config).encode()) == said(**compressed())


def test_modelopt_excludes_modules_by_wildcards() -> None:
    found = said(
        quant_method="modelopt",
        quant_algo="NVFP4",
        exclude_modules=["lm_head", "model.layers.0.*", "model.layers.1.self_attn"],
    )
    assert found.scheme("model.layers.1.mlp.up_proj") == Nvfp4(count=2, divides=False)
    for name in ("lm_head", "model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj"):
        assert found.scheme(name) is None, name
    for name in ("model.layers.10.mlp.up_proj", "model.layers.1.self_attn_2", "model_layers.0.a"):
        assert found.scheme(name) is not None, name
    for method in (QuantizationMethod.MODELOPT, QuantizationMethod.MODELOPT_FP4):
        assert choose_quantization(found, method) is found
    with pytest.raises(ConfigError, match="is quantized with modelopt_fp4"):
        choose_quantization(found, QuantizationMethod.MXFP4)


def test_modelopt_may_have_a_file_of_its_own(tmp_path: Path) -> None:
    folder = write_model(tmp_path, CONFIG)
    quantization = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    written = json.dumps({"producer": {"name": "modelopt"}, "quantization": quantization})
    (folder / "hf_quant_config.json").write_text(written)
    write_weights(folder / "model.safetensors")
    assert read_card(folder).quantization == said(quant_method="modelopt", **quantization)


def torchao(name: str, **data: object) -> dict[str, object]:
    """As transformers writes a configuration of torchao."""
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": name, "_data": data}}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "hqq"}, "quant_method 'hqq' is not supported, only fp8, w8a8_int8, awq"),
        ({}, "quant_method '' is not supported"),
        ({"quant_method": "awq", "version": "gemv"}, "version 'gemv' is not supported, only gemm"),
        ({"quant_method": "awq", "bits": 3}, "bits 3 is not supported, only 4"),
        ({"quant_method": "awq", "zero_point": False}, "zero_point false is not supported"),
        ({"quant_method": "awq", "group_size": -7}, "group_size -7 is invalid"),
        ({"quant_method": "gptq", "bits": 3}, "bits 3 is not supported, only 2 or 4 or 8"),
        ({"quant_method": "gptq"}, "Object missing required field `bits`"),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            "checkpoint_format 'marlin' is not supported, only gptq or gptq_v2",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*gate.*": {"bits": 8}}},
            "dynamic: '+:.*gate.*': only -: rules are read",
        ),
        ({"quant_method": "bitsandbytes"}, "one of load_in_4bit and load_in_8bit"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "f"},
            "bnb_4bit_quant_storage 'f' is not supported, only uint8",
        ),
        (
            compressed(format="marlin-24"),
            "format 'marlin-24' is not supported",
        ),
        (
            compressed(format="nvfp4-pack-quantized"),
            "config_groups.a.weights.type 'int' is not supported, only float",
        ),
        (
            compressed(
                format="nvfp4-pack-quantized",
                config_groups={"a": {"targets": ["Linear"], "weights": NVFP4 | {"group_size": 32}}},
            ),
            "config_groups.a.weights.group_size 32 is not supported, only 16",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
            "quant_algo 'MIXED_PRECISION' is not supported, only NVFP4",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32},
            "group_size 32 is not supported, only None or 16",
        ),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config.format"),
        (compressed(transform_config={"R1": {}}), "rotated weights"),
        (
            compressed(quantization_status="calibration"),
            "quantization_status 'calibration' is not supported",
        ),
        (compressed(ignore=["re:(head"]), "'(head' is not a valid regular expression"),
        (compressed(config_groups={}), "config_groups has no weights"),
        (compressed(config_groups={"a": {"targets": ["Linear"]}}), "a has no weights"),
        (
            compressed(config_groups={"a": {"targets": [], "weights": {"num_bits": 6}}}),
            "config_groups.a.weights.num_bits 6 is not supported, only 8",
        ),
        (
            compressed(config_groups={"a": {"targets": [], "weights": {"strategy": "token"}}}),
            "config_groups.a.weights.strategy 'token' is not supported",
        ),
        (torchao("Int4WeightOnlyConfig"), "quant_type 'Int4WeightOnlyConfig' is not supported"),
        (
            torchao("Int8WeightOnlyConfig", granularity={"_type": "PerGroup", "_data": {}}),
            "granularity 'PerGroup' is not supported, only PerRow",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_read_is_named(config: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        said(**config)
    assert str(caught.value).startswith("config.json: quantization_config: ")


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        (Pattern("model.layers.1", "module"), "model.layers.1.mlp.up_proj", True),
        (Pattern("model.layers.1", "module"), "model.layers.11.mlp.up_proj", False),
        (Pattern("model.layers.*.self_attn", "module"), "model.layers.7.self_attn.q_proj", True),
        (Pattern("model.layers.*.self_attn", "module"), "model.layers.7.mlp.up_proj", False),
        (Pattern("mlp.gate", "module"), "model.layers.0.mlp.gate_proj", False),
        (Pattern("gate_proj", "module"), "model.layers.0.mlp.gate_proj", True),
        (Pattern("lm_head", "whole"), "lm_head", True),
        (Pattern("head", "whole"), "lm_head", False),
        (Pattern(".*down_proj", "regex"), "model.layers.0.mlp.down_proj", True),
        (Pattern("down_proj", "regex"), "model.layers.0.mlp.down_proj", False),
        (Pattern("", "all"), "anything", True),
    ],
)
def test_names_match_as_the_tools_have_them(pattern: Pattern, name: str, matches: bool) -> None:
    assert pattern.matches(name) is matches


def test_groups_of_linears_have_schemes_of_their_own() -> None:
    wide = {"targets": ["re:.*down_proj"], "weights": {"num_bits": 8, "group_size": 32}}
    found = said(**compressed(config_groups={"b": wide, "a": GROUP}, ignore=["lm_head"]))
    assert found.scheme("model.layers.0.mlp.down_proj") is found.rules[0].scheme
    assert found.scheme("model.layers.0.mlp.up_proj") is found.rules[1].scheme
    assert (found.scheme("lm_head"), found.int8_exact) == (None, False)


def test_gptq_says_which_linears_of_a_layer_it_rounded() -> None:
    within = [["self_attn.q_proj"], ["mlp.up_proj"]]
    found = said(quant_method="gptq", bits=4, modules_in_block_to_quantize=within, lm_head=True)
    assert found.scheme("model.layers.0.mlp.up_proj") is not None
    assert found.scheme("model.layers.0.mlp.down_proj") is None
    skipped = said(quant_method="gptq", bits=4, dynamic={r"-:.*\.layers\.0\.": {}})
    assert skipped.scheme("model.layers.0.mlp.up_proj") is None
    assert skipped.scheme("model.layers.1.mlp.up_proj") is not None


@pytest.mark.parametrize(
    ("stored", "method", "expected"),
    [
        (None, None, None),
        (AWQ, None, AWQ),
        (AWQ, QuantizationMethod.AWQ, AWQ),
        (AWQ, QuantizationMethod.AWQ_MARLIN, AWQ),
        (AWQ, QuantizationMethod.MARLIN, AWQ),
        (GPTQ, QuantizationMethod.GPTQ_MARLIN, GPTQ),
        (GPTQ, QuantizationMethod.MARLIN, GPTQ),
        (W8A8, QuantizationMethod.W8A8_INT8, W8A8),
    ],
)
def test_what_is_said_agrees_with_the_checkpoint(
    stored: QuantizationConfig | None,
    method: QuantizationMethod | None,
    expected: QuantizationConfig | None,
) -> None:
    assert choose_quantization(stored, method) is expected


@pytest.mark.parametrize(
    ("stored", "method", "gguf", "message"),
    [
        (AWQ, QuantizationMethod.GPTQ, False, "the checkpoint is quantized with awq"),
        (AWQ, QuantizationMethod.GPTQ_MARLIN, False, "the checkpoint is quantized with awq"),
        (AWQ, QuantizationMethod.FP8, False, "the checkpoint is quantized with awq"),
        (AWQ, QuantizationMethod.W8A8_INT8, False, "the checkpoint is quantized with awq"),
        (
            None,
            QuantizationMethod.AWQ,
            False,
            "not quantized; only fp8 and the torchao methods quantize",
        ),
        (None, QuantizationMethod.GGUF, False, "the checkpoint is not a GGUF file"),
        (None, QuantizationMethod.FP8, True, "the checkpoint is a GGUF file"),
    ],
)
def test_what_is_said_against_the_checkpoint_is_refused(
    stored: QuantizationConfig | None, method: QuantizationMethod, gguf: bool, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        choose_quantization(stored, method, gguf=gguf)


def test_plain_checkpoints_are_rounded_at_loading_where_that_was_asked_for() -> None:
    found = choose_quantization(None, QuantizationMethod.FP8)
    assert found is not None
    assert found.online
    assert found.scheme("model.layers.0.mlp.gate_proj") is not None
    assert found.scheme("model.layers.0.mlp.gate") is None
    assert choose_quantization(None, QuantizationMethod.GGUF, gguf=True) is None


def test_methods_of_sglang_that_are_not_built_are_refused_by_name() -> None:
    for line, why in {
        "--quantization modelopt_fp8": "is not read",
        "--torchao-config int4wo-256": "32, 64 or 128",
        "--torchao-config fp8wo": "",
        "--kv-cache-dtype fp4_e2m1": "use fp8_e4m3",
    }.items():
        with pytest.raises(ConfigError, match=f"{line}: refused: .*{why}"):
            serve(line)
    found = serve("--torchao-config int4wo-64").settings.model.quantization
    assert found == "torchao-int4wo-64"
    assert serve("--torchao-config int8wo").settings.model.quantization == "torchao-int8wo"
    assert serve("--quantization awq_marlin").settings.model.quantization == "awq_marlin"


def plan(
    quantization: QuantizationConfig | None, device: HostDevice = DEVICE, **said: str
) -> ResolvedConfig:
    card = msgspec.structs.replace(
        CARD,
        quantization=quantization,
        weights=Weights(GIB // 2, GIB // 4, Dtype.BFLOAT16, quantized=GIB // 4),
    )
    return decide(device, card, **said)


def test_the_plan_has_nvfp4_with_activations_in_the_dtype() -> None:
    nvfp4 = said(quant_method="modelopt", quant_algo="NVFP4")
    found = plan(nvfp4)
    assert found.quantization.value == "modelopt_fp4"
    assert found.quantization.reason.endswith("(W4A16): stored scales of activations are not used")
    assert found.weight_bytes.value == GIB // 2 + round(GIB // 4 * (0.5 + 2 / 16))
    gpu = msgspec.structs.replace(DEVICE, kind="cuda", lacking="it is a GPU")
    found = plan(nvfp4, gpu, model__device="cuda")
    assert found.quantized.value is LinearFormat.GROUPED
    assert found.weight_bytes.value == GIB // 2 + round(GIB // 4 * (0.5 + 1 / 16))


def test_four_bits_are_kept_in_groups_and_the_plan_says_what_that_takes() -> None:
    found = plan(AWQ)
    assert (found.quantization.value, found.quantization.reason) == ("awq", "config.json")
    assert (found.linear.value, found.quantized.value) == (
        LinearFormat.PACKED,
        LinearFormat.GROUPED,
    )
    assert found.quantized.reason == "codes and scales as stored, 0.14 GiB; in bfloat16, 0.50 GiB"
    grouped = round(GIB // 4 * (0.5 + 4 / 64))
    assert found.weight_bytes.value == GIB // 2 + grouped
    assert ",quantized:awq as grouped" in found.bits.value
    assert "quantized" not in decide().bits.value
    assert f"{GIB // 4} of them quantized; a token reads 0." in found.weight_bytes.reason
    assert plan(AWQ, model__linear="grouped").quantized.value is LinearFormat.GROUPED
    assert plan(AWQ, model__linear="packed").quantized.value is LinearFormat.PACKED
    assert decide(model__linear="grouped").linear.value is LinearFormat.PACKED


def test_what_is_not_in_groups_is_kept_as_numbers() -> None:
    found = plan(said(quant_method="gptq", bits=4, desc_act=True))
    assert found.quantized.value is LinearFormat.PACKED
    assert (
        "while loading, 0.50 GiB; model.linear = int8 would take 0.25 GiB" in found.quantized.reason
    )
    assert found.weight_bytes.value == GIB


@pytest.mark.parametrize("stored", [Dtype.FLOAT32, Dtype.FLOAT16, Dtype.BFLOAT16])
def test_quantized_weights_are_multiplied_in_bfloat16_unless_asked(stored: Dtype) -> None:
    card = msgspec.structs.replace(CARD, quantization=AWQ, dtype=stored)
    assert decide(DEVICE, card).dtype.value is Dtype.BFLOAT16
    assert decide(DEVICE, card, model__dtype=stored).dtype.value is stored
    without = msgspec.structs.replace(DEVICE, lacking="there is no compiler")
    assert decide(without, card).dtype.value is stored
    plain = msgspec.structs.replace(CARD, dtype=stored)
    assert decide(DEVICE, plain).dtype.value is stored


@pytest.mark.parametrize("grouped", [0, GIB // 4])
def test_blocks_of_a_gguf_file_are_multiplied_in_bfloat16(grouped: int) -> None:
    """Blocks that are not in groups, such as Q2_K, are converted to it while loading."""
    weights = Weights(GIB // 2, GIB // 4, None, grouped=grouped, grouped_bytes=grouped // 2)
    card = msgspec.structs.replace(CARD, gguf=True, dtype=Dtype.FLOAT32, weights=weights)
    found = decide(DEVICE, card)
    kept = LinearFormat.GROUPED if grouped else LinearFormat.PACKED
    assert (found.dtype.value, found.quantized.value) == (Dtype.BFLOAT16, kept)
    assert decide(DEVICE, card, model__dtype="float32").dtype.value is Dtype.FLOAT32


def test_scales_of_two_levels_take_more_bytes_in_float32() -> None:
    weights = Weights(GIB // 2, GIB // 4, None, grouped=GIB // 4, grouped_bytes=GIB // 8)
    weights = msgspec.structs.replace(weights, wide_scale_bytes=GIB // 32)
    card = msgspec.structs.replace(CARD, gguf=True, weights=weights)
    narrow = decide(DEVICE, card, model__dtype="bfloat16").weight_bytes.value
    wide = decide(DEVICE, card, model__dtype="float32").weight_bytes.value
    assert narrow == 2 * (GIB // 4) + GIB // 8
    assert wide == 4 * (GIB // 4) + GIB // 8 + GIB // 32


def test_bytes_are_kept_as_bytes_and_the_rest_as_numbers() -> None:
    found = plan(W8A8)
    assert found.linear.value is LinearFormat.PACKED
    assert found.quantized.value is LinearFormat.INT8_DYNAMIC
    assert found.weight_bytes.value == GIB // 4 + GIB // 2


def test_operator_may_keep_it_otherwise() -> None:
    found = plan(AWQ, model__linear="int8")
    assert (found.linear.value, found.quantized.value) == (LinearFormat.INT8, LinearFormat.INT8)
    looked_up = 0 if CARD.tied else CARD.vocabulary_size * CARD.hidden_size
    assert found.weight_bytes.value == GIB // 2 + looked_up
    assert plan(W8A8, model__linear="plain").quantized.value is LinearFormat.PLAIN
    float16 = plan(W8A8, model__dtype="float16").quantized
    assert (float16.value, "float16" in float16.reason) == (LinearFormat.PLAIN, True)


def test_groups_stay_on_a_gpu() -> None:
    gpu = msgspec.structs.replace(DEVICE, kind="cuda", lacking="it is a GPU")
    found = plan(AWQ, gpu, model__device="cuda")
    kept = (found.linear.value, found.quantized.value)
    assert kept == (LinearFormat.PLAIN, LinearFormat.GROUPED)
    assert found.weight_bytes.value == plan(AWQ).weight_bytes.value
    asked = {"model__device": "cuda", "model__linear": "grouped"}
    assert plan(AWQ, gpu, **asked).quantized.value is LinearFormat.GROUPED
    assert plan(None, gpu, **asked).quantized.value is LinearFormat.PLAIN
    fixed = plan(AWQ, gpu, model__device="cuda", model__deterministic="true")
    kept = (fixed.linear.value, fixed.quantized.value)
    assert kept == (LinearFormat.TILED, LinearFormat.GROUPED)
    assert plan(W8A8, gpu, model__device="cuda").quantized.value is LinearFormat.INT8_DYNAMIC
    slow = msgspec.structs.replace(gpu, lacking_int8="int8 is slow here")
    kept = plan(W8A8, slow, model__device="cuda").quantized
    assert (kept.value, "int8 is slow here" in kept.reason) == (LinearFormat.INT8, True)
    for other in ("plain", "tiled"):
        said = plan(AWQ, gpu, model__device="cuda", model__linear=other)
        assert said.quantized.value == other


def test_blocks_of_a_gguf_file_stay_in_groups_on_a_gpu_but_those_of_tables() -> None:
    gpu = msgspec.structs.replace(DEVICE, kind="cuda", lacking="it is a GPU")
    kept = {"gpu_grouped": GIB // 8, "gpu_grouped_bytes": GIB // 10}
    weights = Weights(GIB // 2, GIB // 4, None, grouped=GIB // 4, grouped_bytes=GIB // 8, **kept)
    card = msgspec.structs.replace(CARD, gguf=True, weights=weights)
    found = decide(gpu, card, model__device="cuda", model__dtype="bfloat16")
    assert found.quantized.value is LinearFormat.GROUPED
    assert found.weight_bytes.value == 2 * (GIB // 2 - GIB // 8) + GIB // 10
    plain = decide(gpu, card, model__device="cuda", model__linear="plain")
    assert plain.quantized.value is LinearFormat.PLAIN


def test_experts_in_groups_stay_so_on_a_gpu_as_on_a_cpu() -> None:
    gpu = msgspec.structs.replace(DEVICE, kind="cuda", lacking="it is a GPU")
    experts = ExpertsCard(layers=2, count=8, chosen=2, width=64, shared_width=0, shared_gated=False)
    weights = Weights(GIB // 2, GIB // 4, Dtype.BFLOAT16, quantized=GIB // 4)
    card = msgspec.structs.replace(CARD, weights=weights, experts=experts, quantization=AWQ)
    on_cpu = decide(DEVICE, card, model__dtype="bfloat16").weight_bytes.value
    taken = decide(gpu, card, model__dtype="bfloat16", model__device="cuda").weight_bytes.value
    assert taken == on_cpu
    # Each of two ranks has half of a group of 64 inputs of an expert's down projection.
    ranked = {"model__device": "cuda", "parallel__tp_size": "2"}
    wide = 2 * 8 * 3 * 64 * card.hidden_size
    converted = on_cpu + wide * 2 - round(wide * (0.5 + 4 / 64))
    share = decide(gpu, card, model__dtype="bfloat16", **ranked).weight_bytes.value
    assert share == -(-converted // 2)
    # Two ranks with half of the experts each divide none of them.
    spread = decide(gpu, card, model__dtype="bfloat16", parallel__ep_size="2", **ranked)
    assert spread.weight_bytes.value == -(-on_cpu // 2)
    whole = msgspec.structs.replace(card, experts=msgspec.structs.replace(experts, width=128))
    share = decide(gpu, whole, model__dtype="bfloat16", **ranked).weight_bytes.value
    assert share == -(-on_cpu // 2)


@pytest.mark.parametrize(
    ("config", "inputs", "group"),
    [
        ({"quant_method": "awq", "group_size": 64}, 256, 64),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, 256, 256),
        ({"quant_method": "mxfp4"}, 256, 32),
        ({"quant_method": "fp8", "weight_block_size": [64, 96]}, 256, 96),
        ({"quant_method": "fp8"}, 256, 1),
    ],
    ids=str,
)
def test_schemes_say_which_inputs_ranks_cannot_divide(
    config: dict[str, object], inputs: int, group: int
) -> None:
    assert [rule.scheme.group_of(inputs) for rule in said(**config).rules] == [group]


def test_fp8_stays_where_a_kernel_multiplies_it() -> None:
    gpu = msgspec.structs.replace(DEVICE, kind="cuda", lacking="it is a GPU", lacking_fp8=None)
    fp8 = said(quant_method="fp8")
    found = plan(fp8, gpu, model__device="cuda")
    kept = (found.linear.value, found.quantized.value)
    assert kept == (LinearFormat.PLAIN, LinearFormat.FP8)
    assert "activations are rounded to fp8" in found.quantized.reason
    assert found.weight_bytes.value == GIB // 2 + GIB // 4 + GIB // 4 * 4 // 128
    assert ",quantized:fp8 as fp8" in found.bits.value
    old = msgspec.structs.replace(gpu, lacking_fp8="sm_80 does not multiply float8_e4m3fn")
    wide = plan(fp8, old, model__device="cuda")
    assert wide.quantized.value is LinearFormat.PLAIN
    assert wide.quantized.reason.endswith("sm_80 does not multiply float8_e4m3fn")
    asked = {"model__device": "cuda", "model__linear": "fp8"}
    assert plan(fp8, gpu, **asked).quantized.value is LinearFormat.FP8
    assert plan(None, gpu, **asked).quantized.value is LinearFormat.PLAIN
    with pytest.raises(ConfigError, match=r"model\.linear = fp8: sm_80 does not multiply"):
        plan(fp8, old, **asked)
    with pytest.raises(ConfigError, match=r"model\.linear = fp8: only kernels of a GPU"):
        plan(fp8, model__linear="fp8")
    assert plan(fp8, gpu, model__device="cuda", model__linear="plain").quantized.value == "plain"


def test_experts_in_fp8_stay_so_and_the_plan_says_it() -> None:
    gpu = msgspec.structs.replace(DEVICE, kind="cuda", lacking="it is a GPU", lacking_fp8=None)
    experts = ExpertsCard(layers=2, count=8, chosen=2, width=64, shared_width=0, shared_gated=False)
    fp8 = said(quant_method="fp8")
    dense, sparse = (
        decide(gpu, msgspec.structs.replace(CARD, quantization=fp8, **fields), model__device="cuda")
        for fields in ({}, {"experts": experts})
    )
    assert "with those of experts; activations are rounded" in sparse.quantized.reason
    assert "experts" not in dense.quantized.reason
    routers = 2 * 8 * CARD.hidden_size * 2
    assert sparse.weight_bytes.value - dense.weight_bytes.value == routers


def test_a_head_in_fp8_is_converted_and_the_plan_counts_it() -> None:
    """Unless the checkpoint leaves it out, compressed-tensors quantizes it."""
    gpu = msgspec.structs.replace(DEVICE, kind="cuda", lacking="it is a GPU", lacking_fp8=None)
    groups = {"g": {"targets": ["Linear"], "weights": {"type": "float", "strategy": "channel"}}}
    without, whole = (
        said(
            quant_method="compressed-tensors",
            format="float-quantized",
            config_groups=groups,
            ignore=ignored,
        )
        for ignored in (["lm_head"], [])
    )
    weights = Weights(GIB // 2, GIB // 4, Dtype.BFLOAT16, quantized=GIB // 4)
    card = msgspec.structs.replace(CARD, tied=False, weights=weights)
    taken = [
        decide(gpu, msgspec.structs.replace(card, quantization=each), model__device="cuda")
        for each in (without, whole)
    ]
    head = CARD.vocabulary_size * CARD.hidden_size
    more = taken[1].weight_bytes.value - taken[0].weight_bytes.value
    assert more == head * 2 - round(head * (1 + 4 / 128))


def test_kernels_of_gpus_fall_back_to_what_they_multiply() -> None:
    why = "gptq_marlin is a GPU kernel; the weights are in gptq format"
    found = plan(GPTQ, model__quantization="gptq_marlin")
    assert found.quantization == ResolvedValue("gptq", why)


def test_without_quantization_the_plan_is_what_it_was() -> None:
    assert (decide().quantization.value, decide().quantized.value) == ("none", LinearFormat.PACKED)
    assert decide(model__quantization="fp8").quantization.value == "fp8"
    assert decide().weight_bytes.value == GIB


def test_card_counts_weights_and_not_words(tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True}
    write_model(tmp_path, CONFIG | {"quantization_config": config})
    name = "model.layers.0.mlp.up_proj"
    tensors = {
        f"{name}.qweight": ("I32", [8, 96], 3072),
        f"{name}.qzeros": ("I32", [1, 12], 48),
        f"{name}.scales": ("F16", [1, 96], 192),
        f"{name}.g_idx": ("I32", [64], 256),
        "model.norm.weight": ("F16", [64], 128),
    }
    write_weights(tmp_path / "a.safetensors", **tensors)
    card: ModelCard = read_card(tmp_path)
    assert (card.weights.count, card.weights.quantized) == (64 * 96 + 64, 64 * 96)
    assert card.weights.dtype is Dtype.FLOAT16
