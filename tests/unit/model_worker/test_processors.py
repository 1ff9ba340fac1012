from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tests.support.worker import ints, step_plan
from tests.unit.model_worker.steps import Steps

from antiphon.kernels.op import DeviceCapability
from antiphon.kernels.ops import select
from antiphon.model_worker.batching.plan import Timestamps
from antiphon.model_worker.batching.token_masks import (
    ThinkingClock,
    TokenFilter,
    looks_back,
    pack,
    words_count,
)
from antiphon.model_worker.runner.sampling import Sampler
from antiphon.wire.command import PauseMode
from antiphon.wire.sampling import (
    AllowRange,
    AllowTokens,
    DisallowFirst,
    DisallowTokens,
    LogitProcessor,
    ThinkingBudget,
    TimestampRules,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.model_worker.batching.plan import Ints

VOCABULARY = 70
BEGIN, LINE, END = 50, 60, 61
BUDGET = ThinkingBudget(tokens_max=3, begin_id=BEGIN, closing_ids=(LINE, END))


def known(*ids: int) -> Callable[[int], Ints]:
    """All tokens so far, as a filter reads them: those from a first one on."""
    return lambda start: ints(*ids[start:])


def allowed(*processors: LogitProcessor, prompt: tuple[int, ...] = (1,), ids: tuple[int, ...] = ()):
    """The tokens that may follow a prompt and some outputs."""
    made = TokenFilter(processors, ints(*prompt), VOCABULARY)
    words = np.full(words_count(VOCABULARY), -1, np.int32)
    made.restrict(words, known(*prompt, *ids))
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[:VOCABULARY]).tolist())


