"""A draft head reads what the served model computes, as EAGLE-3 says, and changes no text."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch
from tests.kernels.rows import ISAS
from tests.models.eagle3 import DRAFTED, TextbookHead, write_head, write_stubborn_head
from tests.models.model_loop import LINEAR
from tests.models.parity import save
from tests.models.specs import BY_NAME
from tests.models.test_grammars import SETTINGS, Worker
from tests.models.test_speculation import EVERY, MODES, Bench, guided_states
from tests.models.test_standalone import OFTEN_FIRST, check
from tests.models.tiny import VOCABULARY, write_llama
from tests.support.models import load, plan
from tests.support.worker import state
from transformers import AutoModelForCausalLM

from antiphon.config.speculation import SpeculationConfig
from antiphon.model_worker.cache.groups import GroupKind
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.runner.draft_model import DraftHeadModel
from antiphon.model_worker.runner.model_runner import ModelRunner
from antiphon.model_worker.runner.opening import OpenModel
from antiphon.model_worker.runner.pools import cache_groups
from antiphon.model_worker.startup.engine import open_engine
from antiphon.model_worker.startup.warm_up import warm_up
from antiphon.wire.ids import RequestId

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from antiphon.model_worker.batching.plan import Ints, StepOutcome, StepPlan
    from antiphon.model_worker.batching.state import RequestState


def open_with_head(
    served: Path, head: Path, *, pages: int = 4096, linear: str = LINEAR, **values: Any
) -> OpenModel:
    """A model beside its draft head; `values` are of both."""
    fused = values.pop("fused", True)
    deterministic = values.get("deterministic", False)
    values = {"dtype": "float32", **values}
    model = load(served, linear=linear, **values)
    draft = DraftHeadModel(load(head, linear=linear, **values), model, page_tokens=4, pages=pages)
    groups = (*cache_groups(model.spec, model.build, page_tokens=4, pages=pages), draft.group)
    runner = ModelRunner(model, groups, fused=fused, deterministic=deterministic, draft=draft)
    return OpenModel(runner, groups, model.spec, draft=draft)


class Heard:
    """The drafts that a runner has made, by the tokens before them."""

    def __init__(self, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drafts: list[tuple[list[int], list[int]]] = []
        self._texts: dict[int, list[int]] = {}
        assert runner.draft is not None
        self._make = runner.draft.draft_after
        monkeypatch.setattr(runner.draft, "draft_after", self._draft_after)

    def _draft_after(self, plan: StepPlan, outcome: StepOutcome, aux: Tensor | None) -> Ints:
        drafts = self._make(plan, outcome, aux)
        assert plan.draft_counts is not None
        for row, slot in enumerate(plan.slot.tolist()):
            start, computed = plan.query_start.item(row), outcome.computed.item(row)
            first = (plan.kv_len - plan.query_len).item(row)
            text = self._texts.get(slot, [])[:first]
            text += plan.tokens[start : start + computed].tolist()
            sampled = outcome.token_ids[outcome.starts[row] : outcome.starts[row + 1]].tolist()
            self._texts[slot] = text
            if sampled and (count := plan.draft_counts.item(row)):
                self.drafts.append(([*text, sampled[-1]], drafts[row, :count].tolist()))
        return drafts


@pytest.mark.parametrize("mode", ["all at once", "in chunks", "overlapped"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "by layer"])
def test_drafts_are_those_of_the_textbook(
    llama: Path, mode: str, fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the served model accepted, and however its prompts were cut."""
    opened = open_with_head(llama, write_head(tmp_path), fused=fused)
    served = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    textbook = TextbookHead(tmp_path, served)
    heard = Heard(opened.runner, monkeypatch)
    dice = np.random.default_rng(1)
    states = [
        state(
            dice.integers(0, VOCABULARY, length).tolist(),
            request_id=RequestId(str(length)),
            temperature=0.0,
            max_new_tokens=9,
        )
        for length in (1, 5, 23, 40)
    ]
    Bench(opened).run(states, MODES[mode])
    assert len(heard.drafts) >= 12
    assert len({token for _, drafts in heard.drafts for token in drafts}) > 10
    for text, drafts in heard.drafts:
        assert textbook.drafts(text, len(text) - 1, len(drafts)) == drafts, text


@pytest.fixture(scope="module")
def served(llama: Path) -> tuple[Bench, list[Any]]:
    """The model alone, and what it says."""
    model = load(llama, dtype="float32", linear=LINEAR)
    groups = cache_groups(model.spec, model.build, page_tokens=4, pages=4096)
    alone = Bench(OpenModel(ModelRunner(model, groups), groups, model.spec))
    return alone, alone.run(EVERY, MODES["all at once"])


@pytest.mark.parametrize("write", [write_head, write_stubborn_head])
@pytest.mark.parametrize("mode", MODES)
def test_drafts_of_a_head_change_nothing(
    llama: Path,
    served: tuple[Bench, list[Any]],
    mode: str,
    write: Callable[[Path], Path],
    tmp_path: Path,
) -> None:
    bench = Bench(open_with_head(llama, write(tmp_path)))
    check(bench, EVERY, MODES[mode], served[1])


