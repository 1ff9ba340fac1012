"""What an SGLang command line does to the batching of a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.unit.config.test_resolve import CARD, DEVICE
from tests.unit.config.test_sglang import serve
from tests.unit.model_worker.steps import Steps, pools

from antiphon.config.worker import Policy
from antiphon.model_worker.batching.planner import QueueRules
from antiphon.model_worker.cache.radix import RadixIndex
from antiphon.model_worker.startup.engine import open_engine_core
from antiphon.resolve.resolved_config import resolve

if TYPE_CHECKING:
    from antiphon.model_worker.batching.engine_core import EngineCore


def opened(line: str = "") -> EngineCore:
    settings = serve(line).settings
    resolved = resolve(settings, CARD, DEVICE)
    return open_engine_core(settings, resolved, pools(999), vocab_size=100)


def test_by_default_prefixes_are_kept_and_who_comes_first_goes_first() -> None:
    batching = opened()
    assert isinstance(batching.index, RadixIndex)
    assert batching.rules == QueueRules()
    limits = batching.limits
    assert (limits.step_tokens_max, limits.chunk_tokens, limits.fill_tokens) == (2048, 512, 256)
    assert (limits.mixed, limits.prefill_max, limits.conservativeness) == (True, None, 1.0)


def test_the_prefix_cache_can_be_switched_off() -> None:
    assert not opened("--disable-radix-cache").index.enabled


@pytest.mark.parametrize(
    ("line", "rules"),
    [
        ("--schedule-policy lpm", QueueRules(policy=Policy.LPM)),
        ("--schedule-policy priority", QueueRules(priority=True)),
        (
            "--schedule-policy lof --enable-priority-scheduling"
            " --schedule-low-priority-values-first --priority-scheduling-preemption-threshold 3",
            QueueRules(policy=Policy.LOF, priority=True, low_first=True, preempt_threshold=3),
        ),
        ("--abort-on-priority-when-disabled", QueueRules(refuse_priority=True)),
        ("--queue-max-overtake-s 2", QueueRules(max_overtake_s=2.0)),
    ],
)
def test_flags_say_who_goes_first(line: str, rules: QueueRules) -> None:
    assert opened(line).rules == rules


def test_flags_say_what_a_step_takes() -> None:
    limits = opened(
        "--chunked-prefill-size -1 --prefill-max-requests 2 --schedule-conservativeness 0.3"
        " --stream-interval 4 --max-running-requests 7 --batching-fill-tokens 100"
        " --no-batching-mixed --queue-timeout-s 5 --batching-running-timeout-s 60"
    ).limits
    assert limits.chunk_tokens is None
    assert (limits.prefill_max, limits.fill_tokens, limits.mixed) == (2, 100, False)
    assert (limits.conservativeness, limits.stream_interval) == (0.3, 4)
    assert (limits.running_max, limits.queue_timeout_s, limits.running_timeout_s) == (7, 5.0, 60.0)


def test_max_prefill_tokens_leaves_the_number_of_running_requests_alone() -> None:
    limits = opened("--max-prefill-tokens 16 --max-running-requests 32").limits
    assert (limits.fill_tokens, limits.running_max) == (16, 32)


def test_max_prefill_tokens_counts_new_prompt_tokens_and_no_decodes() -> None:
    given = opened("--max-prefill-tokens 8 --chunked-prefill-size 12").limits
    steps = Steps(
        pages=2000,
        running_max=40,
        fill_tokens=given.fill_tokens,
        chunk_tokens=given.chunk_tokens,
        step_tokens_max=given.step_tokens_max,
        context_tokens=64,
    )
    for key in range(20):
        steps.add(key, 4, max_new_tokens=50, ignore_eos=True)
    assert [steps.go()[2 * turn :] for turn in range(10)] == [
        [(2 * turn, 4), (2 * turn + 1, 4)] for turn in range(10)
    ]
    # Twenty decodes take nothing from the prompts, and the first chunk may be longer than that.
    steps.add(30, 20)
    steps.add(31, 4)
    steps.add(32, 4)
    steps.add(33, 4)
    assert steps.go()[20:] == [(30, 12)]
    assert steps.go()[20:] == [(30, 8)]
    assert steps.go()[21:] == [(31, 4), (32, 4)]


def test_in_a_full_queue_who_outranks_the_last_takes_its_place() -> None:
    steps = Steps(running_max=1, queue_max=1, rules=QueueRules(priority=True))
    steps.add(1, priority=1)
    steps.go()
    steps.add(2, priority=1)
    steps.add(3, priority=1)
    steps.add(4, priority=2)
    refused = [p.key for p in steps.batching.take_progress() if p.finish is not None]
    assert refused == [3, 2]
