"""Two ranks on the device `interpreter`, by their batching loop, against one on the CPU."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.kernels.edits import Edit
from tests.kernels.interpreted.models import BAD, STAND_IN, opened, requests
from tests.models.eagle3 import write_head
from tests.models.model_loop import ModelLoop
from tests.models.parity import save
from tests.models.rank import Ranks
from tests.models.specs import BY_NAME
from tests.models.test_draft_model import with_nan
from tests.models.test_experts import MXFP4, in_mxfp4, rewrite
from tests.models.test_speculation import compare, often_wrong, texts_of
from tests.models.tiny import VOCABULARY, write_llama
from tests.support.worker import state

from antiphon.layers import moe
from antiphon.model_worker.runner.device_runner import DeviceRunner
from antiphon.wire.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from tests.models.model_loop import Output

    from antiphon.model_worker.batching.state import CoreTotals

# Numpy's, of what is not finite: rows of padding read a page that nothing has written.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CAPTURED = (2, 4)
OPEN: dict[str, Any] = {"dtype": "float32", "pages": 100}
SPREAD: dict[str, Any] = {**OPEN, "ep_ranks": 2}
"""Each of two ranks has half of the experts."""
LIMITS: dict[str, Any] = {"chunk_tokens": 20}


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    ranks = Ranks(tp=2, device="interpreter")
    yield ranks
    ranks.close()


def expected_of(folder: Path, count: int = 4) -> list[Output]:
    model = opened(folder, "cpu")
    return ModelLoop(model, **LIMITS).run(requests(model.spec.vocabulary, count))


def one_layer(family: str, folder: Path) -> Path:
    row = BY_NAME[family]
    return save(replace(row, fields={**row.fields, "num_hidden_layers": 1}), folder).folder


def check(
    pair: Ranks,
    folder: Path,
    expected: list[Output],
    opening: Mapping[str, Any] = OPEN,
    **ways: Any,
) -> None:
    """What is asked of two ranks has the tokens and logprobs of one on the CPU."""
    captured = CAPTURED if ways.get("overlap") else ()
    with pair.opened(folder, captured=ways.pop("captured", captured), **opening) as (model, lead):
        asked = requests(model.spec.vocabulary, len(expected))
        loop = ModelLoop(model, lead=lead, **LIMITS, **ways)
        for got, wanted in zip(loop.run(asked), expected, strict=True):
            compare(got, wanted, rounding=1e-4)
        # Neither stages nor steps that verify drafts start from a token in flight.
        waits = "flights" in ways or "drafter" in ways
        assert bool(loop.futures) == (ways.get("overlap", False) and not waits)


def test_two_ranks_generate_what_one_does_on_the_cpu(pair: Ranks, tmp_path: Path) -> None:
    """In turn and overlapped; what is masked, penalised or verified is known to rank 0 alone."""
    folder = write_llama(tmp_path, {"num_hidden_layers": 2})
    expected = expected_of(folder)
    check(pair, folder, expected)
    check(pair, folder, expected, overlap=True)
    texts = texts_of(requests(VOCABULARY, len(expected)), expected)
    check(pair, folder, expected, overlap=True, drafter=often_wrong(texts))


def check_drafts(
    pair: Ranks, folder: Path, draft: Path, expected: list[Output], captured: tuple[int, ...] = ()
) -> CoreTotals:
    """With a draft model two ranks have the tokens and logprobs of one on the CPU without."""
    with pair.opened(folder, captured, draft, **OPEN) as (model, lead):
        assert isinstance(model.runner, DeviceRunner)
        loop = ModelLoop(model, lead=lead, **LIMITS)
        asked = requests(model.spec.vocabulary, len(expected))
        for got, wanted in zip(loop.run(asked), expected, strict=True):
            compare(got, wanted, rounding=1e-4)
        assert not loop.reports[-1].failures
        return loop.core.totals()


@pytest.mark.long
def test_two_ranks_draft_by_a_model(pair: Ranks, tmp_path: Path) -> None:
    """The model itself, which is right about all that is greedy."""
    folder = write_llama(tmp_path, {"num_hidden_layers": 2})
    assert check_drafts(pair, folder, folder, expected_of(folder, 2)).drafts_accepted > 0


@pytest.mark.long
def test_two_ranks_draft_by_another_model(pair: Ranks, tmp_path: Path) -> None:
    """With graphs. Ranks gather prompt logprobs of a request behind the outcome of its plan."""
    folder = write_llama(tmp_path / "model", {"num_hidden_layers": 1})
    other = write_llama(tmp_path / "other", {"num_hidden_layers": 1}, seed=9)
    counts = check_drafts(pair, folder, other, expected_of(folder), CAPTURED)
    assert counts.drafts_accepted < counts.drafts_proposed


@pytest.mark.long
def test_two_ranks_draft_by_a_head(pair: Ranks, tmp_path: Path) -> None:
    """Each has one of its two logits, of the same token, which is right once."""
    folder = write_llama(tmp_path / "model")
    expected = expected_of(folder)
    drafted = torch.tensor([expected[0].ids[1]] * 2)
    counts = check_drafts(pair, folder, write_head(tmp_path / "head", token_ids=drafted), expected)
    assert 0 < counts.drafts_accepted < counts.drafts_proposed


def bits_of(ranks: Ranks, folder: Path, chosen: Sequence[int], chunk_tokens: int) -> list[Any]:
    """Tokens and logprobs of some requests, alone without graphs and several with them."""
    captured = CAPTURED if len(chosen) > 1 else ()
    values = {**OPEN, "linear": "tiled", "deterministic": True}
    with ranks.opened(folder, captured, **values) as (model, lead):
        loop = ModelLoop(model, lead=lead, overlap=True, chunk_tokens=chunk_tokens)
        asked = requests(model.spec.vocabulary, 1 + max(chosen))
        ran = loop.run([asked[number] for number in chosen])
        return [(each.ids, [(token.logprob, token.top) for token in each.tokens]) for each in ran]


def check_bits(ranks: Ranks, folder: Path) -> None:
    """A request with prompt logprobs has the same bits alone, beside others and in other chunks."""
    *_, beside = bits_of(ranks, folder, (0, 1, 3), chunk_tokens=20)
    assert [beside] == bits_of(ranks, folder, (3,), chunk_tokens=9)


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_bits_on_two_ranks_depend_on_neither_batch_nor_chunks(
    pair: Ranks, family: str, tmp_path: Path
) -> None:
    if family == "llama":
        folder = write_llama(tmp_path, {"num_hidden_layers": 1})
    else:
        folder = save(BY_NAME[family], tmp_path).folder
    check_bits(pair, folder)


@pytest.mark.long
def test_bits_on_four_ranks_depend_on_neither_batch_nor_chunks(tmp_path: Path) -> None:
    """Whose sums gloo makes in an order that depends on their size."""
    ranks = Ranks(tp=4, device="interpreter")
    check_bits(ranks, write_llama(tmp_path, {"num_hidden_layers": 1}))
    ranks.close()


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(1, 2), (1, 3), (2, 2)], ids=str)
def test_stages_generate_what_one_rank_does(sizes: tuple[int, int], tmp_path: Path) -> None:
    """In turn and overlapped; none of their steps is captured."""
    folder = write_llama(tmp_path, {"num_hidden_layers": 4})
    expected, ranks = expected_of(folder), Ranks(*sizes, device="interpreter")
    for overlap in (False, True):
        check(ranks, folder, expected, overlap=overlap, captured=(), flights=sizes[1])
    ranks.close()


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3", "mixtral", "gemma2", "gpt-oss", "deepseek-v3"])
def test_other_families_generate_what_one_rank_does(
    pair: Ranks, family: str, tmp_path: Path
) -> None:
    folder = save(BY_NAME[family], tmp_path).folder
    check(pair, folder, expected_of(folder, 2), overlap=True)


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3-next", "falcon-h1"])
def test_models_with_states_generate_what_one_rank_does(
    pair: Ranks, family: str, tmp_path: Path
) -> None:
    folder = save(BY_NAME[family], tmp_path).folder
    check(pair, folder, expected_of(folder, 2), overlap=True, captured=())


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "ep_ranks"), [("deepseek-v3", 1), ("deepseek-v3", 2), ("qwen3-next", 1)]
)
def test_attention_groups_generate_what_one_rank_does(
    family: str, ep_ranks: int, tmp_path: Path
) -> None:
    """In turn and overlapped; none of their steps is captured."""
    folder = save(BY_NAME[family], tmp_path).folder
    expected, ranks = expected_of(folder, 3), Ranks(tp=2, dp=2, device="interpreter")
    opening = {**OPEN, "ep_ranks": ep_ranks}
    for overlap in (False, True):
        check(ranks, folder, expected, opening, overlap=overlap, captured=(), groups=2)
    ranks.close()


@pytest.mark.long
@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "gpt-oss", "deepseek-v3"])
def test_ranks_with_whole_experts_generate_what_one_rank_does(
    pair: Ranks, family: str, tmp_path: Path
) -> None:
    """Also in steps that are replayed, with the sums of what experts made inside."""
    folder = save(BY_NAME[family], tmp_path).folder
    check(pair, folder, expected_of(folder, 2), SPREAD, overlap=True)


@pytest.mark.long
def test_stages_with_whole_experts_generate_what_one_rank_does(tmp_path: Path) -> None:
    folder = save(BY_NAME["mixtral"], tmp_path).folder
    expected, ranks = expected_of(folder, 2), Ranks(2, 2, device="interpreter")
    check(ranks, folder, expected, SPREAD, overlap=True, captured=(), flights=2)
    ranks.close()


@pytest.mark.long
def test_whole_experts_in_fp8_generate_what_those_of_the_cpu_do(
    pair: Ranks, tmp_path: Path
) -> None:
    """Whose ranks divide a token between them alike: each rounds its part by a scale of its own."""
    folder = one_layer("mixtral", tmp_path)
    opening = {**SPREAD, "quantization": "fp8", "quantized": "fp8"}
    on_cpu = Ranks(tp=2)
    with on_cpu.opened(folder, **opening) as (model, lead):
        loop = ModelLoop(model, lead=lead, **LIMITS)
        expected = loop.run(requests(model.spec.vocabulary, 1))
    on_cpu.close()
    check(pair, folder, expected, opening, overlap=True)


@pytest.mark.long
def test_an_expert_that_both_ranks_count_is_noticed(pair: Ranks, tmp_path: Path) -> None:
    folder = one_layer("mixtral", tmp_path)
    expected = expected_of(folder, 1)
    # Here, on rank 0, pairs of the other rank's first expert are multiplied, too.
    twice = Edit(
        "an expert is counted on both ranks",
        moe,
        "ExpertSlice(numbers.start, spec.count)",
        "ExpertSlice(numbers.start + 1, spec.count)",
    )
    with twice.applied(), pytest.raises(AssertionError):
        check(pair, folder, expected, SPREAD, overlap=True)


@pytest.mark.long
@pytest.mark.parametrize(("count", "ep_ranks"), [(2, 1), (4, 1), (2, 2), (4, 2)])
def test_experts_in_groups_generate_what_one_rank_does(
    count: int, ep_ranks: int, tmp_path: Path
) -> None:
    """Whether ranks have whole groups, or would have to divide them."""
    folder = one_layer("gpt-oss", tmp_path)
    stored, plain = in_mxfp4(folder)
    rewrite(folder, plain, None)
    expected, ranks = expected_of(folder, 2), Ranks(tp=count, device="interpreter")
    rewrite(folder, stored, MXFP4)
    opening = {**OPEN, "quantized": "grouped", "ep_ranks": ep_ranks}
    check(ranks, folder, expected, opening, overlap=True)
    ranks.close()


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=str)
def test_ranks_attend_by_flashinfer(
    sizes: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN), prepend=os.pathsep)
    monkeypatch.syspath_prepend(STAND_IN)
    folder = write_llama(tmp_path, {"num_hidden_layers": 2})
    expected, ranks = expected_of(folder), Ranks(*sizes, device="interpreter")
    ways: dict[str, Any] = {} if sizes[1] == 1 else {"captured": (), "flights": sizes[1]}
    opening = {**OPEN, "backends": ("attention.paged:flashinfer",)}
    check(ranks, folder, expected, opening, overlap=True, **ways)
    ranks.close()


def test_last_tokens_that_are_not_shared_are_missed(
    pair: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_llama(tmp_path, {"num_hidden_layers": 1})
    expected = expected_of(folder, 1)

    def share_nothing(runner: DeviceRunner, plan: Any) -> None:
        if (plan.tokens < 0).any():
            runner._tp.all_reduce(torch.zeros_like(runner._last))

    monkeypatch.setattr(DeviceRunner, "_share_last", share_nothing)
    with pytest.raises(AssertionError):
        check(pair, folder, expected, overlap=True)


def test_a_row_that_is_not_finite_fails_alone_on_both_ranks(pair: Ranks, tmp_path: Path) -> None:
    """What it has left in its pages on either rank would get through the mask of attention."""
    source, folder = tmp_path / "source", tmp_path / "model"
    source.mkdir()
    folder.mkdir()
    write_llama(source, {"num_hidden_layers": 1, "tie_word_embeddings": False})
    with_nan(source, folder, BAD)
    bad = state([3, BAD, 4], sampling=SamplingParams(max_new_tokens=3))
    with pair.opened(folder, captured=CAPTURED, dtype="float32", pages=12) as (model, lead):
        good = requests(model.spec.vocabulary, 2)
        loop = ModelLoop(model, lead=lead, overlap=True, **LIMITS)
        alone = loop.run(good)
        failed, *beside = loop.run([bad, *good])
        assert failed.finish.error is not None
        again = loop.run(good)
        assert isinstance(model.runner, DeviceRunner)
        assert not any(pages[:-1].isnan().any() for pages in model.runner.pools[0].layer(0))
    for outputs in (beside, again):
        assert [output.ids for output in outputs] == [output.ids for output in alone]
