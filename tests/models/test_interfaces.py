"""Plans by hand: rows to verify, groups of layers with windows, and what a runner refuses."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
import torch
from tests.models.parity import save
from tests.models.specs import BY_NAME, attention_of, windowed
from tests.models.stepper import stepper
from tests.models.test_llama_parity import mutated
from tests.models.tiny import VOCABULARY
from tests.support.models import change_config, load, open_model

from antiphon.model_worker.batching.plan import SamplingColumns, SlotChanges
from antiphon.model_worker.cache.groups import GroupKind
from antiphon.model_worker.runner.input_batch import PlanRefused

if TYPE_CHECKING:
    from antiphon.model_worker.runner.opening import OpenModel

RANDOM = np.random.default_rng(11)
PROMPT = RANDOM.integers(0, VOCABULARY, 21).tolist()
OTHER = RANDOM.integers(0, VOCABULARY, 40).tolist()


def opened(folder: Path, **options) -> OpenModel:
    return open_model(folder, dtype="float32", **options)


def decoded(folder: Path, ids: list[int], tokens: int, temperature: float = 0.0) -> list[int]:
    model = opened(folder)
    one = stepper(model, [ids])
    line = one.lines[0]
    line.temperature = temperature
    one.step({0: len(ids)})
    one.decode(tokens - 1)
    return line.ids[len(ids) :]


def drafted(answer: list[int], done: int, right: int) -> list[int]:
    """The three tokens after those that are done, of which so many are right."""
    ahead = answer[done : done + 3]
    return [token if i < right else (token + 1) % VOCABULARY for i, token in enumerate(ahead)]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_runner_accepts_of_a_verify_row_what_a_draft_foresaw_and_one_more(
    llama: Path, temperature: float
) -> None:
    answer = decoded(llama, PROMPT, 20, temperature)
    model = opened(llama)
    batch = stepper(model, [PROMPT, OTHER])
    line, other = batch.lines.values()
    line.temperature = temperature
    batch.step({0: len(PROMPT), 1: len(OTHER)})
    accepted: list[int] = []
    for right in (0, 1, 2, 3, 1):
        draft = drafted(answer, len(line.ids) - len(PROMPT), right)
        outcome = batch.step({0: 1, 1: 1}, drafts={0: draft})
        assert batch.plans[-1].query_len.tolist() == [4, 1]
        accepted.append(int(outcome.starts[1]))
    assert accepted == [1, 2, 3, 4, 2]
    assert line.ids == PROMPT + answer[: len(line.ids) - len(PROMPT)]
    assert other.ids == OTHER + decoded(llama, OTHER, 6)


def test_a_chunk_in_the_middle_of_a_prompt_accepts_nothing(llama: Path) -> None:
    outcome = stepper(opened(llama), [PROMPT]).step({0: 10})
    assert (outcome.starts.tolist(), outcome.token_ids.tolist()) == ([0, 0], [])


def with_windows(folder: Path, windows: tuple[int | None, ...]) -> OpenModel:
    return mutated(folder, windowed(load(folder).spec, windows))


def test_layers_with_a_window_have_their_own_pages_and_drop_old_ones(llama: Path) -> None:
    model = with_windows(llama, (None, 9, None, 9))
    assert [(g.kind, g.layers, g.window) for g in model.groups] == [
        (GroupKind.FULL, (0, 2), None),
        (GroupKind.WINDOW, (1, 3), 9),
    ]
    batch = stepper(model, [OTHER], seed=5)
    line = batch.lines[0]
    batch.prefill(chunk=7)
    batch.decode(20)
    full, windowed = line.pages
    assert full[:12] != windowed[:12]
    assert windowed[:8] == [-1] * 8
    assert -1 not in full
    at_once = stepper(with_windows(llama, (None, 9, None, 9)), [line.ids[:-1]])
    at_once.step({0: len(line.ids) - 1})
    assert at_once.lines[0].ids == line.ids


def a_plan(llama: Path):
    model = opened(llama)
    batch = stepper(model, [PROMPT])
    batch.step({0: len(PROMPT)})
    return model.runner, batch.plans[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 3}, "step 3 does not follow step 1"),
        ({"step": 1}, "step 1 does not follow step 1"),
    ],
    ids=["a gap", "a repeat"],
)
def test_a_plan_that_the_runner_cannot_follow_is_refused(llama, change, message) -> None:
    runner, plan = a_plan(llama)
    with pytest.raises(PlanRefused, match=message):
        runner.run(msgspec.structs.replace(plan, **change))


def test_a_refused_plan_has_changed_what_later_plans_rely_on(llama: Path) -> None:
    runner, plan = opened(llama).runner, a_plan(llama)[1]
    pages = plan.page_tables[0][0]
    entries = np.array([np.zeros_like(pages), np.arange(len(pages)), pages], np.int32)
    changes = SlotChanges(slots=plan.slot, sampling=plan.sampling, entries=(entries,))
    bare = msgspec.structs.replace(plan, page_tables=(), sampling=SamplingColumns.zeros(0))
    asking = {"changes": changes, "draft_counts": np.ones(1, np.int32)}
    with pytest.raises(PlanRefused, match="no draft model"):
        runner.run(msgspec.structs.replace(bare, **asking))
    found = runner.run(msgspec.structs.replace(bare, step=plan.step + 1))
    assert found.token_ids == opened(llama).runner.run(plan).token_ids


def test_page_bytes_are_those_of_the_pool(llama: Path, tmp_path: Path) -> None:
    for dtype, item in (("float32", 4), ("bfloat16", 2)):
        model = open_model(llama, pages=8, dtype=dtype)
        layers, keys_and_values, heads, head_size = 4, 2, 2, 16
        assert model.groups[0].page_bytes == 4 * layers * keys_and_values * heads * head_size * item
        memory = model.runner.pools[0].memory
        assert memory.data.nbytes == 8 * model.groups[0].page_bytes


def test_all_latent_layers_share_a_group_of_one_vector_a_token(tmp_path: Path) -> None:
    save(BY_NAME["deepseek-v3"], tmp_path)
    model = open_model(tmp_path, pages=8, dtype="bfloat16")
    (group,) = model.groups
    assert (group.kind, group.layers) == (GroupKind.LATENT, (0, 1, 2))
    latent, position, item = 16, 8, 2
    assert group.page_bytes == 4 * 3 * (latent + position) * item


def test_an_old_rope_field_is_read_as_the_new_one(llama: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(llama, tmp_path / "old"))
    theta = change_config(folder, "rope_parameters")["rope_parameters"]["rope_theta"]
    change_config(folder, rope_theta=theta, rope_scaling={"type": "linear", "factor": 2.0})
    old, new = (attention_of(load(place).spec.layers[0]).rotary for place in (folder, llama))
    assert old is not None
    assert new is not None
    torch.testing.assert_close(old.frequencies(), new.frequencies() / 2)
