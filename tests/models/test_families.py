"""Every family against transformers, and every feature of it against its absence.

The rows are in `families`: nothing here knows a family.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import transformers
from tests.models.derived import unclassified
from tests.models.parity import (
    LINEARS,
    Saved,
    check_counted,
    check_counted_nearly,
    check_logits,
    check_mutants,
    check_prefix,
    check_tensors,
    check_text,
    save,
)
from tests.models.specs import BY_NAME, EVERY, ROWS, spec_of
from tests.support.models import change_config, load
from tests.support.models_page import STORED, attention, refusal, sample, source_names

from antiphon.model_card.files import find_files
from antiphon.model_card.quantization_config import METHODS
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.model.registry import FAMILIES

if TYPE_CHECKING:
    from pathlib import Path

    from tests.models.families import Row


DIFFERENT = ("llama", "gpt2", "gpt-oss", "deepseek-v3", "qwen3-next", "falcon-h1", "gemma3n")
"""Rows whose layers differ in kind: their tensors are left out in every run, all in a long one."""
PARAMS = [pytest.param(row, marks=[pytest.mark.long] if row.again else []) for row in ROWS]


@pytest.fixture(scope="module", params=PARAMS, ids=str)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save(request.param, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("linear", LINEARS)
def test_logits_are_those_of_transformers(saved: Saved, linear: str) -> None:
    check_logits(saved, linear)


@pytest.mark.parametrize("row", [row for row in ROWS if row.again], ids=str)
def test_a_text_model_under_other_names_is_that_of_transformers(row: Row, tmp_path: Path) -> None:
    check_logits(save(row, tmp_path), LINEARS[-1])


def test_greedy_text_is_that_of_transformers(saved: Saved) -> None:
    """By the linears that are usual; by all of them where layers differ in kind.

    Plain ones have the same loop: logits of a prompt, and of what follows a cached prefix, are
    those of transformers by them, too.
    """
    for linear in LINEARS if saved.row.name in DIFFERENT else LINEARS[-1:]:
        check_text(saved, linear)


@pytest.mark.long
@pytest.mark.parametrize("linear", LINEARS)
def test_greedy_text_is_that_of_transformers_by_any_linears(saved: Saved, linear: str) -> None:
    check_text(saved, linear)


def test_a_cached_prefix_changes_nothing(saved: Saved) -> None:
    check_prefix(saved)


def test_every_feature_that_is_switched_off_is_missed(saved: Saved) -> None:
    check_mutants(saved)


@pytest.mark.parametrize(
    "saved",
    [
        pytest.param(row, id=str(row), marks=() if row.name in DIFFERENT else pytest.mark.long)
        for row in ROWS
    ],
    indirect=True,
)
def test_every_tensor_that_is_zero_is_missed(saved: Saved) -> None:
    check_tensors(saved)


def test_the_plan_counts_the_bytes_that_the_decoder_takes(saved: Saved) -> None:
    check_counted(saved)


def test_a_model_without_weights_is_counted_nearly(saved: Saved) -> None:
    check_counted_nearly(saved)


@pytest.mark.parametrize("row", EVERY, ids=str)
def test_every_field_of_a_spec_is_a_size_a_name_or_a_feature(row: Row) -> None:
    assert not unclassified(spec_of(row))


def test_every_family_has_rows() -> None:
    assert FAMILIES.keys() == {row.architecture.__name__ for row in EVERY}


def test_every_method_has_a_column() -> None:
    assert STORED.keys() == METHODS.keys()


@pytest.mark.parametrize("method", METHODS)
def test_llama_is_read_however_it_is_stored(method: str) -> None:
    spec = sample("LlamaForCausalLM")
    assert refusal(spec, method, source_names(spec)) is None


@pytest.mark.parametrize("method", METHODS)
def test_what_the_page_refuses_is_what_loading_refuses(tmp_path: Path, method: str) -> None:
    """GPT-2 keeps its weights as (inputs, outputs)."""
    spec = sample("GPT2LMHeadModel")
    reason = refusal(spec, method, source_names(spec))
    assert reason == "weights stored as (inputs, outputs) are not quantized"
    row = next(row for row in ROWS if row.architecture is transformers.GPT2LMHeadModel)
    folder = save(row, tmp_path).folder
    stored = {"quantization_config": {"quant_method": method, **STORED[method]}}
    with pytest.raises(ModelLoadError, match=r"weights stored as \(inputs, outputs\)"):
        load(find_files(folder, overrides=json.dumps(stored)))


@pytest.mark.parametrize(
    ("name", "fields", "match"),
    [
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ("deepseek-v3", {"n_group": 3}, "no 3 of 8 experts .* within 2 of 3 groups"),
        ("deepseek-v3", {"topk_group": 1}, "no 3 of 8 experts .* within 1 of 4 groups"),
        ("mixtral", {"num_experts_per_tok": 7}, "no 7 of 6 experts"),
        ("qwen2-moe", {"layer_types": None}, "layer_types must list the layers with windows"),
        ("llama4", {"layer_types": ["sliding_attention"] * 3}, r"config\.json: "),
        ("llama4", {"no_rope_layers": [1, 0]}, r"config\.json: "),
        ("llama4", {"num_experts_per_tok": 7}, r"config\.json: "),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all'"),
        (
            "gemma4 with experts and values that are keys",
            {"top_k_experts": 5},
            "no 5 of 4 experts",
        ),
        ("gemma4", {"num_kv_shared_layers": 6}, "num_kv_shared_layers = 6: no layer before them"),
        ("gemma4", {"num_kv_shared_layers": -1}, "num_kv_shared_layers = -1: no layer before"),
        ("gemma4", {"vocab_size_per_layer_input": 100}, "= 100: must be at least vocab_size = 128"),
        ("gemma4", {"pad_token_id": 128}, "above pad_token_id = 128"),
        ("gemma4", {"num_global_key_value_heads": 0}, "num_global_key_value_heads"),
        (
            "gemma4",
            {"per_layer_config": {"1": {"num_key_value_heads": 3}}},
            "4 attention heads do not share 3",
        ),
        (
            "gemma4",
            {"per_layer_config": {"1": {"intermediate_size": 9}}},
            "per_layer_config: 1: intermediate_size: not supported",
        ),
        ("llama", {"intermediate_size": [96] * 3}, "intermediate_size: one number is supported"),
        ("gemma3n", {"intermediate_size": [96] * 5}, "intermediate_size names 5 of 6 layers"),
        ("gemma3n", {"altup_active_idx": 3}, "= 3: must be below altup_num_inputs = 3"),
        ("gemma3n", {"activation_sparsity_pattern": [0.5]}, "has 1 values for 6 layers"),
        ("gemma3n", {"activation_sparsity_pattern": [1.0] * 6}, "activation_sparsity_pattern"),
        ("BertModel", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("BertModel", {"is_decoder": True}, "is_decoder"),
        (
            "Gemma3TextModel that sees both ways",
            {"architectures": ["Gemma3ForCausalLM"]},
            "use_bidirectional_attention",
        ),
    ],
)
def test_a_config_that_no_model_of_its_family_has_is_refused(
    tmp_path: Path, name: str, fields: dict[str, object], match: str
) -> None:
    save(BY_NAME[name], tmp_path)
    change_config(tmp_path, **fields)
    with pytest.raises(ModelLoadError, match=match):
        load(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("LlamaForCausalLM", "grouped-query"),
        ("DeepseekV3ForCausalLM", "latent"),
        ("FalconH1ForCausalLM", "grouped-query, Mamba 2"),
        ("Qwen3NextForCausalLM", "grouped-query, gated delta net"),
        ("BertModel", "grouped-query, bidirectional"),
    ],
)
def test_the_kind_of_attention_is_that_of_the_declaration(architecture: str, kind: str) -> None:
    assert attention(sample(architecture)) == kind
