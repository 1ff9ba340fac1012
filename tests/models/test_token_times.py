"""Where tokens are in the audio, by the weights of cross attention: compared with transformers'."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.models.families_transcribing import SOURCE
from tests.models.seeing_loop import embedding
from tests.models.test_cross_attention import (
    HIDDEN,
    VOCABULARY,
    CrossLoop,
    Pair,
    made_pair,
    request,
)
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.whisper import generation_whisper

from antiphon.model_worker.runner import model_runner
from antiphon.model_worker.runner.alignment import AlignmentPass, _smoothed, warped
from antiphon.wire.base import FinishReason
from antiphon.wire.sampling import AlignmentParams, TokenOutputParams
from antiphon.wire.token_outputs import unpack_floats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.model_worker.batching.state import RequestState

HEADS = ((1, 0), (1, 3), (2, 1))
RANDOM = np.random.default_rng(48)
PROMPTS = [RANDOM.integers(4, VOCABULARY, length).tolist() for length in (40, 21, 60, 5)]
ALIGNED = [(30, SOURCE), (21 - 1, 37), (56, SOURCE), (2, 3)]
"""Tokens of each prompt that are aligned, and those of the encoder that they are aligned with."""


class Generated(dict[str, Any]):
    """What transformers' `generate` has made, of all tokens in one step."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    made = made_pair(tmp_path_factory.mktemp("whisper"))
    made.reference.set_attn_implementation("eager")  # the others return no weights
    return made


@torch.inference_mode()
def expected(pair: Pair, ids: list[int], content: int, tokens: int, source: int) -> list[float]:
    states = torch.as_tensor(embedding(content, SOURCE, HIDDEN))[None]
    found = pair.reference(
        encoder_outputs=BaseModelOutput(last_hidden_state=states),
        decoder_input_ids=torch.tensor([ids]),
        output_attentions=True,
    )
    made = Generated(cross_attentions=(found.cross_attentions,), sequences=torch.zeros(1, 1))
    before = len(ids) - tokens
    times = pair.reference._extract_token_timestamps(
        made, HEADS, time_precision=1.0, num_frames=2 * source, num_input_ids=before
    )
    return times[0, before:-1].tolist()  # the last one is that of a token without weights


def asked(number: int, tokens: int, source: int, **changes: Any) -> RequestState:
    params: dict[str, Any] = {
        "max_new_tokens": 0,
        "details": TokenOutputParams(ids=True),
        "alignment": AlignmentParams(tokens=tokens, source_tokens=source, heads=HEADS),
    }
    return request((PROMPTS[number], number + 1), f"times {number}", **params | changes)


def times(outputs: Sequence[Any]) -> list[list[float]]:
    found = [[news.details for news in each.progress if news.details.count] for each in outputs]
    assert [[details.count for details in each] for each in found] == [[1]] * len(outputs)
    return [list(unpack_floats(details.times)) for (details,) in found]


@pytest.mark.parametrize(
    "way",
    [
        {"chunk_tokens": None, "step_tokens_max": 64},
        {"chunk_tokens": 7, "step_tokens_max": 16, "overlap": True, "tree": True},
    ],
    ids=["whole", "in chunks"],
)
def test_times_of_tokens_are_those_of_transformers(pair: Pair, way: dict[str, Any]) -> None:
    loop = CrossLoop(pair.opened(), **way)
    aligned = [asked(number, *ALIGNED[number]) for number in range(len(PROMPTS))]
    # Beside others, which write.
    *found, other = loop.run([*aligned, request((PROMPTS[1], 2), "other")])
    assert times(found) == [
        expected(pair, PROMPTS[number], number + 1, *ALIGNED[number])
        for number in range(len(PROMPTS))
    ]
    pair.check((PROMPTS[1], 2), other.ids)
    assert not [news for news in other.progress if news.details.times]


