"""A model on several ranks says what it says on one."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.models.draft_models import by_ngrams
from tests.models.model_loop import LINEAR, ModelLoop, Output, compare_outputs
from tests.models.parity import save
from tests.models.rank import LoneRank, Ranks
from tests.models.specs import BY_NAME
from tests.models.tiny import write_llama
from tests.support.models import load, open_model
from tests.support.worker import state

from antiphon.layers.weights import BuildContext, SingleRank
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.ranks.pipeline import Pipeline
from antiphon.wire.ids import RequestId
from antiphon.wire.sampling import AllowRange, TokenOutputParams

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from antiphon.model_worker.batching.state import RequestState
    from antiphon.model_worker.ranks.protocol import LeadRank
    from antiphon.model_worker.runner.opening import OpenModel

NEAR_TIE = 1e-3
"""Ranks add in another order: of two tokens whose logprobs are so close either may be taken."""
OPEN: Mapping[str, Any] = {"dtype": "float32", "linear": LINEAR, "pages": 192}
DETAILS = TokenOutputParams(logprobs=True, top=2, prompt_start=2)
KINDS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "penalties": {"frequency_penalty": 0.7, "repetition_penalty": 1.3},
    "masked": {"processors": (AllowRange(first=5, last=60),)},
    "sampled": {"temperature": 0.8, "top_p": 0.95, "seed": 7},
}
MODES: Mapping[str, Mapping[str, Any]] = {
    "in turn": {},
    "overlap": {"overlap": True},
    "n-grams": {"drafts": True},
    "retraction": {"overlap": True, "tree": True, "retract_at": (4, 11)},
}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "llama with one kv head": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen2-moe": {},
    "gpt-oss": {},
    "deepseek-v3": {},
    "qwen3-next": {},
    "qwen3.5": {},
    "gemma3n": {},
    "gemma4": {},
    "falcon-h1": {},
    # B and C of the one group are on both ranks; its norm could not be.
    "falcon-h1 with one group": {"mamba_n_groups": 1, "mamba_rms_norm": False},
}
STAGED = ("llama", "llama with one kv head", "gpt-oss", "deepseek-v3", "qwen3-next", "falcon-h1")
OFTEN: Mapping[str, tuple[str, ...]] = {
    "in turn": ("llama", "deepseek-v3"),
    "overlap": tuple(name for name in FAMILIES if name not in ("qwen3.5", "gemma3n", "gemma4")),
    "n-grams": ("qwen2-moe", "falcon-h1"),
    "retraction": ("qwen2-moe", "falcon-h1"),
}
"""Families that are run often in a mode; in a long run each is run in all."""


def cases(families: Iterable[str], rarely: Sequence[str] = ()) -> list[Any]:
    """Families in modes, as a test takes them; some only in a long run."""
    often = {mode: {*names} - {*rarely} for mode, names in OFTEN.items()}
    return [
        pytest.param(family, mode, marks=() if family in often[mode] else pytest.mark.long)
        for family, mode in product(families, MODES)
    ]


def kinds(mode: str) -> Iterable[str]:
    """What is asked in a mode: of each kind, or only greedily."""
    return KINDS if mode == "overlap" else ["greedy"]


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    yield from opened(tp=2)


@pytest.fixture(scope="module")
def stages() -> Iterator[Ranks]:
    yield from opened(pp=2)


@pytest.fixture(scope="module")
def square() -> Iterator[Ranks]:
    yield from opened(tp=2, pp=2)


@pytest.fixture(scope="module")
def grouped() -> Iterator[Ranks]:
    yield from opened(tp=2, dp=2)


@pytest.fixture(scope="module")
def pairs() -> Iterator[Ranks]:
    yield from opened(tp=4, dp=2)


def opened(tp: int = 1, pp: int = 1, dp: int = 1) -> Iterator[Ranks]:
    ranks = Ranks(tp, pp, dp)
    yield ranks
    ranks.close()


def write(name: str, folder: Path) -> None:
    fields = FAMILIES[name]
    if name.startswith("llama"):
        write_llama(folder, dict(fields))
        return
    row = BY_NAME[name.partition(" ")[0]]
    save(replace(row, fields={**row.fields, **fields}), folder)


def requests(kind: str, vocabulary: int) -> list[RequestState]:
    random = np.random.default_rng(3)
    prompts = [random.integers(0, vocabulary, length).tolist() for length in (3, 18, 40, 7)]
    prompts[3] = [11, 12, 13] * 6  # which n-grams continue
    said = {"temperature": 0.0, "details": DETAILS, "max_new_tokens": 14, **KINDS[kind]}
    return [
        state(prompt, request_id=RequestId(str(number)), **said)
        for number, prompt in enumerate(prompts)
    ]


class OneRank:
    """Families on one rank: each is written once, and asked once in each kind."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._asked: dict[tuple[str, str], list[Output]] = {}

    def folder(self, family: str) -> Path:
        folder = self._folder / family
        if not folder.exists():
            folder.mkdir()
            write(family, folder)
        return folder

    def outputs(self, family: str, kind: str = "greedy") -> list[Output]:
        if (family, kind) not in self._asked:
            model = open_model(self.folder(family), **OPEN)
            self._asked[family, kind] = outputs(model, kind, {})
        return self._asked[family, kind]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> OneRank:
    return OneRank(tmp_path_factory.mktemp("alone"))


