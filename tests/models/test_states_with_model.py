"""Models with recurrent states behind the batching loop: checkpoints, chunks, ranks and sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tests.models.families import ROWS, Row
from tests.models.parity import draw, error
from tests.models.stepper import Stepper, spy_on_logits
from tests.models.test_batching_with_model import (
    ANSWER_TOKENS,
    GREEDY,
    Engine,
    Judge,
    Mode,
    mixture,
)
from tests.models.tiny import VOCABULARY
from tests.support.models import change_config, load, open_model
from tests.support.worker import plain_runs, state

from antiphon.config.cluster import ClusterConfig
from antiphon.config.model import Dtype, ModelConfig
from antiphon.config.settings import Settings
from antiphon.config.worker import CacheConfig
from antiphon.kernels.op import KernelUnavailable
from antiphon.model_card.card import read_card
from antiphon.model_worker.batching.flights import InTurn
from antiphon.model_worker.batching.loop import BatchingLoop
from antiphon.model_worker.batching.mailbox import Mail, Mailbox
from antiphon.model_worker.batching.state import ChoiceKey
from antiphon.model_worker.cache.groups import GroupKind
from antiphon.model_worker.observability.replay import replay
from antiphon.model_worker.runner.pools import cache_groups
from antiphon.model_worker.startup.engine import open_engine
from antiphon.wire.ids import RequestId

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FAMILIES = {row.name: row for row in ROWS if row.name in ("falcon-h1", "qwen3-next")}


def write_row(folder: Path, row: Row, **fields: object) -> Path:
    """The row's model with the vocabulary of the other tests."""
    made = row.config.from_dict({**row.sizes, **row.fields, "vocab_size": VOCABULARY, **fields})
    model = row.architecture(made).eval()
    draw(model)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_row(tmp_path_factory.mktemp("states"), FAMILIES[request.param])


PROMPTS = mixture(60, seed=5, longest=100, prefixes=(31, 48, 70))
MODES = (
    Mode(batch=1, chunk=13),
    Mode(batch=1, chunk=64, cached=True),
    Mode(batch=16, chunk=24, cached=True),
    Mode(batch=16, chunk=40, cached=True, pages=170, states=34),
    Mode(batch=16),
    Mode(batch=16, chunk=24, pages=150, states=20),
)


@pytest.fixture(scope="module")
def judge(folder: Path, reference: Callable[[Path], object]) -> Judge:
    return Judge(reference(folder))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_greedy_answers_are_those_of_transformers(folder: Path, judge: Judge, mode: Mode) -> None:
    ran = Engine(folder, mode).run(PROMPTS, GREEDY)
    differing = [
        judge.near_ties(prompt, answer) for prompt, answer in zip(PROMPTS, ran.answers, strict=True)
    ]
    assert sum(map(bool, differing)) <= 1
    assert (ran.cached_tokens > 500) == mode.cached
    assert (ran.retractions > 0) == (mode.pages < Mode.pages)


def test_a_second_turn_goes_on_from_a_checkpoint_of_the_first(folder: Path, judge: Judge) -> None:
    engine = Engine(folder, Mode(batch=4, chunk=64, cached=True))
    first = np.random.default_rng(2).integers(0, VOCABULARY, 100).tolist()
    (answer,) = engine.run([first], GREEDY).answers
    second = [*first, *answer, 7, 8, 9]
    ran = engine.run([second], GREEDY)
    # The prompt's last page border is at 100, the answer's checkpoint at 112.
    assert len(answer) == ANSWER_TOKENS
    assert ran.cached_tokens == 112
    assert judge.near_ties(second, ran.answers[0]) == 0


def test_chunks_may_be_cut_anywhere(folder: Path) -> None:
    """However a prompt is cut, the numbers differ by rounding alone."""
    ids = np.random.default_rng(1).integers(0, VOCABULARY, 200).tolist()
    whole: torch.Tensor | None = None
    for chunk in (200, 64, 128, 50, 7, 1):
        model = open_model(folder, pages=64, states=256, dtype="float32")
        seen = spy_on_logits(model.runner)
        batch = Stepper(model.runner, model.groups)
        batch.add(ids)
        for start in range(0, len(ids), chunk):
            batch.step({0: min(chunk, len(ids) - start)}, all_logits=True)
        logits = torch.cat(seen)
        whole = logits if whole is None else whole
        assert error(logits, whole) < 1e-4, f"chunks of {chunk}"


def test_the_card_knows_the_size_of_states_and_pages(folder: Path) -> None:
    card = read_card(folder)
    for dtype, numbers in ((Dtype.FLOAT32, torch.float32), (Dtype.BFLOAT16, torch.bfloat16)):
        model = load(folder, dtype=str(dtype))
        assert model.build.dtype == numbers
        pages, states = cache_groups(model.spec, model.build, page_tokens=4, pages=3, states=5)
        assert (states.kind, states.pages_total) == (GroupKind.STATE, 5)
        assert states.page_bytes == card.state_bytes(dtype)
        assert pages.page_bytes == 4 * card.kv_bytes(dtype)


def test_a_worker_opens_a_hybrid_by_its_settings_and_replays_its_plans(folder: Path) -> None:
    settings = Settings(
        model=ModelConfig(path=str(folder)),
        cache=CacheConfig(tokens_max=2048, states_max=24, checkpoint_tokens=32),
        cluster=ClusterConfig(page_tokens=16),
    )
    engine = open_engine(settings)
    assert engine.resolved is not None
    assert engine.resolved.running_max.value == 8
    loop = BatchingLoop(engine.core, InTurn(engine.runner), Mailbox(1), lambda _: None)
    names = [RequestId(str(number)) for number in range(20)]
    states = [state(PROMPTS[i], request_id=names[i], sampling=GREEDY) for i in range(20)]
    loop.turn(Mail(runs=plain_runs({ChoiceKey(i): state for i, state in enumerate(states)})))
    while not engine.core.idle:
        loop.turn(Mail())
    again = replay(loop.recorder.records(), engine.core.pools.groups, open_engine(settings).runner)
    assert again.difference is None
    assert again.passed == 0
    assert again.rows >= 20 * ANSWER_TOKENS


def test_deterministic_inference_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(KernelUnavailable, match=r"packed|recurrent"):
        open_model(folder, pages=8, dtype="float32", deterministic=True)


def test_infinity_in_a_config_file_is_read(tmp_path: Path) -> None:
    folder = write_row(tmp_path, FAMILIES["falcon-h1"])
    change_config(folder, time_step_limit=[0.0, float("inf")])
    assert "Infinity" in (folder / "config.json").read_text()
    (mixer, _) = load(folder).spec.layers[0].mixers
    assert getattr(mixer, "step_limits") == (0.0, float("inf"))  # noqa: B009
