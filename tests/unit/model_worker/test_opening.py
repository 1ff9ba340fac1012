"""From settings to an engine, on the embedded model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from antiphon import embedded
from antiphon.config.settings import Settings
from antiphon.config.worker import CacheConfig
from antiphon.model_worker.batching.loop import BatchingLoop, StepReport
from antiphon.model_worker.batching.mailbox import Mail, Mailbox
from antiphon.model_worker.batching.request import ChoiceKey, RequestState
from antiphon.model_worker.opening import Engine, content_digest, open_engine
from antiphon.model_worker.service import warm_up
from antiphon.service.sockets import CannotStart
from antiphon.wire.codec import pack_ids, unpack_ids
from antiphon.wire.ids import RequestId
from antiphon.wire.sampling import SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

SMALL = Settings(cache=CacheConfig(tokens_max=512))


def answers(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """What the engine says, all prompts at once, each with 12 greedy tokens."""
    reports: list[StepReport] = []
    loop = BatchingLoop(engine.batching, engine.runner, Mailbox(1), reports.append)
    runs = tuple(
        (
            ChoiceKey(number),
            RequestState(
                request_id=RequestId(f"r{number}"),
                choice=0,
                prompt_ids=pack_ids(prompt),
                sampling=SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True),
                deadline_unix_ms=0,
            ),
        )
        for number, prompt in enumerate(prompts)
    )
    reports.append(loop.turn(Mail(runs=runs)))
    while not engine.batching.idle:
        reports.append(loop.turn(Mail()))
    said: list[list[int]] = [[] for _ in prompts]
    for news in (news for report in reports for news in report.progress):
        said[news.key] += unpack_ids(news.token_ids)
    return said


def test_the_embedded_model_says_the_same_beside_others_as_alone() -> None:
    prompts = [[5, 6, 7], [9] * 40, [3, 1, 4, 1, 5, 9, 2, 6]]
    together = answers(open_engine(SMALL), prompts)
    assert [len(ids) for ids in together] == [12, 12, 12]
    assert together == [answers(open_engine(SMALL), [prompt])[0] for prompt in prompts]


def test_the_pool_is_as_large_as_the_settings_say_and_bounds_the_context() -> None:
    limits = open_engine(SMALL).batching.limits
    assert limits.context_tokens == 512
    assert limits.end_ids


def test_a_warmed_up_engine_is_empty_again() -> None:
    engine = open_engine(SMALL)
    loop = BatchingLoop(engine.batching, engine.runner, Mailbox(1), lambda _: None)
    report = warm_up(loop)
    assert (report.step, report.progress) == (2, ())
    assert engine.batching.pools.used() == [0]


def test_a_model_of_another_digest_is_not_opened() -> None:
    cluster = msgspec.structs.replace(SMALL.cluster, model_digest="0" * 64)
    with pytest.raises(CannotStart, match=content_digest(embedded.path())):
        open_engine(msgspec.structs.replace(SMALL, cluster=cluster))


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    model = msgspec.structs.replace(SMALL.model, path=str(tmp_path))
    with pytest.raises(CannotStart, match=str(tmp_path)):
        open_engine(msgspec.structs.replace(SMALL, model=model))
