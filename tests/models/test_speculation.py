"""Drafts change how fast a text comes, and nothing of it: over tiny models of every kind of cache.

A run without drafts says what is right. Then the same requests run with drafters that are right,
wrong from somewhere on, or always wrong.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from tests.kernels.rows import ISAS
from tests.models.draft_models import by_ngrams
from tests.models.model_loop import LINEAR, ModelLoop, Output
from tests.models.specs import BY_NAME, windowed
from tests.models.test_grammars import SETTINGS, Worker, regex, schema
from tests.models.test_grammars import state as guided
from tests.models.test_states_with_model import write_row
from tests.models.tiny import VOCABULARY, write_llama
from tests.support.models import load, open_model, with_spec
from tests.support.worker import state

from antiphon.config.speculation import SpeculationConfig
from antiphon.model_worker.batching.state import ChoiceKey
from antiphon.model_worker.runner.model_runner import ModelRunner
from antiphon.model_worker.runner.opening import OpenModel
from antiphon.model_worker.runner.pools import cache_groups
from antiphon.model_worker.speculation.policy import DraftCounts, Speculation
from antiphon.model_worker.startup.engine import open_engine
from antiphon.wire.codec import pack_ids
from antiphon.wire.ids import RequestId
from antiphon.wire.sampling import (
    AllowRange,
    DisallowTokens,
    LogitBias,
    ThinkingBudget,
    TokenOutputParams,
)
from antiphon.wire.token_outputs import pack_floats

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from antiphon.model_worker.batching.plan import Ints
    from antiphon.model_worker.batching.request import Request
    from antiphon.model_worker.batching.state import RequestState
    from antiphon.model_worker.speculation.policy import Drafter
    from antiphon.wire.token_outputs import TokenOutput

PAGE_TOKENS = 4
NEW_TOKENS = 24
ROUNDING = 2e-4
"""How far logprobs may differ where the rows of a step differ."""
STEPS_SHARE = 0.5
"""An oracle with four drafts needs a fifth of the steps, and some for prompts and ends."""

WARM: Mapping[str, Any] = {"temperature": 0.9, "top_p": 0.95}
BIAS = LogitBias(token_ids=pack_ids([5, 17, 90]), values=pack_floats([6.0, -30.0, 3.0]))
ALL_OUTPUTS = TokenOutputParams(
    logprobs=True, top=3, named_ids=(4, 40), hidden=True, prompt_start=1
)
KINDS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "warm": WARM,
    "narrow": {"temperature": 1.2, "top_k": 7, "min_p": 0.02},
    "greedy with penalties": {
        "temperature": 0.0,
        "frequency_penalty": 0.7,
        "presence_penalty": 0.4,
        "repetition_penalty": 1.3,
    },
    "warm with penalties": {**WARM, "frequency_penalty": 1.1, "repetition_penalty": 0.9},
    "biased": {"temperature": 0.0, "logit_bias": BIAS},
    "long at least": {**WARM, "min_new_tokens": 13, "stop_token_ids": tuple(range(3, 60))},
    "stopped": {**WARM, "stop_token_ids": tuple(range(40, 62))},
    "masked": {
        **WARM,
        "processors": (AllowRange(first=20, last=140), DisallowTokens(token_ids=(30, 31))),
    },
    "masked, biased and penalised": {
        **WARM,
        "processors": (AllowRange(first=4, last=40),),
        "logit_bias": BIAS,
        "presence_penalty": 1.5,
    },
    "logprobs": {**WARM, "details": TokenOutputParams(logprobs=True)},
    "logprobs of prompts": {
        "temperature": 0.0,
        "details": TokenOutputParams(logprobs=True, prompt_start=2),
    },
    "all outputs": {**WARM, "details": ALL_OUTPUTS},
    "all outputs with penalties": {**WARM, "details": ALL_OUTPUTS, "frequency_penalty": 0.8},
    "ids": {"temperature": 0.0, "details": TokenOutputParams(ids=True)},
}
LENGTHS = (3, 21, 50)


def requests(kinds: Sequence[str] = tuple(KINDS)) -> list[RequestState]:
    """Some of each kind, with prompts that begin alike, and several choices of one prompt."""
    dice = np.random.default_rng(7)
    stem = dice.integers(0, VOCABULARY, 19).tolist()
    made: list[RequestState] = []
    for kind in kinds:
        for number, length in enumerate(LENGTHS):
            prompt = [*stem[: 6 * number], *dice.integers(0, VOCABULARY, length).tolist()]
            said = {"max_new_tokens": NEW_TOKENS + number, "seed": number, **KINDS[kind]}
            for choice in range(3 if number == 1 else 1):
                name = RequestId(f"{kind} {number}")
                made.append(state(prompt, request_id=name, choice=choice, **said))
    return made


@dataclass
class Oracle:
    """Knows the texts of a run; its drafts are wrong from the index on that `wrong` draws."""

    texts: Mapping[ChoiceKey, Sequence[int]]
    wrong: Callable[[int], int]
    ended_keys: list[ChoiceKey] = field(default_factory=list[ChoiceKey])

    def propose(self, request: Request, drafts_max: int) -> Ints:
        drafts = np.array(self.texts[request.key][request.length :][:drafts_max], np.int32)
        first = self.wrong(len(drafts))
        drafts[first:] = (drafts[first:] + 1) % VOCABULARY
        return drafts

    def ended(self, request: Request) -> None:
        self.ended_keys.append(request.key)


def right(texts: Mapping[ChoiceKey, Sequence[int]]) -> Drafter:
    return Oracle(texts, lambda count: count)


def often_wrong(texts: Mapping[ChoiceKey, Sequence[int]]) -> Drafter:
    dice = random.Random(3)
    return Oracle(texts, lambda count: dice.randint(0, 2 * count))


def always_wrong(texts: Mapping[ChoiceKey, Sequence[int]]) -> Drafter:
    return Oracle(texts, lambda _: 0)


DRAFTERS = (right, often_wrong, always_wrong)


def texts_of(
    states: Sequence[RequestState], outputs: Sequence[Output]
) -> dict[ChoiceKey, list[int]]:
    """What each choice has read and said, with the token that stopped it and two that never came.

    So drafts go beyond the end of a text.
    """
    texts: dict[ChoiceKey, list[int]] = {}
    for key, (request, output) in enumerate(zip(states, outputs, strict=True)):
        prompt = np.frombuffer(request.prompt_ids, "<i4").tolist()
        stop = output.finish.matched_stop
        texts[ChoiceKey(key)] = [*prompt, *output.ids, *([] if stop is None else [stop, 1, 2])]
    return texts


def compare(got: Output, wanted: Output, rounding: float) -> None:
    assert got.ids == wanted.ids
    assert got.finish == wanted.finish
    pairs = zip(got.tokens, wanted.tokens, strict=True)
    for one, other in pairs:
        assert (one.token_id, ids_of(one)) == (other.token_id, ids_of(other))
        np.testing.assert_allclose(numbers(one), numbers(other), rtol=0, atol=rounding)


def ids_of(token: TokenOutput) -> list[int]:
    return [top[0] for top in token.top]


def numbers(token: TokenOutput) -> list[float]:
    listed = [np.nan if token.logprob is None else token.logprob]
    listed += [top[1] for top in token.top]
    listed += token.named
    return [*listed, *token.hidden]


def open_windows(folder: Path, **values: Any) -> OpenModel:
    """A Llama whose layers differ in how far they look back."""
    model = load(write_llama(folder), dtype="float32", linear=LINEAR)
    model = with_spec(folder, model, windowed(model.spec, (None, 20, None, 20)), LINEAR)
    groups = cache_groups(model.spec, model.build, page_tokens=PAGE_TOKENS, pages=values["pages"])
    return OpenModel(ModelRunner(model, groups), groups, model.spec)


def open_llama(folder: Path, **values: Any) -> OpenModel:
    return open_any(write_llama(folder), **values)


def open_row(name: str) -> Callable[..., OpenModel]:
    return lambda folder, **values: open_any(write_row(folder, BY_NAME[name]), **values)


def open_any(folder: Path, **values: Any) -> OpenModel:
    return open_model(folder, page_tokens=PAGE_TOKENS, dtype="float32", linear=LINEAR, **values)


MODELS: Mapping[str, Callable[..., OpenModel]] = {
    "llama": open_llama,
    "windows": open_windows,
    "falcon-h1": open_row("falcon-h1"),
    "qwen3-next": open_row("qwen3-next"),
    "deepseek-v2": open_row("deepseek-v2"),
    "gpt-oss": open_row("gpt-oss"),
}
ROOMY: Mapping[str, Any] = {"step_tokens_max": 512, "chunk_tokens": None, "running_max": 64}
TIGHT: Mapping[str, Any] = {"step_tokens_max": 40, "chunk_tokens": 11, "running_max": 7}
"""With few pages, so that requests are retracted."""


@dataclass(frozen=True)
class Mode:
    """How the loop runs. None of this may show in what it says."""

    limits: Mapping[str, Any]
    tree: bool = False
    overlap: bool = False
    retract_at: Sequence[int] = ()
    one_a_turn: bool = False
    ahead: int = 1


MODES: Mapping[str, Mode] = {
    "all at once": Mode(ROOMY),
    "in chunks": Mode({**ROOMY, "step_tokens_max": 64, "chunk_tokens": 7}, one_a_turn=True),
    "alternating": Mode({**ROOMY, "mixed": False}, one_a_turn=True),
    "cached": Mode({**ROOMY, "chunk_tokens": 24}, tree=True, one_a_turn=True),
    "retracted": Mode({**ROOMY, "chunk_tokens": 24}, retract_at=(3, 5, 9)),
    "retracted and cached": Mode({**ROOMY, "chunk_tokens": 24}, tree=True, retract_at=(3, 5, 9)),
    "few slots and pages": Mode(TIGHT, tree=True),
    "overlapped": Mode(
        {**ROOMY, "chunk_tokens": 24, "mixed": False}, tree=True, overlap=True, one_a_turn=True
    ),
    "three ahead": Mode(TIGHT, tree=True, overlap=True, ahead=3),
    "held back": Mode({**ROOMY, "stream_interval": 5}),
}


class Bench:
    """A model, and its loops with and without drafts."""

    def __init__(self, opened: OpenModel, *, drafting_fails: bool = False) -> None:
        self.opened = opened
        self.drafting_fails = drafting_fails
        self.loop: ModelLoop | None = None

    def run(
        self, states: Sequence[RequestState], mode: Mode, drafter: Drafter | None = None
    ) -> list[Output]:
        self.opened.runner._step = None
        loop = ModelLoop(
            self.opened,
            tree=mode.tree,
            overlap=mode.overlap,
            ahead=mode.ahead,
            drafter=drafter,
            queue_max=10_000,
            checkpoint_tokens=16,
            hidden_states=True,
            conservativeness=0.0,
            **mode.limits,
        )
        outputs = loop.run(states, one_a_turn=mode.one_a_turn, retract_at=mode.retract_at)
        assert bool(loop.reports[-1].failures) == self.drafting_fails
        self.loop = loop
        return outputs

    @property
    def decode_steps(self) -> int:
        assert self.loop is not None
        return sum(bool(report.rows > report.prefill_rows) for report in self.loop.reports)

    @property
    def counts(self) -> DraftCounts:
        assert self.loop is not None
        assert self.loop.speculation is not None
        return self.loop.speculation.counts


def check(
    bench: Bench,
    states: Sequence[RequestState],
    mode: Mode,
    drafter_of: Callable[[Mapping[ChoiceKey, Sequence[int]]], Drafter],
    wanted: Sequence[Output],
    rounding: float = ROUNDING,
) -> None:
    """Run with drafts, and compare with a run without."""
    drafter = drafter_of(texts_of(states, wanted))
    got = bench.run(states, mode, drafter)
    for request, one, other in zip(states, got, wanted, strict=True):
        try:
            compare(one, other, rounding)
        except AssertionError as error:
            raise AssertionError(f"{request.request_id}: {error}") from error
    counts = bench.counts
    assert counts.rows > 0
    assert counts.proposed >= counts.rows
    if drafter_of is right:
        assert counts.accepted > 0.9 * counts.proposed  # few beyond an end
    if drafter_of is often_wrong:
        assert 0 < counts.accepted < counts.proposed
    if drafter_of is always_wrong:
        assert counts.accepted == 0
    if isinstance(drafter, Oracle):
        assert sorted(drafter.ended_keys) == list(range(len(states)))


@pytest.fixture(scope="module", params=MODELS)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("model")
    return Bench(MODELS[request.param](folder, pages=4096, states=512))


@pytest.fixture(scope="module")
def llama_bench(llama: Path) -> Bench:
    return Bench(open_any(llama, pages=4096))


EVERY = requests()


@pytest.fixture(scope="module")
def plain(bench: Bench) -> list[Output]:
    """What is said without drafts."""
    return bench.run(EVERY, MODES["all at once"])


OFTEN = {
    **dict.fromkeys(("llama", "falcon-h1"), tuple(MODES)),
    **dict.fromkeys(
        ("windows", "qwen3-next", "deepseek-v2", "gpt-oss"),
        ("in chunks", "retracted and cached", "overlapped", "three ahead"),
    ),
}
"""Modes that are run often of each model: all of one with pages alone and of one with states."""


@pytest.mark.parametrize(
    ("bench", "mode"),
    [
        pytest.param(
            model,
            mode,
            id=f"{model}-{name}",
            marks=() if name in OFTEN[model] else pytest.mark.long,
        )
        for model, (name, mode) in product(MODELS, MODES.items())
    ],
    indirect=["bench"],
)
def test_drafts_change_nothing_whichever_way_a_model_caches(
    bench: Bench, plain: list[Output], mode: Mode
) -> None:
    check(bench, EVERY, mode, often_wrong, plain)


@pytest.mark.parametrize("drafter_of", DRAFTERS)
def test_good_and_bad_drafts_change_nothing(
    bench: Bench, plain: list[Output], drafter_of: Callable[..., Drafter]
) -> None:
    check(bench, EVERY, MODES["all at once"], drafter_of, plain)


@pytest.mark.parametrize("kind", KINDS)
def test_right_drafts_save_steps_in_requests_of_every_kind(llama_bench: Bench, kind: str) -> None:
    states = requests([kind])
    wanted = llama_bench.run(states, MODES["all at once"])
    steps = llama_bench.decode_steps
    check(llama_bench, states, MODES["all at once"], right, wanted)
    assert llama_bench.decode_steps < STEPS_SHARE * steps


def test_a_right_draft_of_four_saves_most_steps(llama_bench: Bench) -> None:
    """A decode step of one request yields as many tokens as it verifies, and one more."""
    states = [state(30, temperature=0.0, max_new_tokens=101)]
    wanted = llama_bench.run(states, MODES["all at once"])
    check(llama_bench, states, MODES["all at once"], right, wanted)
    assert llama_bench.decode_steps == 20  # the first token comes with the prompt


@pytest.mark.parametrize("mode", ["all at once", "in chunks", "cached", "retracted and cached"])
def test_a_text_that_repeats_itself_is_foreseen(llama_bench: Bench, mode: str) -> None:
    dice = np.random.default_rng(2)
    states: list[RequestState] = []
    for number in range(8):
        said = {**KINDS["biased" if number % 2 else "logprobs of prompts"], "max_new_tokens": 60}
        prompt = dice.integers(0, VOCABULARY, 5 + number).tolist() * 4
        states.append(state(prompt, request_id=RequestId(str(number)), seed=number, **said))
    wanted = llama_bench.run(states, MODES["all at once"])
    check(llama_bench, states, MODES[mode], by_ngrams, wanted)
    assert llama_bench.counts.accepted > 50
    again = by_ngrams({})
    for _ in range(2):
        outputs = llama_bench.run(states, MODES[mode], again)
        for one, other in zip(outputs, wanted, strict=True):
            compare(one, other, ROUNDING)
    # The first run has shown what comes in the second.
    assert llama_bench.counts.accepted > 0.8 * llama_bench.counts.proposed


@pytest.mark.skipif(not ISAS, reason="the CPU's own kernels are not built")
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.long), "bfloat16"])
@pytest.mark.parametrize("drafter_of", [right, often_wrong])
@pytest.mark.parametrize("mode", ["in chunks", "retracted and cached", "few slots and pages"])
def test_in_deterministic_mode_drafts_change_no_bit(
    llama: Path, mode: str, drafter_of: Callable[..., Drafter], dtype: str
) -> None:
    opened = open_model(
        llama, page_tokens=4, pages=1024, dtype=dtype, linear="packed", deterministic=True
    )
    bench = Bench(opened)
    wanted = bench.run(EVERY, MODES["all at once"])
    check(bench, EVERY, MODES[mode], drafter_of, wanted, rounding=0.0)


def test_few_pages_and_states_leave_no_trace(tmp_path: Path) -> None:
    """Drafts take no page from whoever needs one, and give theirs back."""
    for name, states_max in (("llama", 0), ("falcon-h1", 24), ("windows", 0)):
        states = requests(["greedy", "warm with penalties", "stopped", "logprobs"])
        roomy = Bench(MODELS[name](tmp_path / name, pages=4096, states=512))
        wanted = roomy.run(states, MODES["all at once"])
        tight = Bench(MODELS[name](tmp_path / name, pages=48, states=states_max))
        for mode in ("few slots and pages", "in chunks"):
            check(tight, states, MODES[mode], often_wrong, wanted)
            assert tight.loop is not None
            assert tight.loop.reports[-1].totals.retractions > 0


def test_every_checkpoint_that_is_due_is_cached_with_drafts_too(tmp_path: Path) -> None:
    bench = Bench(MODELS["falcon-h1"](tmp_path, pages=512, states=64))
    first = state(21, temperature=0.0, max_new_tokens=100)
    wanted = bench.run([first], MODES["cached"])
    texts = {**texts_of([first], wanted), ChoiceKey(1): []}
    for end in range(30, 120, 7):
        second = state(texts[ChoiceKey(0)][:end], request_id=RequestId("second"), max_new_tokens=1)
        cached: list[int] = []
        for drafter in (None, right(texts)):
            bench.run([first], MODES["cached"], drafter)
            assert bench.loop is not None
            cached.append(bench.loop.run([second])[0].cached_tokens)
        assert cached[0] == cached[1] > 0


EMBEDDED = msgspec.structs.replace(
    SETTINGS, speculation=SpeculationConfig(algorithm="ngram", verify_tokens=6)
)


def engine_with(drafter: Drafter | None) -> Worker:
    """The embedded model behind an engine that has opened by its settings; None: its own drafts."""
    worker = Worker(open_engine(EMBEDDED), EMBEDDED)
    assert worker.engine.core.speculation is not None
    if drafter is not None:
        worker.engine.core.speculation.drafter = drafter
    return worker


def guided_states() -> list[RequestState]:
    states = [guided(schema(), seed) for seed in range(6)]
    states += [guided(regex("(ja|nein|世界|👋){2,5}"), seed) for seed in range(6, 12)]
    states += [guided(regex("a{1,9}"), seed, min_new_tokens=4) for seed in range(12, 16)]
    states += [guided(None, seed, max_new_tokens=40) for seed in range(16, 19)]
    return [*states, guided(regex("[0-9]{3}-[0-9]{2}"), 19, temperature=0.0)]


@pytest.mark.parametrize(
    "drafter_of", [*DRAFTERS, None], ids=lambda d: getattr(d, "__name__", "none")
)
def test_drafts_change_nothing_under_a_grammar(drafter_of: Callable[..., Drafter] | None) -> None:
    states = guided_states()
    wanted = Worker(open_engine(SETTINGS), SETTINGS).run(*states)
    texts: dict[ChoiceKey, list[int]] = {}
    for key, (request, said) in enumerate(zip(states, wanted, strict=True)):
        prompt = np.frombuffer(request.prompt_ids, "<i4").tolist()
        assert said.finish is not None
        stop = said.finish.matched_stop
        texts[ChoiceKey(key)] = [*prompt, *said.ids, *([] if stop is None else [stop, 7])]
    worker = engine_with(None if drafter_of is None else drafter_of(texts))
    said = worker.run(*states)
    assert [one.ids for one in said] == [other.ids for other in wanted]
    assert [one.finish for one in said] == [other.finish for other in wanted]
    speculation = worker.engine.core.speculation
    assert isinstance(speculation, Speculation)
    counts = speculation.counts
    if drafter_of is always_wrong:  # the grammar allows some of them
        assert counts.accepted == 0
    else:
        assert counts.accepted > 10
    if drafter_of is right:
        assert counts.accepted > 0.9 * counts.proposed


def test_thinking_ends_by_its_budget_with_drafts_and_a_grammar_too() -> None:
    """The budget forces tokens, which the drafts cannot see, and then the grammar begins."""
    closing = (40, 41, 42)
    budget = ThinkingBudget(tokens_max=6, begin_id=39, closing_ids=closing)
    for grammar in (regex("[0-9]{9}", begins_after=closing), None):
        params = {"processors": (budget,), "temperature": 1.0, "min_new_tokens": 12}
        states: list[RequestState] = []
        for seed in range(6):
            made = guided(grammar, seed, **params)
            states.append(
                msgspec.structs.replace(made, prompt_ids=made.prompt_ids + pack_ids([39]))
            )
        wanted = Worker(open_engine(SETTINGS), SETTINGS).run(*states)
        assert all(said.ids[6:9] == list(closing) for said in wanted)
        texts = {
            ChoiceKey(key): [*np.frombuffer(request.prompt_ids, "<i4").tolist(), *said.ids]
            for key, (request, said) in enumerate(zip(states, wanted, strict=True))
        }
        worker = engine_with(right(texts))
        assert [one.ids for one in worker.run(*states)] == [other.ids for other in wanted]