def outputs(
    model: OpenModel,
    kind: str,
    mode: Mapping[str, Any],
    lead: LeadRank | None = None,
    stages: int = 1,
    groups: int = 1,
) -> list[Output]:
    mode = dict(mode)
    retract_at, drafts = mode.pop("retract_at", ()), mode.pop("drafts", False)
    loop = ModelLoop(
        model,
        lead=lead,
        drafter=by_ngrams() if drafts else None,
        step_tokens_max=64,
        chunk_tokens=16,
        flights=stages,
        groups=groups,
        **mode,
    )
    found = loop.run(requests(kind, model.spec.vocabulary), retract_at=retract_at)
    assert all(output.finish.error is None for output in found)
    return found


def check_equal(ours: list[Output], theirs: list[Output]) -> None:
    """The tokens are equal up to the first near tie, and so are their logprobs."""
    assert compare_outputs(ours, theirs, NEAR_TIE) > 60, "near ties everywhere"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("family", "mode"), cases(FAMILIES))
def test_two_ranks_say_what_one_says(pair: Ranks, alone: OneRank, family: str, mode: str) -> None:
    for kind in kinds(mode):
        expected = alone.outputs(family, kind)
        with pair.opened(alone.folder(family), **OPEN) as (model, lead):
            check_equal(outputs(model, kind, MODES[mode], lead), expected)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("family", "mode"), cases(["qwen2-moe", "gpt-oss", "deepseek-v3"]))
def test_ranks_with_whole_experts_say_what_one_says(
    pair: Ranks, alone: OneRank, family: str, mode: str
) -> None:
    expected = alone.outputs(family)
    with pair.opened(alone.folder(family), **OPEN, ep_ranks=2) as (model, lead):
        check_equal(outputs(model, "greedy", MODES[mode], lead), expected)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("family", "mode"), cases(STAGED))
def test_stages_say_what_one_says(stages: Ranks, alone: OneRank, family: str, mode: str) -> None:
    for kind in kinds(mode):
        expected = alone.outputs(family, kind)
        with stages.opened(alone.folder(family), **OPEN) as (model, lead):
            found = outputs(model, kind, MODES[mode], lead, 2)
        # Every layer computes what it computes on one rank.
        assert [each.ids for each in found] == [each.ids for each in expected]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("family", "mode"), cases(["llama", "deepseek-v3"]))
def test_stages_of_ranks_say_what_one_says(
    square: Ranks, alone: OneRank, family: str, mode: str
) -> None:
    expected = alone.outputs(family)
    with square.opened(alone.folder(family), **OPEN) as (model, lead):
        check_equal(outputs(model, "greedy", MODES[mode], lead, 2), expected)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("family", "mode"),
    # What they share with two ranks is compared there, and with stages.
    cases(FAMILIES, rarely=("llama", "gpt-oss", "qwen3-next", "falcon-h1 with one group")),
)
def test_attention_groups_say_what_one_rank_says(
    grouped: Ranks, alone: OneRank, family: str, mode: str
) -> None:
    for kind in kinds(mode):
        expected = alone.outputs(family, kind)
        with grouped.opened(alone.folder(family), **OPEN) as (model, lead):
            check_equal(outputs(model, kind, MODES[mode], lead, groups=2), expected)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("family", ["qwen2-moe", "deepseek-v3"])
