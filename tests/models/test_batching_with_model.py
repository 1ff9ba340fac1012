"""The batching loop over the real model: what runs beside a request never changes its text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.models.tiny import VOCABULARY
from tests.support.models import open_model

from antiphon.model_worker.batching.engine_core import EngineCore
from antiphon.model_worker.batching.loop import BatchingLoop, StepReport
from antiphon.model_worker.batching.mailbox import Mail, Mailbox
from antiphon.model_worker.batching.state import ChoiceKey, EngineLimits, RequestState
from antiphon.model_worker.cache.table import CachePools
from antiphon.wire.codec import pack_ids, unpack_ids
from antiphon.wire.ids import RequestId
from antiphon.wire.sampling import SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

RANDOM = np.random.default_rng(4)
LENGTHS = (3, 50, 17, 90, 8, 31, 64, 2)
PROMPTS = [RANDOM.integers(0, VOCABULARY, length).tolist() for length in LENGTHS]
NEW_TOKENS = 30


def state(index: int) -> RequestState:
    return RequestState(
        request_id=RequestId(str(index)),
        choice=0,
        prompt_ids=pack_ids(PROMPTS[index]),
        sampling=SamplingParams(
            max_new_tokens=NEW_TOKENS, temperature=0.9 * (index % 2), top_p=0.9, seed=index
        ),
        deadline_unix_ms=2**52,
    )


def mail(*runs: tuple[ChoiceKey, RequestState]) -> Mail:
    return Mail(runs=dict(runs))


def run(folder: Path, pages: int, indices: range) -> tuple[dict[int, list[int]], StepReport]:
    """The texts of some requests that arrive one a turn, and the last report."""
    model = open_model(folder, pages=pages, dtype="float32")
    pools = CachePools(model.groups)
    limits = EngineLimits(
        step_tokens_max=40,
        chunk_tokens=24,
        running_max=6,
        context_tokens=min(256, pools.tokens_max),
        vocab_size=VOCABULARY,
        end_ids=frozenset(),
        weights_digest="",
        conservativeness=0.0,  # keeps nothing free for answers, so that some are retracted
    )
    batching = EngineCore(limits, pools)
    texts: dict[int, list[int]] = {index: [] for index in indices}

    def hear(report: StepReport) -> None:
        for progress in report.progress:
            texts[progress.key] += unpack_ids(progress.token_ids)

    loop = BatchingLoop(batching, model.runner, Mailbox(1), hear)
    for index in indices:
        hear(loop.turn(mail((ChoiceKey(index), state(index)))))
    for _ in range(2000):
        report = loop.turn(mail())
        hear(report)
        if batching.idle:
            assert report.credit.pages_free == pages
            return texts, report
    raise AssertionError("the loop does not come to an end")


@pytest.fixture(scope="module")
def alone(llama: Path) -> dict[int, list[int]]:
    texts: dict[int, list[int]] = {}
    for index in range(len(PROMPTS)):
        texts |= run(llama, 64, range(index, index + 1))[0]
    return texts


@pytest.mark.parametrize("pages", [32, 40, 256], ids=lambda pages: f"{pages} pages")
def test_neighbours_chunks_and_retractions_leave_no_trace(
    llama: Path, alone: dict[int, list[int]], pages: int
) -> None:
    texts, report = run(llama, pages, range(len(PROMPTS)))
    assert texts == alone
    assert (report.retractions > 0) == (pages < 256)


def test_greedy_requests_say_what_transformers_says(
    llama: Path, reference, alone: dict[int, list[int]]
) -> None:
    for index in range(0, len(PROMPTS), 2):
        whole = PROMPTS[index] + alone[index]
        assert len(alone[index]) == NEW_TOKENS
        assert alone[index] == reference(llama).greedy_after(whole, len(PROMPTS[index]))
