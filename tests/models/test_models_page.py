"""The page of the models says of a family what loading would."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import transformers
from tests.models.families import ROWS
from tests.models.parity import save
from tests.support.models import load
from tests.support.models_page import STORED, attention, refusal, sample

from antiphon.model_card.files import find_files
from antiphon.model_card.quantization_config import METHODS
from antiphon.model_worker.model.errors import ModelLoadError

if TYPE_CHECKING:
    from pathlib import Path


def test_every_method_has_a_column() -> None:
    assert STORED.keys() == METHODS.keys()


@pytest.mark.parametrize("method", METHODS)
def test_llama_is_read_however_it_is_stored(method: str) -> None:
    assert refusal(sample("LlamaForCausalLM"), method) is None


@pytest.mark.parametrize("method", METHODS)
def test_what_the_page_refuses_is_what_loading_refuses(tmp_path: Path, method: str) -> None:
    """GPT-2 keeps its weights as (inputs, outputs)."""
    reason = refusal(sample("GPT2LMHeadModel"), method)
    assert reason == "weights stored as (inputs, outputs) are not quantized"
    row = next(row for row in ROWS if row.architecture is transformers.GPT2LMHeadModel)
    folder = save(row, tmp_path).folder
    stored = {"quantization_config": {"quant_method": method, **STORED[method]}}
    with pytest.raises(ModelLoadError, match=r"weights stored as \(inputs, outputs\)"):
        load(find_files(folder, overrides=json.dumps(stored)))


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
