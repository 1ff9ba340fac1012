"""Every family that draws no tokens against transformers, and every feature against its absence.

The rows are in `families_judges`: nothing here knows a family.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.models import families_judges
from tests.models.judging import (
    Reader,
    check_absences,
    check_said,
    check_served,
    check_shared_beginning,
    ours,
    theirs,
)
from tests.models.parity import LINEARS, Saved, error, opened, save, texts
from tests.models.planned import check_counted, check_counted_nearly
from tests.models.pooling import PoolingEngine
from tests.models.stepper import Stepper
from tests.support.models import load

from antiphon.model_card.card import read_card
from antiphon.model_card.pooling import read_pooling
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.runner.input_batch import PlanRefused

if TYPE_CHECKING:
    from pathlib import Path

BY_NAME = {row.name: row for row in families_judges.ROWS}


@pytest.fixture(scope="module", params=families_judges.ROWS, ids=str)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save(request.param, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("linear", LINEARS)
def test_what_is_said_of_texts_is_what_transformers_says(saved: Saved, linear: str) -> None:
    check_said(saved, linear)


def test_a_beginning_that_is_cached_changes_nothing(saved: Saved) -> None:
    check_shared_beginning(saved)


@pytest.mark.parametrize("chunk", [None, 16])
def test_the_batching_loop_says_the_same(saved: Saved, chunk: int | None) -> None:
    check_served(saved, chunk)


def test_every_feature_and_every_tensor_is_missed(saved: Saved) -> None:
    check_absences(saved)


def test_the_plan_counts_the_bytes_that_are_taken(saved: Saved) -> None:
    check_counted(saved)


def test_without_weights_they_are_counted_nearly(saved: Saved) -> None:
    check_counted_nearly(saved)


def test_an_encoder_refuses_a_piece_of_a_text(tmp_path: Path) -> None:
    model = opened(save(BY_NAME["BertModel"], tmp_path))
    batch = Stepper(Reader(model, types=0), model.groups)
    batch.add(texts()[0])
    with pytest.raises(PlanRefused, match="needs the whole text in one pass"):
        batch.prefill(chunk=4)


def test_an_encoder_takes_what_its_context_holds_in_one_pass_and_refuses_more(
    tmp_path: Path,
) -> None:
    saved = save(replace(BY_NAME["BertForSequenceClassification"], types=0), tmp_path)
    longest = (texts()[-1] * 5)[:256]
    engine = PoolingEngine(tmp_path)
    longer = engine.vectors_of([[*longest, 7], longest])
    assert {key: reply.code for key, reply in engine.errors.items()} == {0: "prompt_too_long"}
    ours, reference = torch.tensor(longer[0]), saved.logits(longest)
    assert error(ours, reference) < saved.row.limit


def test_tokens_without_a_type_are_of_the_first(tmp_path: Path) -> None:
    saved = save(replace(BY_NAME["BertModel"], types=0), tmp_path)
    assert error(ours(saved, opened(saved)), theirs(saved)) < saved.row.limit


def test_norms_as_tensorflow_called_them(tmp_path: Path) -> None:
    saved = save(BY_NAME["BertForSequenceClassification"], tmp_path)
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    file = tmp_path / "model.safetensors"

    def renamed(name: str) -> str:
        found = next((new for new in old if name.endswith(new)), None)
        return name if found is None else name.removesuffix(found) + old[found]

    save_file({renamed(name): tensor for name, tensor in load_file(file).items()}, file)
    check_said(saved, "plain")


def test_modernbert_as_its_first_configs_say_it(tmp_path: Path) -> None:
    row = BY_NAME["ModernBertModel"]
    thirds = ["full_attention", "sliding_attention", "sliding_attention"]
    saved = save(replace(row, fields={**row.fields, "layer_types": thirds}), tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    for name in ("layer_types", "rope_parameters"):
        del config[name]
    old = {"global_attn_every_n_layers": 3, "global_rope_theta": 1e5, "local_rope_theta": 500.0}
    file.write_text(json.dumps({**config, **old}))
    check_said(saved, "plain")


@pytest.mark.parametrize("prefixed", [True, False])
@pytest.mark.parametrize("name", ["Bert", "Roberta", "XLMRoberta", "ModernBert"])
def test_a_model_trained_on_gaps_gives_the_vectors_of_its_base(
    tmp_path: Path, name: str, prefixed: bool
) -> None:
    base = BY_NAME[f"{name}Model"]
    gaps = getattr(transformers, f"{name}ForMaskedLM")
    whole = save(replace(base, architecture=gaps), tmp_path)
    if not prefixed:
        file, prefix = tmp_path / "model.safetensors", f"{gaps.base_model_prefix}."
        save_file({key.removeprefix(prefix): t for key, t in load_file(file).items()}, file)
    below = cast("transformers.PreTrainedModel", whole.model).base_model
    check_said(Saved(base, tmp_path, below), "plain")
    pooling = read_pooling(tmp_path, read_card(tmp_path), embedding=True)
    assert load(tmp_path, pooling=pooling).spec == load(tmp_path).spec


def test_a_base_is_loaded_beside_a_head_for_gaps(tmp_path: Path) -> None:
    saved = save(BY_NAME["BertModel"], tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {f"bert.{key}": tensor for key, tensor in load_file(file).items()}
    save_file({**tensors, "cls.predictions.bias": torch.ones(4)}, file)
    check_said(saved, "plain")


@pytest.mark.parametrize(
    ("field", "value"), [("position_embedding_type", "relative_key"), ("is_decoder", True)]
)
def test_another_kind_of_bert_is_refused(tmp_path: Path, field: str, value: object) -> None:
    save(BY_NAME["BertModel"], tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    with pytest.raises(ModelLoadError, match=field):
        load(tmp_path)


def test_what_sees_both_ways_does_not_write(tmp_path: Path) -> None:
    save(BY_NAME["Gemma3TextModel that sees both ways"], tmp_path)
    file = tmp_path / "config.json"
    writing = {"architectures": ["Gemma3ForCausalLM"]}
    file.write_text(json.dumps({**json.loads(file.read_text()), **writing}))
    with pytest.raises(ModelLoadError, match="use_bidirectional_attention"):
        load(tmp_path)