@given(st.lists(st.booleans(), min_size=1, max_size=200))
def test_packed_bits_are_read_as_they_are_documented(bits: list[bool]) -> None:
    words = pack(np.array(bits))
    assert len(words) == words_count(len(bits))
    read = [bool(int(words[token // 32]) >> token % 32 & 1) for token in range(len(bits))]
    assert read == bits


def test_every_processor_does_something() -> None:
    examples: dict[type, LogitProcessor] = {
        DisallowTokens: DisallowTokens(token_ids=(5,)),
        AllowTokens: AllowTokens(token_ids=(5, 69)),
        AllowRange: AllowRange(first=31, last=33),
        ThinkingBudget: ThinkingBudget(tokens_max=0, begin_id=1, closing_ids=(7,)),
        DisallowFirst: DisallowFirst(token_ids=(4, 6)),
        TimestampRules: TimestampRules(first_id=60, end_id=50, initial_max=2),
    }
    assert set(examples) == set(get_args(LogitProcessor))
    everything = set(range(VOCABULARY))
    assert {kind: allowed(one) for kind, one in examples.items()} == {
        DisallowTokens: everything - {5},
        AllowTokens: {5, 69},
        AllowRange: {31, 32, 33},
        ThinkingBudget: {7},  # the prompt has begun to think
        DisallowFirst: everything - {4, 6},
        TimestampRules: {60, 61, 62},
    }


def test_what_one_forbids_no_other_allows() -> None:
    assert allowed(AllowTokens(token_ids=(5, 6, 7)), DisallowTokens(token_ids=(6,))) == {5, 7}
    assert allowed(AllowRange(first=0, last=3), AllowTokens(token_ids=(9,))) == set()
    forced = allowed(BUDGET, DisallowTokens(token_ids=(LINE,)), prompt=(BEGIN,), ids=(1, 2, 3))
    assert forced == set()


def test_what_no_output_begins_with_may_follow() -> None:
    first = DisallowFirst(token_ids=(4,))
    assert 4 not in allowed(first, prompt=(4, 4))
    assert 4 in allowed(first, ids=(5,))


@given(st.lists(st.integers(0, VOCABULARY - 1), max_size=12))
def test_timestamps_are_those_of_transformers(outputs: list[int]) -> None:
    """Where no sum of probabilities decides: that rule of transformers depends on the logits."""
    rules = TimestampRules(first_id=60, end_id=50, initial_max=5)
    config = transformers.GenerationConfig(
        no_timestamps_token_id=59, eos_token_id=50, bos_token_id=50, max_initial_timestamp_index=5
    )
    theirs: Any = transformers.WhisperTimeStampLogitsProcessor(config, begin_index=2)
    scores = torch.zeros(1, VOCABULARY)
    scores[0, :59] = 50.0
    ids = torch.tensor([[1, 2, *outputs]])
    expected = theirs(ids, scores)[0].isfinite().nonzero().flatten().tolist()
    assert allowed(rules, prompt=(1, 2), ids=tuple(outputs)) == set(expected)


@pytest.mark.parametrize("seed", range(10))
def test_text_gives_way_to_timestamps_as_in_transformers(seed: int) -> None:
    """Random logits behind the masks of these rules, and a row that has no such rule."""
    random = np.random.default_rng(seed)
    outputs = [[], [61], [61, 3], [61, 3, 64], [61, 3, 64, 64], [2, 2]]
    rows, others = np.arange(len(outputs), dtype=np.int32), len(outputs) + 1
    logits = torch.as_tensor(random.normal(size=(others, VOCABULARY)).astype(np.float32))
    logits[:, 60:] -= 2 * random.random()
    config = transformers.GenerationConfig(
        no_timestamps_token_id=59, eos_token_id=50, bos_token_id=50, max_initial_timestamp_index=5
    )
    theirs: Any = transformers.WhisperTimeStampLogitsProcessor(config, begin_index=2)
    pairs = zip(outputs, logits, strict=False)
    expected = [theirs(torch.tensor([[1, 2, *ids]]), row[None].clone())[0] for ids, row in pairs]
    rules = TimestampRules(first_id=60, end_id=50, initial_max=5)
    words = np.full((len(outputs), words_count(VOCABULARY)), -1, np.int32)
    for ids, mask in zip(outputs, words, strict=True):
        TokenFilter((rules,), ints(1, 2), VOCABULARY).restrict(mask, known(1, 2, *ids))
    timestamps = Timestamps(logits=rows, first_ids=np.full(len(rows), 60, np.int32))
    plan = step_plan([1] * others, token_masks=words, token_mask_logits=rows, timestamps=timestamps)
    plain = logits[-1].clone()
    sampler = Sampler(select(DeviceCapability("cpu")))
    sampler.process_logits(plan, np.arange(others), plan.tokens, logits)
    assert torch.equal(logits[:-1], torch.stack(expected))
    assert torch.equal(logits[-1], plain)


def test_rows_of_a_rule_of_timestamps_are_named_in_a_plan() -> None:
    steps = Steps()
    steps.add(1, processors=(DisallowFirst(token_ids=(4,)),))
    steps.add(2, processors=(TimestampRules(first_id=9, end_id=7),))
    steps.add(3)
    part = steps.batching.part(steps.next())
    assert part.timestamps is not None
    assert (part.timestamps.logits.tolist(), part.timestamps.first_ids.tolist()) == ([1], [9])


def forced_after(outputs: list[int], prompt: tuple[int, ...] = (1,)) -> int | None:
    return ThinkingClock(BUDGET, ints(*prompt)).forced(known(*prompt, *outputs))


@pytest.mark.parametrize(
    ("prompt", "outputs", "forced"),
    [
        ((1,), [2, 3, 4, 5, 6], None),  # it never thinks
        ((1, BEGIN), [], None),
        ((1, BEGIN, 8, 8, 8, 8), [2, 3], None),  # the prompt's own tokens do not count
        ((1, BEGIN), [2, 3, 4], LINE),
        ((1, BEGIN), [2, 3, 4, LINE], END),
        ((1, BEGIN), [2, 3, 4, LINE, END], None),
        ((1, BEGIN), [2, END, 4, 4, 4, 4], None),  # it has ended by itself
        ((1, BEGIN, END), [2, 3, 4, 5], None),
        ((1, BEGIN, END, BEGIN), [2, 3, 4], LINE),
        ((1,), [2, BEGIN, 3, 4, 5], LINE),
        ((1,), [2, BEGIN, 3, BEGIN, 5], LINE),  # to begin again is one thought more
        ((1,), [BEGIN, 3, END, BEGIN, 4, 5], None),  # each thinking has the whole budget
        ((1,), [BEGIN, 3, END, BEGIN, 4, 5, 6], LINE),
    ],
)
def test_thinking_is_closed_after_its_budget(prompt, outputs, forced) -> None:
    assert forced_after(outputs, prompt) == forced


@given(st.lists(st.sampled_from([2, BEGIN, LINE, END]), max_size=40), st.data())
def test_a_clock_gives_the_same_however_often_it_looks(outputs, data) -> None:
    looks = sorted(data.draw(st.lists(st.integers(0, len(outputs)), max_size=5)))
    clock = ThinkingClock(BUDGET, ints(1))
    for look in looks:
        assert clock.forced(known(1, *outputs[:look])) == forced_after(outputs[:look])
    assert clock.forced(known(1, *outputs)) == forced_after(outputs)


def test_a_filter_is_made_once_however_often_its_request_is_retracted() -> None:
    steps = Steps(running_max=1)
    steps.add(1, processors=(AllowRange(first=0, last=50), BUDGET), max_new_tokens=8)
    steps.go()
    (request,) = steps.batching.running.values()
    made = request.filter
    assert made is not None
    for _ in range(3):
        assert steps.batching.prepare_pause(PauseMode.RETRACT) == 1
        steps.go()
        assert request.filter is made


def test_only_a_budget_must_know_the_last_token() -> None:
    static = (DisallowTokens(token_ids=(5,)), AllowRange(first=0, last=9))
    assert not looks_back(static)
    assert looks_back((*static, BUDGET))
