"""What nobody waits for is counted later, and nothing of it is lost."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.support import worker

from antiphon.model_worker.batching.running_batch import PoolUse
from antiphon.model_worker.batching.state import ChoiceKey, Finish, Progress
from antiphon.model_worker.observability.metrics import WorkerSize
from antiphon.model_worker.observability.step_accounting import REPORTS_MAX, StepAccounting
from antiphon.model_worker.protocol.worker_output import RunChoice
from antiphon.telemetry.metrics import Metrics
from antiphon.wire.base import FinishReason
from antiphon.wire.codec import pack_ids

if TYPE_CHECKING:
    from antiphon.model_worker.batching.loop import StepReport
    from antiphon.wire.heartbeat import WorkerStats

KEY = ChoiceKey(1)
LENGTH = Finish(reason=FinishReason.LENGTH)


def report(step: int, ids: list[int], finish: Finish | None = None) -> StepReport:
    progress = (Progress(key=KEY, token_ids=pack_ids(ids), finish=finish),)
    sizes = {"seconds": 0.01, "tokens": 1, "rows": 1, "pages_free": 1, "pages_evictable": 1}
    return worker.report(step, progress=progress, **sizes)


class Desk:
    """Accounts with one choice that runs since 10 s, and their readers."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.accounts = StepAccounting(
            self.metrics, WorkerSize(pages_total=10, page_tokens=16), None
        )
        state = worker.state([1, 2], max_new_tokens=9)
        self.accounts.begin(RunChoice(KEY, state, None), 10.0)

    def put_down(self, step: int, ids: list[int], finish: Finish | None = None) -> None:
        ended = finish is not None
        self.accounts.record(report(step, ids, finish), 10.0 + step, ended=ended)

    def read(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"antiphon_{name}", labels)

    @property
    def generated(self) -> float | None:
        return self.read("realtime_tokens_total", mode="decode")

    def figures(self) -> WorkerStats:
        return self.accounts.load_stats(report(9, []), grammars=0, now=19.0)


@pytest.fixture
def desk(caplog: pytest.LogCaptureFixture) -> Desk:
    caplog.set_level(logging.INFO)
    return Desk()


def test_whoever_reads_the_numbers_reads_all_that_was_put_down(desk: Desk) -> None:
    desk.put_down(1, [5])
    desk.put_down(2, [6, 7])
    assert desk.generated == 3
    assert desk.read("step_seconds_count") == 2
    desk.put_down(3, [8])
    assert desk.generated == 4
    assert desk.figures().output_tokens_s == pytest.approx(0.4)


def test_the_heartbeat_tells_all_that_was_put_down(desk: Desk) -> None:
    desk.put_down(1, [5])
    desk.put_down(2, [6, 7])
    assert desk.figures().output_tokens_s == pytest.approx(0.3)


def test_the_line_of_a_choice_comes_when_it_ends_and_has_all_its_tokens(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    desk.put_down(1, [5])
    assert not caplog.records
    desk.put_down(4, [6, 7], LENGTH)
    (line,) = (record.__dict__ for record in caplog.records)
    assert (line["output_tokens"], line["first_token_s"], line["seconds"]) == (3, 1.0, 4.0)


def test_a_choice_that_is_dropped_has_had_what_was_put_down(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    desk.put_down(1, [5])
    desk.accounts.drop(KEY, 12.0)
    (line,) = (record.__dict__ for record in caplog.records)
    assert (line["reason"], line["output_tokens"], line["seconds"]) == ("dropped", 1, 2.0)


def test_reports_that_nobody_reads_do_not_pile_up(desk: Desk) -> None:
    for step in range(10 * REPORTS_MAX):
        desk.put_down(step, [5])
        assert len(desk.accounts._uncounted) < REPORTS_MAX
    assert desk.generated == 10 * REPORTS_MAX


def test_tokens_that_the_cache_gave_up_are_counted_once(desk: Desk) -> None:
    for step, tokens in enumerate((16, 16, 48)):
        given = msgspec.structs.replace(report(step, [5]), evicted_tokens=tokens)
        desk.accounts.record(given, 10.0, ended=False)
        assert desk.read("evicted_tokens_total") == tokens


def test_windows_and_states_are_shown_where_a_model_has_them(desk: Desk) -> None:
    desk.put_down(1, [5])
    assert desk.read("swa_used_tokens") is None
    plain = report(2, [5])
    credit = msgspec.structs.replace(
        plain.credit,
        window=PoolUse(total=8, free=3, evictable=1),
        states=PoolUse(total=10, free=4, evictable=5),
    )
    desk.accounts.record(msgspec.structs.replace(plain, credit=credit), 10.0, ended=False)
    desk.accounts.process_pending()
    desk.accounts.metrics.flush()
    names = ("available_tokens", "evictable_tokens", "used_tokens")
    assert [desk.read(f"swa_{name}") for name in names] == [48, 16, 64]
    assert desk.read("swa_token_usage") == 0.5
    assert desk.read("max_total_num_tokens_swa") == 128
    assert [desk.read(f"mamba_{name}") for name in names] == [4, 5, 1]
    assert desk.read("mamba_usage") == 0.1


def test_the_time_of_the_start_is_shown_by_phase(desk: Desk) -> None:
    desk.accounts.metrics.started(load_s=2.0, warm_up_s=0.5)
    phases = ("load", "warm_up", "total")
    found = [desk.read("startup_time_seconds", phase=phase) for phase in phases]
    assert found == [2.0, 0.5, 2.5]
    assert desk.read("weight_load_duration_seconds", source="disk") == 2.0


def test_tokens_of_retracted_requests_are_counted_by_kind(desk: Desk) -> None:
    for step, (tokens, prompts) in enumerate(((30, 20), (30, 20), (90, 60))):
        retracted = msgspec.structs.replace(
            report(step, [5]), retracted_tokens=tokens, retracted_prompt_tokens=prompts
        )
        desk.accounts.record(retracted, 10.0, ended=False)
        assert desk.read("num_retracted_input_tokens_total") == prompts
        assert desk.read("num_retracted_output_tokens_total") == tokens - prompts


def test_tokens_of_running_requests_are_shown(desk: Desk) -> None:
    plain = report(1, [5])
    credit = msgspec.structs.replace(plain.credit, sequence_tokens=70)
    desk.accounts.record(msgspec.structs.replace(plain, credit=credit), 10.0, ended=False)
    assert desk.read("decode_sum_seq_lens") == 70
