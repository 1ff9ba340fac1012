"""Configs and checkpoints as they were published, which say less than what is written today."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.models.families import SIZES, Row, long_rope
from tests.models.parity import Saved, check_logits, error, save, texts
from tests.models.specs import BY_NAME, attention_of
from tests.models.stepper import logits_of
from tests.support.models import change_config, change_tensors, load, open_model
from torch import Tensor

from antiphon.config.errors import ConfigError
from antiphon.config.model import Dtype, LoadFormat, ModelConfig
from antiphon.config.settings import Settings
from antiphon.config.worker import CacheConfig
from antiphon.encoder.grid_configs import read_grid_spec
from antiphon.kernels.rotary import LinearScaling, ProportionalScaling, RotarySpec
from antiphon.layers.alternating_updates import StreamsSpec
from antiphon.layers.mlp import GatedMlpSpec
from antiphon.model_card.card import read_card
from antiphon.model_card.config_json import FAMILY_DEFAULTS, FIELD_ALIASES
from antiphon.model_card.files import ModelFiles, find_files
from antiphon.model_card.quantization_config import read_quantization
from antiphon.model_card.served_model import model_files
from antiphon.model_card.vision.grids import GridImages
from antiphon.model_card.vision.vision_card import read_vision
from antiphon.model_worker.model.config_file import read_config
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.model.llama_parts import read_spec
from antiphon.model_worker.model.registry import find_family
from antiphon.model_worker.model.weights import Checkpoint
from antiphon.model_worker.startup.checksums import content_digest
from antiphon.model_worker.startup.engine import open_engine

if TYPE_CHECKING:
    from pathlib import Path

    from antiphon.model_worker.runner.opening import OpenModel

LITE = "deepseek-v2 without groups and bottleneck"


@pytest.mark.parametrize(
    "name", ["gemma", "gemma3n", "gemma4", "glm4", "gpt2", "gpt neox", "phi", "starcoder2", LITE]
)
def test_what_a_config_leaves_out_is_the_habit_of_its_family(tmp_path: Path, name: str) -> None:
    save(BY_NAME[name], tmp_path)
    spec, card = load(tmp_path).spec, read_card(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    habits = FAMILY_DEFAULTS[config["model_type"]]
    dropped = {
        field
        for field, value in config.items()
        if field in {**habits, **dict.fromkeys(FIELD_ALIASES, 0)}
        and habits.get(FIELD_ALIASES.get(field, field)) == value
    }
    assert dropped, "this row says something else than its family's habits"
    change_config(tmp_path, *dropped)
    assert load(tmp_path).spec == spec
    assert read_card(tmp_path) == card


def test_gemma3_as_its_first_configs_declare_it(tmp_path: Path) -> None:
    saved = save(BY_NAME["gemma3"], tmp_path)
    change_config(
        tmp_path,
        *("layer_types", "rope_parameters", "_sliding_window_pattern"),
        sliding_window_pattern=2,
        rope_local_base_freq=500.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    local, full, last = map(attention_of, load(tmp_path).spec.layers)
    assert (local.window, full.window) == (20, None)
    assert local is last
    assert local.rotary == RotarySpec(32, 500.0)
    assert full.rotary == RotarySpec(32, 1e6, LinearScaling(8.0))
    check_logits(saved, "plain")


def test_a_model_that_sees_is_read_as_its_model_of_text(tmp_path: Path) -> None:
    """The config of Gemma 3 4B, which says of its text what its class does not."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "model_type": "gemma3",
        "text_config": text,
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    read, card = read_config(tmp_path), read_card(tmp_path)
    spec = read_spec(find_family(read.architectures), read)
    local, full = attention_of(spec.layers[0]), attention_of(spec.layers[5])
    assert (len(spec.layers), spec.vocabulary, spec.context_tokens) == (34, 262208, 131072)
    assert (local.query_heads, local.kv_heads, local.head_size) == (8, 4, 256)
    assert (local.window, full.window) == (1024, None)
    assert full.rotary == RotarySpec(256, 1e6, LinearScaling(8.0))
    assert (card.eos_ids, card.dtype, card.tied) == ((1, 106), Dtype.BFLOAT16, True)


