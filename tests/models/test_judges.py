"""What models make of whole texts that draw no tokens: theirs and ours, side by side.

A model with a head of scores says those; one without any says the stream itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import msgspec
import numpy as np
import pytest
import torch
import transformers
from tests.models import families_judges
from tests.models.model_loop import POOLED, PoolingEngine
from tests.models.parity import (
    LINEARS,
    MISSED,
    Saved,
    check_counted,
    check_counted_nearly,
    error,
    mutants,
    opened,
    save,
    texts,
    without_tensors,
)
from tests.models.specs import BY_NAME
from tests.models.stepper import Stepper
from tests.support.models import change_config, change_tensors, load
from torch import Tensor

from antiphon.model_card.card import read_card
from antiphon.model_card.pooling import read_pooling
from antiphon.model_worker.batching.plan import Ints, SamplingPart, StepOutcome, StepPlan
from antiphon.model_worker.cache.groups import GroupKind
from antiphon.model_worker.runner.input_batch import InputBatch, PlanRefused

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from antiphon.model_worker.runner.opening import OpenModel


class Reader:
    """A runner that draws nothing, and keeps by slot what leaves the last layer."""

    def __init__(self, model: OpenModel, types: int) -> None:
        self._runner, self._types = model.runner, types
        self.kept: dict[int, list[Tensor]] = {}

    @torch.inference_mode()
    def run(self, plan: StepPlan, part: Callable[[], SamplingPart] | None = None) -> StepOutcome:
        """Compute a plan; types of tokens are those of `typed`."""
        assert part is None, "nothing is sampled"
        runner, rows = self._runner, len(plan.slot)
        if self._types:
            types = (plan.tokens % self._types).astype(np.int32)
            plan = msgspec.structs.replace(plan, token_types=types)
        self.ctx = runner._contexts.of(plan, InputBatch(plan, runner._shapes, runner._states_count))
        tokens = torch.as_tensor(plan.tokens.astype(np.int64))
        left = runner._model.own_decoder.forward(self.ctx, tokens)[0]
        for slot, piece in zip(plan.slot, left.split(plan.query_len.tolist()), strict=True):
            self.kept.setdefault(int(slot), []).append(piece)
        nothing = np.zeros(0, np.int32)
        status, starts = np.zeros(rows, np.int32), np.zeros(rows + 1, np.int32)
        return StepOutcome(
            step=plan.step,
            starts=starts,
            token_ids=nothing,
            status=status,
            computed=plan.query_len,
        )

    def make_drafts(self) -> Ints:
        raise AssertionError("there is no draft model")


def typed(ids: list[int], types: int) -> Tensor:
    """The type of each token, (1, T)."""
    return torch.tensor([ids]) % types


@torch.inference_mode()
def theirs(saved: Saved) -> Tensor:
    """What transformers makes of every text, one at a time."""
    said: list[Tensor] = []
    for ids in texts():
        types = saved.row.types
        beside = {"token_type_ids": typed(ids, types)} if types else {}
        out = saved.model(torch.tensor([ids]), **beside)
        said.append(out.logits if "logits" in out else out.last_hidden_state[0])
    return torch.cat(said)


def ours(saved: Saved, model: OpenModel, chunk: int | None = None) -> Tensor:
    """What we make of every text, all side by side, each in pieces if it may be cut."""
    reader = Reader(model, saved.row.types)
    batch = Stepper(reader, model.groups)
    for ids in texts():
        batch.add(ids)
    batch.prefill(chunk if model.spec.causal else None)
    return said(model, reader, range(len(texts())))


@torch.inference_mode()
def said(model: OpenModel, reader: Reader, slots: range) -> Tensor:
    """The scores of each text, or its stream."""
    streams = [torch.cat(reader.kept[slot]) for slot in slots]
    if model.spec.head is None:
        return torch.cat(streams)
    pooled = torch.stack([POOLED[model.spec.pooling](stream) for stream in streams])
    return model.runner._model.own_decoder.scores(reader.ctx, pooled)


def check_said(saved: Saved, linear: str) -> None:
    """All texts side by side, and in pieces where they may be cut."""
    reference = theirs(saved)
    for chunk in (None, 17) if saved.loaded.spec.causal else (None,):
        assert error(ours(saved, opened(saved, linear), chunk), reference) < saved.row.limit


def check_shared_beginning(saved: Saved) -> None:
    """A text whose first pages another one has computed; of an encoder, nothing is kept at all."""
    ids, model = texts()[-1], opened(saved)
    if not model.spec.causal:
        assert [(group.kind, group.page_bytes) for group in model.groups] == [(GroupKind.PASS, 0)]
        return
    reader = Reader(model, saved.row.types)
    batch = Stepper(reader, model.groups)
    first, second = batch.add(ids[:40]), batch.add(ids)
    batch.step({0: 40})
    batch.share(first, second, 36)
    batch.step({1: len(ids) - 36})
    reference = theirs(saved)
    known = reader.kept[1][0] if model.spec.head is None else said(model, reader, range(1, 2))
    apart = (known - reference[-len(known) :]).abs().max() / reference.std()
    assert apart < saved.row.limit


def check_absences(saved: Saved) -> None:
    """Without any one feature, and without the tensors of any one name, something else is said."""
    reference = theirs(saved)
    for feature, mutant in mutants(saved).items():
        missed = error(ours(saved, opened(saved, mutant=mutant)), reference)
        assert missed > MISSED * saved.row.limit, f"nothing misses {feature}: {missed:.1e}"
    for kind, model in without_tensors(saved):
        missed = error(ours(saved, model), reference)
        assert not missed < MISSED * saved.row.limit, f"nothing misses {kind}: {missed:.1e}"


def check_served(saved: Saved, chunk: int | None, batch: int) -> None:
    """All texts through the batching loop, which asks for no types."""
    saved = replace(saved, row=replace(saved.row, types=0))
    engine = PoolingEngine(saved.folder, chunk=chunk, batch=batch)
    spec = opened(saved).spec
    assert engine.pooling.mode == spec.pooling
    reference = theirs(saved)
    if spec.head is None:
        streams = reference.split([len(ids) for ids in texts()])
        pooled = torch.stack([POOLED[spec.pooling](stream) for stream in streams])
        reference = torch.nn.functional.normalize(pooled, dim=1)
    ours = torch.tensor(np.stack(engine.vectors_of(texts())))
    assert error(ours, reference) < saved.row.limit


@pytest.fixture(scope="module", params=families_judges.ROWS, ids=str)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save(request.param, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("linear", LINEARS)
def test_streams_and_scores_of_texts_are_those_of_transformers(saved: Saved, linear: str) -> None:
    check_said(saved, linear)


def test_a_beginning_that_is_cached_changes_nothing(saved: Saved) -> None:
    check_shared_beginning(saved)


@pytest.mark.parametrize(("chunk", "batch"), [(None, 2), (16, 2), (17, 8)])
def test_the_batching_loop_gives_the_same(saved: Saved, chunk: int | None, batch: int) -> None:
    check_served(saved, chunk, batch)


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

    def renamed(name: str) -> str:
        old = name.replace("LayerNorm.weight", "LayerNorm.gamma")
        return old.replace("LayerNorm.bias", "LayerNorm.beta")

    change_tensors(tmp_path, lambda tensors: {renamed(n): t for n, t in tensors.items()})
    check_said(saved, "plain")


def test_modernbert_as_its_first_configs_declare_it(tmp_path: Path) -> None:
    row = BY_NAME["ModernBertModel"]
    thirds = ["full_attention", "sliding_attention", "sliding_attention"]
    saved = save(replace(row, fields={**row.fields, "layer_types": thirds}), tmp_path)
    old = {"global_attn_every_n_layers": 3, "global_rope_theta": 1e5, "local_rope_theta": 500.0}
    change_config(tmp_path, "layer_types", "rope_parameters", **old)
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
        prefix = f"{gaps.base_model_prefix}."
        change_tensors(
            tmp_path, lambda whole: {n.removeprefix(prefix): t for n, t in whole.items()}
        )
    below = cast("transformers.PreTrainedModel", whole.model).base_model
    check_said(Saved(base, tmp_path, below), "plain")
    pooling = read_pooling(tmp_path, read_card(tmp_path), embedding=True)
    assert load(tmp_path, pooling=pooling).spec == load(tmp_path).spec


def test_a_base_is_loaded_beside_a_head_for_gaps(tmp_path: Path) -> None:
    saved = save(BY_NAME["BertModel"], tmp_path)
    head = {"cls.predictions.bias": torch.ones(4)}
    change_tensors(tmp_path, lambda base: head | {f"bert.{n}": t for n, t in base.items()})
    check_said(saved, "plain")
