"""Models without a family of ours: transformers' modules over our cache."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast

import pytest
import torch
import transformers
from tests.models import families_moe
from tests.models.families import (
    FOUR_LAYERS,
    GEMMA4,
    GPT2_SIZES,
    ROWS,
    SIZES,
    WINDOWS_IN_TURN,
    WITHOUT_KV_HEADS,
    Row,
    stretched,
)
from tests.models.parity import Saved, check_prefix, check_text, error, save, texts
from tests.models.stepper import logits_of
from tests.support.models import change_config, change_tensors, load, open_model

from antiphon.config.model import ModelConfig
from antiphon.config.settings import Settings
from antiphon.config.worker import CacheConfig
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.model.transformers_backend.model import TransformersDecoder
from antiphon.model_worker.startup.engine import open_engine

if TYPE_CHECKING:
    from pathlib import Path

    from antiphon.model_worker.runner.opening import OpenModel

LOCAL_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
BORROWED = (
    Row("helium", transformers.HeliumForCausalLM, {"head_dim": 16}),
    Row("stablelm", transformers.StableLmForCausalLM, {"use_qkv_bias": True, "qk_layernorm": True}),
    Row(
        "exaone4",
        transformers.Exaone4ForCausalLM,
        {"sliding_window": 20, "layer_types": WINDOWS_IN_TURN},
    ),
    Row(
        "cohere2",
        transformers.Cohere2ForCausalLM,
        {
            "sliding_window": 20,
            "logit_scale": 0.3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    Row(
        "olmoe",
        transformers.OlmoeForCausalLM,
        {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True},
    ),
    Row(
        "granitemoeshared",
        transformers.GraniteMoeSharedForCausalLM,
        {
            **LOCAL_EXPERTS,
            "shared_intermediate_size": 48,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
            "output_router_logits": True,
        },
    ),
    Row(
        "phimoe",
        transformers.PhimoeForCausalLM,
        {
            **LOCAL_EXPERTS,
            "sliding_window": 20,
            "lm_head_bias": True,
            "attention_bias": True,
        },
    ),
    Row(
        "jetmoe",
        transformers.JetMoeForCausalLM,
        {**LOCAL_EXPERTS, "kv_channels": 24},
    ),
    Row(
        "granite 4 without recurrent layers",
        transformers.GraniteMoeHybridForCausalLM,
        {
            "layer_types": ["attention"] * 3,
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
        },
    ),
    Row(
        "helium with dynamic rope",
        transformers.HeliumForCausalLM,
        {**stretched("dynamic", factor=3.0), "max_position_embeddings": 32, "head_dim": 16},
        by_token=True,
    ),
    Row(
        "glm4 moe lite, whose values are wider than its keys",
        transformers.Glm4MoeLiteForCausalLM,
        {
            **families_moe.LATENT,
            **families_moe.GROUPED,
            "v_head_dim": 40,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    Row(
        "minicpm3",
        transformers.MiniCPM3ForCausalLM,
        {**families_moe.LATENT, "scale_depth": 1.2, "scale_emb": 3.0, "dim_model_base": 32},
    ),
)
OURS = {row.name: row for row in (*ROWS, *families_moe.ROWS)}


@pytest.fixture(scope="module", params=BORROWED, ids=str)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save(request.param, tmp_path_factory.mktemp("model"))


def opened(saved: Saved, implementation: str = "auto", linear: str = "plain") -> OpenModel:
    return open_model(saved.folder, dtype="float32", linear=linear, implementation=implementation)


def test_logits_and_text_are_those_of_transformers(saved: Saved) -> None:
    ours = logits_of(opened(saved), texts()[-1], chunk=23)
    assert error(ours, saved.of_prompt) < saved.row.limit
    check_text(saved, "plain")
    check_prefix(saved)


def test_windows_are_found_and_have_pages_of_their_own(saved: Saved) -> None:
    said = saved.row.fields.get("sliding_window")
    windows = {group.window for group in opened(saved).groups}
    everywhere = "layer_types" not in saved.row.fields
    assert windows == ({said} if everywhere else {None, said})


@pytest.mark.parametrize(
    ("row", "said", "decided"),
    [
        (OURS["gemma4"], "transformers", "model.implementation"),
        (
            OURS["gemma4 with experts and values that are keys"],
            "transformers",
            "model.implementation",
        ),
        (OURS["deepseek-v3"], "transformers", "model.implementation"),
        (OURS["deepseek-v2"], "transformers", "model.implementation"),
        (BORROWED[-2], "auto", "no family of ours"),
    ],
    ids=str,
)
def test_cache_is_planned_as_transformers_modules_fill_it(
    tmp_path: Path, row: Row, said: Literal["auto", "transformers"], decided: str
) -> None:
    save(row, tmp_path)
    pool = CacheConfig(tokens_max=512)
    asked = Settings(cache=pool, model=ModelConfig(path=str(tmp_path), implementation=said))
    engine = open_engine(asked)
    plan = engine.resolved
    assert plan is not None
    assert plan.implementation.value == "transformers"
    assert decided in plan.implementation.reason
    kept = [group.page_bytes * group.pages_total for group in engine.core.pools.groups]
    assert plan.cache_bytes.value == sum(kept)


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "gemma2",
        "gemma3n",
        "gemma4",
        "gpt neox",
        "gpt2",
        "deepseek-v2",
        "deepseek-v3 with halves rotated",
    ],
)
def test_a_family_of_ours_may_be_borrowed_too(tmp_path: Path, name: str) -> None:
    saved = save(OURS[name], tmp_path)
    model = opened(saved, "transformers")
    ours = logits_of(model, texts()[-1], chunk=23)
    assert error(ours, saved.of_prompt) < saved.row.limit
    assert model.runner.choices[0].refused == (("cpu", "the model uses the transformers backend"),)


def test_a_line_in_the_log_names_the_backend_of_the_layers(
    saved: Saved, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        assert isinstance(load(saved.folder).decoder, TransformersDecoder)
    (line,) = [each for each in caplog.records if each.message.startswith("transformers' own")]
    assert line.__dict__["reason"] == "no family of ours"


@pytest.mark.parametrize(
    ("name", "fields", "complaint"),
    [
        (
            "gpt2",
            {"scale_attn_by_inverse_layer_idx": True},
            "other attention scales of GPT-2 are not supported",
        ),
        ("gemma3n", {"altup_correct_scale": False}, "altup_correct_scale = false is not supported"),
    ],
)
def test_a_variant_that_a_family_lacks_is_run_by_transformers(
    tmp_path: Path, name: str, fields: dict[str, object], complaint: str
) -> None:
    row = replace(OURS[name], fields={**OURS[name].fields, **fields})
    saved = save(row, tmp_path)
    assert error(logits_of(opened(saved), texts()[-1], chunk=23), saved.of_prompt) < row.limit
    with pytest.raises(ModelLoadError, match=complaint):
        load(tmp_path, implementation="antiphon")


def test_only_our_own_decoder_may_be_asked_for(saved: Saved) -> None:
    with pytest.raises(ModelLoadError, match=f"{saved.row.architecture.__name__} is not supported"):
        load(saved.folder, implementation="antiphon")


def test_only_our_own_decoder_keeps_weights_in_bytes(saved: Saved) -> None:
    with pytest.raises(ModelLoadError, match="keep no linears as 'int8'"):
        load(saved.folder, linear="int8")


def test_a_missing_or_misshapen_tensor_is_named(tmp_path: Path) -> None:
    saved = save(BORROWED[0], tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    change_tensors(tmp_path, lambda whole: whole | {name: whole[name][:-1].contiguous()})
    with pytest.raises(ModelLoadError, match=rf"of another shape: .*{name}"):
        opened(saved)
    change_tensors(tmp_path, lambda whole: {n: whole[n] for n in whole if n != name})
    with pytest.raises(ModelLoadError, match=f"missing: {name}"):
        opened(saved)


REFUSED = {
    "tokens that see what comes after them": (
        Row(
            "gemma4 both ways",
            transformers.Gemma4ForCausalLM,
            {**GEMMA4, "use_bidirectional_attention": "all"},
            sizes=FOUR_LAYERS,
        ),
        "its mask is neither causal nor a window",
    ),
    "a bias that grows with distance": (
        Row(
            "bloom",
            transformers.BloomForCausalLM,
            sizes={
                "vocab_size": 128,
                "hidden_size": 64,
                "n_layer": 3,
                "n_head": 4,
                "max_position_embeddings": 256,
            },
        ),
        "0 of its 3 layers use standard attention",
    ),
    "state beside keys and values": (
        Row("zaya", transformers.ZayaForCausalLM),
        "it keeps state beside keys and values",
    ),
    **{
        f"attentions of its own: {row.name}": (row, f"{row.name}.*choose among attentions of their")
        for row in (
            Row("falcon", transformers.FalconForCausalLM, sizes=WITHOUT_KV_HEADS),
            Row("gptj", transformers.GPTJForCausalLM, sizes={**GPT2_SIZES, "rotary_dim": 8}),
        )
    },
    "keys beside those of its tokens": (
        Row(
            "deepseek v4",
            transformers.DeepseekV4ForCausalLM,
            sizes={**SIZES, "num_hidden_layers": 4},
        ),
        r"layer \d has \d+ keys for \d+ tokens",
    ),
    "layers without attention": (
        Row(
            "mamba",
            transformers.MambaForCausalLM,
            sizes={"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2},
        ),
        "num_attention_heads",
    ),
}


@pytest.mark.parametrize(("row", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_what_our_cache_cannot_give_is_refused(tmp_path: Path, row: Row, reason: str) -> None:
    saved = save(row, tmp_path)
    with pytest.raises(ModelLoadError, match=reason):
        opened(saved, "transformers")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_state_beside_keys_and_values_is_found_in_the_dtype_of_the_weights(
    tmp_path: Path, dtype: str
) -> None:
    """Two passes of so few bits differ from one by as much where nothing is lost."""
    row, reason = REFUSED["state beside keys and values"]
    saved = save(row, tmp_path)
    cast("Any", saved.model).to(getattr(torch, dtype)).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=reason):
        open_model(tmp_path, dtype=dtype)


@pytest.mark.parametrize("row", [*BORROWED, OURS["gemma4"]], ids=str)
def test_rounding_is_no_state(tmp_path: Path, row: Row) -> None:
    saved = save(row, tmp_path)
    cast("Any", saved.model).to(torch.bfloat16).save_pretrained(tmp_path)
    assert open_model(tmp_path, dtype="bfloat16", implementation="transformers").groups


def test_a_padding_id_beyond_the_vocabulary_is_refused_by_name(tmp_path: Path) -> None:
    saved = save(BORROWED[0], tmp_path)
    change_config(tmp_path, pad_token_id=500)
    with pytest.raises(ModelLoadError, match="pad_token_id 500 is beyond the vocabulary of 128"):
        opened(saved)