def test_what_gemma4_leaves_out_is_the_default_of_its_class(tmp_path: Path) -> None:
    """Of twelve layers each sixth sees all; the last six share the keys of those before."""
    text = {"model_type": "gemma4_text", "num_hidden_layers": 12, "num_kv_shared_layers": 6}
    config = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": text,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    read, card = read_config(tmp_path), read_card(tmp_path)
    spec = read_spec(find_family(read.architectures), read)
    mixers = [attention_of(layer) for layer in spec.layers]
    local, full = mixers[4], mixers[5]
    assert (local.query_heads, local.kv_heads, local.head_size) == (8, 4, 256)
    assert (local.window, full.window, full.head_size) == (512, None, 512)
    assert local.rotary == RotarySpec(256, 1e4)
    assert full.rotary == RotarySpec(512, 1e6, ProportionalScaling(64))
    assert [mixer.kv_layer for mixer in mixers] == [None] * 6 + [4] * 5 + [5]
    assert [each.kv_layer for each in card.layer_heads] == [mixer.kv_layer for mixer in mixers]
    assert card.kv_bytes(Dtype.BFLOAT16) == 2 * 2 * 4 * (5 * 256 + 512)
    assert (card.per_layer_width, card.tied) == (12 * 256, True)


def published_gemma3n(layers: int, width: int, shared: int) -> dict[str, object]:
    """The config of google/gemma-3n-E2B-it or E4B-it, without what only transformers reads."""
    kinds = ["sliding_attention"] * 4 + ["full_attention"]
    text = {
        "activation_sparsity_pattern": [0.95] * 10 + [0.0] * (layers - 10),
        "altup_active_idx": 0,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_lr_multiplier": 1.0,
        "altup_num_inputs": 4,
        "attention_bias": False,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2048,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": [width] * layers,
        "laurel_rank": 64,
        "layer_types": kinds * (layers // 5),
        "max_position_embeddings": 32768,
        "model_type": "gemma3n_text",
        "num_attention_heads": 8,
        "num_hidden_layers": layers,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": shared,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": 512,
        "torch_dtype": "bfloat16",
        "vocab_size": 262400,
        "vocab_size_per_layer_input": 262144,
    }
    return {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "audio_config": {"model_type": "gemma3n_audio", "hidden_size": 1536, "vocab_size": 128},
        "audio_soft_tokens_per_image": 188,
        "audio_token_id": 262273,
        "eos_token_id": [1, 106],
        "image_token_id": 262145,
        "model_type": "gemma3n",
        "text_config": text,
        "torch_dtype": "bfloat16",
        "vision_config": {"architecture": "mobilenetv5_300m_enc", "model_type": "gemma3n_vision"},
        "vision_soft_tokens_per_image": 256,
    }


@pytest.mark.parametrize(
    ("layers", "width", "shared", "billions"), [(30, 8192, 10, 4.43), (35, 16384, 15, 6.83)]
)
def test_gemma3n_is_read_as_it_was_published(
    tmp_path: Path, layers: int, width: int, shared: int, billions: float
) -> None:
    """E2B and E4B: so many parameters are read, without keys and values that nothing reads."""
    (tmp_path / "config.json").write_text(json.dumps(published_gemma3n(layers, width, shared)))
    read, card = read_config(tmp_path), read_card(find_files(tmp_path, LoadFormat.DUMMY))
    spec = read_spec(find_family(read.architectures), read)
    mixers = [attention_of(layer) for layer in spec.layers]
    local, full, own = mixers[0], mixers[4], layers - shared
    assert (local.query_heads, local.kv_heads, local.head_size) == (8, 2, 256)
    assert (local.window, full.window, local.scale) == (512, None, 1.0)
    assert (local.rotary, full.rotary) == (RotarySpec(256, 1e4), RotarySpec(256, 1e6))
    sharing = [own - 1 if layer % 5 == 4 else own - 2 for layer in range(own, layers)]
    assert [mixer.kv_layer for mixer in mixers] == [None] * own + sharing
    blocks = [layer.feed_forward for layer in spec.layers]
    assert all(isinstance(block, GatedMlpSpec) and block.width == width for block in blocks)
    assert [getattr(block, "sparsity", None) for block in blocks] == [0.95] * 10 + [0.0] * (
        layers - 10
    )
    assert spec.streams == StreamsSpec(count=4)
    assert (spec.vocabulary, spec.context_tokens, spec.tied) == (262400, 32768, True)
    assert (card.eos_ids, card.dtype, card.tied) == ((1, 106), Dtype.BFLOAT16, True)
    assert card.kv_bytes(Dtype.BFLOAT16) == 2 * own * 2 * 2 * 256
    assert (card.per_layer_width, card.per_layer_vocabulary) == (layers * 256, 262144)
    assert round(card.weights.count / 1e9, 2) == billions


def test_a_model_whose_positions_have_axes_is_read_as_it_was_published(tmp_path: Path) -> None:
    """The config of Qwen2.5-VL 7B, whose text model has no config of its own."""
    config = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "attention_dropout": 0.0,
        "eos_token_id": 151645,
        "hidden_act": "silu",
        "hidden_size": 3584,
        "image_token_id": 151655,
        "intermediate_size": 18944,
        "max_position_embeddings": 128000,
        "max_window_layers": 28,
        "model_type": "qwen2_5_vl",
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vision_config": {
            "depth": 32,
            "hidden_act": "silu",
            "hidden_size": 1280,
            "in_chans": 3,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 3584,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "temporal_patch_size": 2,
            "tokens_per_second": 2,
        },
        "vocab_size": 152064,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = read_config(tmp_path)
    spec = read_spec(find_family(read.architectures), read)
    mixer = attention_of(spec.layers[0])
    assert mixer.rotary == RotarySpec(128, 1e6, sections=(16, 24, 24))
    assert (mixer.window, spec.norm.eps, spec.position_axes) == (None, 1e-6, True)
    tower, card = read_grid_spec(tmp_path), read_vision(tmp_path)
    assert (tower.width, tower.hidden, tower.window) == (1280, 3584, 4)
    assert isinstance(card, GridImages)
    assert (card.pieces(1024, 768), card.columns(1024, 768)) == ((37 * 27,), 37)
    change_config(tmp_path, rope_scaling={"type": "mrope", "mrope_section": [16, 24]})
    with pytest.raises(ModelLoadError, match=r"mrope_section = \[16, 24\]: must be 3 numbers"):
        read_spec(find_family(read.architectures), read_config(tmp_path))


