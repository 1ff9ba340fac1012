"""From settings to an engine, on the embedded model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.kernels.rows import ISAS, using
from tests.support import worker

from antiphon import embedded
from antiphon.config.cluster import differing
from antiphon.config.model import CacheDtype, LinearFormat
from antiphon.config.settings import Settings
from antiphon.config.worker import CacheConfig
from antiphon.model_worker.batching.loop import BatchingLoop, StepReport
from antiphon.model_worker.batching.mailbox import Mail, Mailbox
from antiphon.model_worker.batching.state import ChoiceKey, RequestState
from antiphon.model_worker.startup.checksums import content_digest
from antiphon.model_worker.startup.engine import Engine, open_engine, warm_up
from antiphon.service.startup import CannotStart
from antiphon.wire.codec import unpack_ids
from antiphon.wire.ids import RequestId

if TYPE_CHECKING:
    from pathlib import Path

SMALL = Settings(cache=CacheConfig(tokens_max=512))


def answers(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """What the engine says, all prompts at once, each with 12 greedy tokens."""
    reports: list[StepReport] = []
    loop = BatchingLoop(engine.core, engine.runner, Mailbox(1), reports.append)
    sampling = {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    runs = {
        ChoiceKey(n): worker.state(prompt, request_id=RequestId(f"r{n}"), **sampling)
        for n, prompt in enumerate(prompts)
    }
    reports.append(loop.turn(Mail(runs=runs)))
    while not engine.core.idle:
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


def test_report_of_a_started_request_counts_its_pages() -> None:
    engine = open_engine(SMALL)
    loop = BatchingLoop(engine.core, engine.runner, Mailbox(1), lambda _: None, clock=lambda: 7.0)

    def start(number: int) -> RequestState:
        sampling = {"max_new_tokens": 20, "temperature": 0.0, "ignore_eos": True}
        return worker.state([5 + number] * 40, request_id=RequestId(f"r{number}"), **sampling)

    free = []
    for number in range(3):
        report = loop.turn(Mail(runs={ChoiceKey(number): start(number)}))
        assert report.prefill_rows == 1
        free.append(report.credit.pages_free + report.credit.pages_evictable)
    # 40 tokens and the next one are in three pages of 16.
    assert [free[0] - later for later in free] == [0, 3, 6]


def test_a_model_that_embeds_warms_up_and_draws_nothing() -> None:
    model = msgspec.structs.replace(SMALL.model, embedding=True)
    engine = open_engine(msgspec.structs.replace(SMALL, model=model))
    loop = BatchingLoop(engine.core, engine.runner, Mailbox(1), lambda _: None)
    assert warm_up(loop, pools=True).step == 1
    limits = engine.core.limits
    assert engine.resolved is not None
    assert engine.resolved.pooling.value is not None
    assert limits.pool_width == engine.resolved.pooling.value.width
    with pytest.raises(CannotStart, match="does not generate"):
        warm_up(loop)


def test_the_pool_is_as_large_as_the_settings_say_and_bounds_the_context() -> None:
    limits = open_engine(SMALL).core.limits
    assert limits.context_tokens == 512
    assert limits.end_ids


@pytest.mark.skipif(not ISAS, reason="the CPU's own kernels are not built")
def test_pages_of_another_instruction_set_or_of_rounded_weights_are_others() -> None:
    said: dict[str, str] = {}
    names: set[bytes] = set()
    for isa in ISAS:
        with using(isa):
            engine = open_engine(SMALL)
        assert engine.resolved is not None
        said[isa] = engine.resolved.bits.value
        names.add(page_space(engine))
        assert engine.numerics_digest == "", "nothing was promised"
    model = msgspec.structs.replace(SMALL.model, linear=LinearFormat.INT8, deterministic=True)
    rounded = open_engine(msgspec.structs.replace(SMALL, model=model))
    names.add(page_space(rounded))
    assert len(names) == len(ISAS) + 1
    assert differing(said[ISAS[0]], rounded.numerics_digest) == ("linear",)
    for isa in ISAS[1:]:
        assert differing(said[ISAS[0]], said[isa]) == ("isa",)


def page_space(engine: Engine) -> bytes:
    """The name under which the pages of a first request are kept."""
    engine.core.add(ChoiceKey(1), worker.state([1, 2], max_new_tokens=1), 0.0)
    engine.core.next_rows(0.0)
    (request,) = engine.core.running.values()
    return request.namespace


@pytest.mark.skipif(not ISAS, reason="the CPU's own kernels are not built")
def test_pages_in_eight_bits_are_others_and_twice_as_many() -> None:
    engines = {
        dtype: open_engine(Settings(cache=CacheConfig(dtype=dtype, bytes_max=1 << 20)))
        for dtype in (CacheDtype.AUTO, CacheDtype.FP8_E4M3, CacheDtype.FP8_E5M2)
    }
    plans = [engine.resolved for engine in engines.values() if engine.resolved is not None]
    wide, *narrow = [plan.cache_pages.value for plan in plans]
    # What is left of the megabyte may hold one page more that is half as large.
    assert {pages // 2 for pages in narrow} == {wide}
    for engine in engines.values():
        (said,) = answers(engine, [[5, 6, 7]])
        assert len(said) == 12
    assert len({page_space(engine) for engine in engines.values()}) == 3


def test_a_warmed_up_engine_is_empty_again() -> None:
    engine = open_engine(SMALL)
    loop = BatchingLoop(engine.core, engine.runner, Mailbox(1), lambda _: None)
    report = warm_up(loop)
    assert (report.step, report.progress) == (2, ())
    assert engine.core.pools.used() == [0]


def test_a_model_of_another_digest_is_not_opened() -> None:
    cluster = msgspec.structs.replace(SMALL.cluster, model_digest="0" * 64)
    with pytest.raises(CannotStart, match=content_digest(embedded.path())):
        open_engine(msgspec.structs.replace(SMALL, cluster=cluster))


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    model = msgspec.structs.replace(SMALL.model, path=str(tmp_path))
    with pytest.raises(CannotStart, match=str(tmp_path)):
        open_engine(msgspec.structs.replace(SMALL, model=model))