def test_a_step_aligns_one_prompt(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes wait for no more, however many prompts could end in a step."""
    aligned, right = list[int](), model_runner.align

    def watched(wanted: Any, *beside: Any) -> Any:
        aligned.append(len(wanted.rows))
        return right(wanted, *beside)

    monkeypatch.setattr(model_runner, "align", watched)
    loop = CrossLoop(pair.opened(), tree=True, chunk_tokens=None, step_tokens_max=2048)
    requests = [asked(number, *ALIGNED[number]) for number in range(len(PROMPTS))]
    assert times(loop.run(requests)) == [
        expected(pair, PROMPTS[number], number + 1, *ALIGNED[number])
        for number in range(len(PROMPTS))
    ]
    assert aligned == [1] * len(PROMPTS)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"max_new_tokens": 3}, "no new tokens"),
        ({"details": None}, "with token outputs"),
        ({"details": TokenOutputParams(ids=True, prompt_start=0)}, "of none of its prompt"),
        (
            {"alignment": AlignmentParams(tokens=1, source_tokens=SOURCE + 1, heads=HEADS)},
            f"at most {SOURCE}",
        ),
        (
            {"alignment": AlignmentParams(tokens=99, source_tokens=1, heads=HEADS)},
            "more tokens than the prompt",
        ),
        (
            {"alignment": AlignmentParams(tokens=1, source_tokens=1, heads=HEADS, filter_width=2)},
            "odd filter_width",
        ),
        (
            {"alignment": AlignmentParams(tokens=1, source_tokens=1, heads=((2, 3), (3, 0)))},
            "other heads than those of 3 layers with 4 heads",
        ),
        (
            {"alignment": AlignmentParams(tokens=1, source_tokens=1, heads=((0, 4),))},
            "other heads than those of 3 layers with 4 heads",
        ),
    ],
)
def test_an_alignment_that_cannot_be_made_is_refused(
    pair: Pair, changes: dict[str, Any], reason: str
) -> None:
    loop = CrossLoop(pair.opened(), step_tokens_max=64, chunk_tokens=None)
    (output,) = loop.run([asked(0, *ALIGNED[0], **changes)])
    assert output.finish.reason is FinishReason.ERROR
    assert output.finish.error is not None
    assert reason in output.finish.error.message
    assert output.finish.error.param == "alignment"


def test_a_source_token_that_no_token_attends_to_is_like_all_others() -> None:
    """Its weights have no deviation: they are zero, each."""
    made = AlignmentPass(torch.zeros(9, 4), {0: [0]}, first=0, source_tokens=9, filter_width=3)
    keys = torch.zeros(9, 1, 4)
    keys[3] = -1000.0
    made.store(0, keys, torch.zeros(9, 1, 4))
    queries = torch.rand(5, 1, 4, generator=torch.Generator().manual_seed(1)) + 0.5
    assert not made.attend(0, queries, 1.0).any()
    assert made.matrix.isfinite().all()


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (6, 1), (4, 4), (3, 17), (17, 3), (9, 30)])
def test_the_cheapest_path_is_that_of_transformers(shape: tuple[int, int]) -> None:
    random = np.random.default_rng(7)
    # Whole numbers have many ways that cost the same.
    for costs in (random.normal(size=shape), random.integers(0, 3, shape).astype(np.float64)):
        rows, columns = generation_whisper._dynamic_time_warping(costs)
        starts = [columns[rows == row].min() for row in range(shape[0])]
        assert warped(costs).tolist() == starts


@pytest.mark.parametrize(
    ("width", "length"), [(1, 5), (3, 5), (5, 9), (7, 30), (7, 3), (7, 4), (11, 40)]
)
def test_medians_are_those_of_transformers(width: int, length: int) -> None:
    weights = torch.randn(6, length, generator=torch.Generator().manual_seed(3))
    theirs = generation_whisper._median_filter(weights[None], width)[0]
    assert torch.equal(_smoothed(weights, width), theirs)