def test_another_model_that_sees_is_refused_by_its_name(tmp_path: Path) -> None:
    config = {"architectures": ["FuyuForConditionalGeneration"], "text_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused = r"FuyuForConditionalGeneration is not supported.*Gemma3ForConditionalGeneration"
    with pytest.raises(ConfigError, match=refused):
        read_card(tmp_path)
    with pytest.raises(ModelLoadError, match=refused):
        load(tmp_path)


def test_fields_of_the_whole_are_read_for_the_text_within(tmp_path: Path) -> None:
    """Rounded by names as the whole model has them; what the operator says comes last."""
    save(BY_NAME["mistral that sees"], tmp_path)
    plain = ["language_model.lm_head", "language_model.model.layers.1.mlp.gate_proj"]
    rounded = {"quant_method": "fp8", "ignored_layers": plain}
    change_config(tmp_path, quantization_config=rounded)
    files = find_files(tmp_path, overrides='{"max_position_embeddings": 99}')
    said = read_quantization(files.config())
    assert said is not None
    assert said.scheme("model.layers.1.mlp.gate_proj") is None
    assert said.scheme("model.layers.0.mlp.gate_proj") is not None
    assert read_card(files).context_tokens == 99


def test_tensors_that_see_are_counted_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(BY_NAME["gemma3 that sees"], tmp_path)
    with caplog.at_level("INFO"):
        load(tmp_path)
    (line,) = (one for one in caplog.records if "passed over" in one.message)
    names = Checkpoint.open(tmp_path).tensors
    assert line.__dict__["tensors"] == sum(not name.startswith("model.") for name in names)


def without(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def test_gpt2_as_its_base_alone_was_saved(tmp_path: Path) -> None:
    saved = save(BY_NAME["gpt2"], tmp_path)
    mask = {"h.0.attn.bias": torch.ones(1, 1, 8, 8), "h.0.attn.masked_bias": torch.ones(1)}
    change_tensors(tmp_path, lambda whole: without("transformer.", whole) | mask)
    check_logits(saved, "plain")


@pytest.mark.parametrize("kind", [torch.bool, torch.uint8])
@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_pythia_with_its_masks(tmp_path: Path, kind: torch.dtype, ending: str) -> None:
    saved = save(BY_NAME["gpt neox"], tmp_path)
    file = tmp_path / "model.safetensors"
    mask = {
        "gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 8, 8, dtype=kind),
        "gpt_neox.layers.0.attention.masked_bias": torch.tensor(-1e9),
        "gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.ones(2),
    }
    held = load_file(file) | mask
    file.unlink()
    if ending == "bin":
        torch.save(held, tmp_path / "pytorch_model.bin")
    else:
        save_file(held, file)
    check_logits(saved, "plain")


def test_llama4_as_its_first_configs_declare_it(tmp_path: Path) -> None:
    save(BY_NAME["llama4"], tmp_path)
    spec = load(tmp_path).spec
    change_config(tmp_path, attn_temperature_tuning=4)
    assert load(tmp_path).spec == spec
    change_config(tmp_path, attn_temperature_tuning=0)
    assert load(tmp_path).spec != spec


def test_phi3_with_a_rotation_of_its_old_name(tmp_path: Path) -> None:
    save(BY_NAME["phi3"], tmp_path)
    spec = load(tmp_path).spec
    rope = change_config(tmp_path, "rope_parameters")["rope_parameters"]
    old = {"type": "su", "short_factor": rope["short_factor"], "long_factor": rope["long_factor"]}
    theta = rope["rope_theta"]
    change_config(tmp_path, rope_scaling=old, rope_theta=theta, partial_rotary_factor=0.75)
    assert load(tmp_path).spec == spec


def stacked(tensors: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """With one tensor for the same linears of all experts, gate and up together."""
    made = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for block in {name.partition(".experts.")[0] for name in tensors.keys() - made.keys()}:
        gate, up, down = (
            torch.stack(
                [tensors[f"{block}.experts.{number}.{part}.weight"] for number in range(count)]
            )
            for part in ("gate_proj", "up_proj", "down_proj")
        )
        made[f"{block}.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        made[f"{block}.experts.down_proj"] = down
    return made


def test_qwen3_5_as_it_was_published(tmp_path: Path) -> None:
    """Experts are stacked, and there is a layer that predicts tokens beyond the next."""
    saved = save(BY_NAME["qwen3.5 with experts"], tmp_path)
    beyond = {"mtp.fc.weight": torch.ones(64, 128), "mtp.layers.0.mlp.gate.weight": torch.ones(6)}
    change_tensors(tmp_path, lambda whole: stacked(whole, 4) | beyond)
    names = Checkpoint.open(tmp_path).tensors
    assert names["model.layers.0.mlp.experts.gate_up_proj"].shape == (4, 64, 64)
    check_logits(saved, "plain")
    change_config(tmp_path, num_experts=3)
    with pytest.raises(ModelLoadError, match=r"unexpected: .*experts\.down_proj"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["qwen3", "llama", "phi"])
def test_names_without_the_base_are_those_of_the_base(tmp_path: Path, name: str) -> None:
    saved = save(BY_NAME[name], tmp_path)
    change_tensors(tmp_path, lambda whole: without("model.", whole))
    check_logits(saved, "plain")


def test_mistral3_is_tied_where_the_whole_is(tmp_path: Path) -> None:
    row = BY_NAME["mistral that sees"]
    saved = save(replace(row, fields={**row.fields, "tie_word_embeddings": True}), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["tie_word_embeddings"]
    assert not config["text_config"]["tie_word_embeddings"]
    check_logits(saved, "plain")


def test_chunks_of_attention_are_whole_pages(tmp_path: Path) -> None:
    save(BY_NAME["llama4"], tmp_path)
    with pytest.raises(ModelLoadError, match="attention_chunk_size 20: pages of 16 tokens"):
        open_model(tmp_path, page_tokens=16, pages=8)


TRAINED, LONGEST = 64, 256
"""Tokens that the model was trained with, and `max_position_embeddings`."""
TEXT = texts()[-1]
LONG_TEXT = (TEXT * 2)[:100]

Implementation = Literal["antiphon", "transformers"]
BOTH = pytest.mark.parametrize("implementation", ["antiphon", "transformers"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    row = Row(
        "phi3", transformers.Phi3ForCausalLM, {**long_rope(trained=TRAINED), "sliding_window": None}
    )
    assert row.sizes is SIZES
    return save(row, tmp_path_factory.mktemp("model"))


def settings(saved: Saved, context_tokens: int | None) -> Settings:
    model = ModelConfig(path=str(saved.folder), context_tokens=context_tokens)
    return Settings(model=model, cache=CacheConfig(tokens_max=512))


def files_of(saved: Saved, context_tokens: int | None) -> ModelFiles:
    return model_files(settings(saved, context_tokens))


def opened(
    saved: Saved, context_tokens: int | None, implementation: Implementation = "antiphon"
) -> OpenModel:
    return open_model(
        files_of(saved, context_tokens), pages=64, dtype="float32", implementation=implementation
    )


@BOTH
@pytest.mark.parametrize("context_tokens", [len(TEXT), TRAINED])
def test_context_up_to_the_trained_length_takes_the_short_factors(
    saved: Saved, context_tokens: int, implementation: Implementation
) -> None:
    ours = logits_of(opened(saved, context_tokens, implementation), TEXT, chunk=23)
    assert error(ours, saved.of_prompt) < saved.row.limit


@BOTH
@pytest.mark.parametrize("context_tokens", [None, 2 * TRAINED, TRAINED + 1])
def test_longer_context_takes_the_long_factors(
    saved: Saved, context_tokens: int | None, implementation: Implementation
) -> None:
    model = opened(saved, context_tokens, implementation)
    ours = logits_of(model, LONG_TEXT, chunk=23)
    assert error(ours, saved.logits(LONG_TEXT)) < saved.row.limit


@BOTH
def test_short_text_in_a_longer_context_differs_from_transformers(
    saved: Saved, implementation: Implementation
) -> None:
    """As docs/models.md states: transformers would take the short factors for this text."""
    ours = logits_of(opened(saved, None, implementation), TEXT, chunk=23)
    assert error(ours, saved.of_prompt) > 1000 * saved.row.limit
    # The text itself is the beginning of a longer one, whose keys transformers rotates alike.
    begun = saved.logits(LONG_TEXT)[: len(TEXT)]
    assert error(ours, begun) < saved.row.limit


def test_factors_in_use_are_part_of_the_digest_and_of_the_plan(saved: Saved) -> None:
    whole, short, longer = (content_digest(files_of(saved, n)) for n in (None, TRAINED, LONGEST))
    assert whole == longer != short
    for length, factors in ((TRAINED, "short"), (LONGEST, "long")):
        plan = open_engine(settings(saved, length)).resolved
        assert plan is not None
        assert f"rope:{factors}" in plan.bits.value
        assert f"{factors} rope factors" in plan.context_tokens.reason


STRAY = {
    "gpt2": {"intermediate_size": 96, "num_key_value_heads": 1, "head_dim": 8},
    "gpt neox": {"num_key_value_heads": 1},
}


@pytest.mark.parametrize("name", sorted(STRAY))
def test_a_stray_field_changes_neither_plan_nor_logits(tmp_path: Path, name: str) -> None:
    saved = save(BY_NAME[name], tmp_path)
    card = read_card(tmp_path)
    change_config(tmp_path, **STRAY[name])
    assert read_card(tmp_path) == card
    check_logits(saved, "plain")