def test_accepted_drafts_of_a_head_change_nothing(
    llama: Path, served: tuple[Bench, list[Any]], tmp_path: Path
) -> None:
    """The head drafts one token, which is biased."""
    dice = np.random.default_rng(5)
    states: list[RequestState] = [
        state(
            dice.integers(0, VOCABULARY, 9 + number).tolist(),
            request_id=RequestId(str(number)),
            seed=number,
            max_new_tokens=40,
            **OFTEN_FIRST,
        )
        for number in range(9)
    ]
    plain = served[0].run(states, MODES["all at once"])
    bench = Bench(open_with_head(llama, write_stubborn_head(tmp_path)))
    for mode in ("all at once", "in chunks", "overlapped", "three ahead"):
        assert 0.05 < check(bench, states, MODES[mode], plain) < 0.95


@pytest.mark.skipif(not ISAS, reason="the CPU's own kernels are not built")
def test_in_deterministic_mode_drafts_of_a_head_change_no_bit(llama: Path, tmp_path: Path) -> None:
    values = {"dtype": "bfloat16", "linear": "packed", "deterministic": True, "pages": 1024}
    bench = Bench(open_with_head(llama, write_stubborn_head(tmp_path), **values))
    opened = open_with_head(llama, write_head(tmp_path / "other"), **values)
    wanted = Bench(opened).run(EVERY, MODES["all at once"])
    for mode in ("in chunks", "few slots and pages", "overlapped"):
        check(bench, EVERY, MODES[mode], wanted, rounding=0.0)


def test_a_head_is_refused_where_it_fits_no_layers(llama: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path)
    config = json.loads((head / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [0, 1, 3]
    (head / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"enters layers \(1, 2, 4\) .* which has 4"):
        open_with_head(llama, head)
    shallow = write_llama(tmp_path / "shallow", {"num_hidden_layers": 3})
    with pytest.raises(ModelLoadError, match="which has 3"):
        open_with_head(shallow, write_head(tmp_path / "head"))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_hidden_layers": 2}, "a draft head of 2 layers is not supported"),
        ({"draft_vocab_size": VOCABULARY + 1}, "exceeds vocab_size"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "the last hidden state only"),
        ({"draft_vocab_size": DRAFTED + 1}, "lm_head.weight .90, 48., not .91, 48."),
    ],
)
def test_heads_of_another_kind_are_refused(
    fields: dict[str, object], reason: str, tmp_path: Path
) -> None:
    head = write_head(tmp_path)
    config = json.loads((head / "config.json").read_text()) | fields
    (head / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=reason):
        load(head, dtype="float32")


def test_the_settings_open_a_draft_head(tmp_path: Path) -> None:
    """Its shape differs from that of the served model but for the hidden size."""
    folder = write_head(tmp_path, hidden=192, vocabulary=1024)
    speculation = SpeculationConfig(algorithm="eagle3", draft_model=str(folder), draft_steps=3)
    settings = msgspec.structs.replace(SETTINGS, speculation=speculation)
    states = guided_states()
    plain = Worker(open_engine(SETTINGS), SETTINGS).run(*states)
    engine = open_engine(settings)
    worker = Worker(engine, settings)
    warm_up(worker.loop, engine)
    target, draft = engine.core.pools.groups
    assert (draft.kind, draft.layers, draft.pages_total) == (
        GroupKind.DRAFT,
        (0,),
        target.pages_total,
    )
    assert engine.resolved is not None
    assert engine.resolved.draft.value is not None
    assert engine.resolved.draft.value.token_bytes.value * draft.page_tokens == draft.page_bytes
    drafted = worker.run(*states)
    assert [one.ids for one in drafted] == [other.ids for other in plain]
    assert engine.core.totals().drafts_proposed > 0


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    head = write_head(tmp_path, token_ids=torch.arange(DRAFTED) + VOCABULARY - DRAFTED + 1)
    with pytest.raises(ModelLoadError, match="d2t names tokens beyond the vocabulary of 301"):
        load(head, dtype="float32")


def test_a_model_with_several_streams_gives_none_to_a_head(tmp_path: Path) -> None:
    model = load(save(BY_NAME["gemma3n"], tmp_path / "served").folder, dtype="float32")
    with pytest.raises(ModelLoadError, match="several residual streams"):
        DraftHeadModel(load(write_head(tmp_path), dtype="float32"), model, page_tokens=4, pages=64)


def test_a_model_of_transformers_gives_no_hidden_states_to_a_head(
    llama: Path, tmp_path: Path
) -> None:
    model = load(llama, dtype="float32", implementation="transformers")
    assert plan(llama, implementation="transformers").implementation.value == "transformers"
    with pytest.raises(ModelLoadError, match="transformers' modules"):
        DraftHeadModel(load(write_head(tmp_path), dtype="float32"), model, page_tokens=4, pages=64)