def test_attention_groups_of_two_ranks_say_what_one_says(
    pairs: Ranks, alone: OneRank, family: str
) -> None:
    expected = alone.outputs(family)
    for ep_ranks in (1, 2):
        with pairs.opened(alone.folder(family), **OPEN, ep_ranks=ep_ranks) as (model, lead):
            check_equal(outputs(model, "greedy", MODES["overlap"], lead, groups=2), expected)


def bits(
    ranks: Ranks, folder: Path, mode: Mapping[str, Any], number: int | None = None
) -> list[list[tuple[int, Any]]]:
    """Tokens and logprobs of all greedy requests, or of one, in deterministic inference."""
    with ranks.opened(folder, **OPEN, deterministic=True) as (model, lead):
        loop = ModelLoop(model, lead=lead, step_tokens_max=64, **mode)
        states = requests("greedy", model.spec.vocabulary)
        chosen = states if number is None else [states[number]]
        return [[(t.token_id, t.logprob) for t in out.tokens] for out in loop.run(chosen)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.long), "deepseek-v3"])
def test_two_ranks_repeat_themselves_to_the_bit(pair: Ranks, alone: OneRank, family: str) -> None:
    """Whatever else is in the batch, and however the steps are cut."""
    folder = alone.folder(family)
    together = bits(pair, folder, {"overlap": True, "chunk_tokens": 16})
    assert together == bits(pair, folder, {"chunk_tokens": 8})
    for number, expected in enumerate(together):
        assert bits(pair, folder, {"chunk_tokens": None}, number) == [expected]


@pytest.mark.timeout(60)
def test_stages_that_share_no_memory_say_the_same(alone: OneRank) -> None:
    expected = alone.outputs("llama")
    ranks = Ranks(pp=2, local=False)
    with ranks.opened(alone.folder("llama"), **OPEN) as (model, lead):
        found = outputs(model, "greedy", MODES["overlap"], lead, 2)
    assert [each.ids for each in found] == [each.ids for each in expected]
    ranks.close()


@pytest.mark.timeout(60)
def test_ranks_that_share_no_memory_say_the_same(pair: Ranks, alone: OneRank) -> None:
    """And to the bit in deterministic inference."""
    expected, folder = alone.outputs("llama"), alone.folder("llama")
    apart = Ranks(tp=2, local=False)
    with apart.opened(folder, **OPEN) as (model, lead):
        check_equal(outputs(model, "greedy", MODES["overlap"], lead), expected)
    assert bits(apart, folder, {}, 0) == bits(pair, folder, {}, 0)
    apart.close()


def test_stages_have_ranges_of_nearly_the_same_length() -> None:
    def layers(stage: int, stages: int) -> range:
        pipeline = Pipeline(stage, stages, None, None)
        build = BuildContext(SingleRank(), torch.float32, torch.device("cpu"), pp=pipeline)
        return build.stage_layers(8)

    assert [layers(stage, 3) for stage in range(3)] == [range(3), range(3, 6), range(6, 8)]
    with pytest.raises(ValueError, match="8 layers are fewer than 9 pipeline stages"):
        layers(0, 9)


def test_ranks_that_cannot_cut_the_model_are_refused(llama: Path) -> None:
    with pytest.raises(ModelLoadError, match="3 ranks"):
        load(llama, tp=LoneRank(1, 3))


def test_a_norm_that_ranks_cannot_share_is_refused(tmp_path: Path) -> None:
    row = BY_NAME["falcon-h1"]
    save(replace(row, fields={**row.fields, "mamba_n_groups": 1}), tmp_path)
    match = "groups that are normalised: 1 is not divisible by 2 ranks"
    with pytest.raises(ModelLoadError, match=match):
        load(tmp_path, tp=LoneRank(1, 2))
