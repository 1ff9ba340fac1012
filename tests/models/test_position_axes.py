"""Positions along axes, where prompts hold images: against transformers, through the whole loop.

The embeddings of the images are random: what is tested is where they and the text after them lie.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from tests.models.draft_models import open_draft, with_draft
from tests.models.model_loop import LINEAR
from tests.models.parity import draw
from tests.models.seeing_loop import (
    SeeingLoop,
    check_greedy,
    embedding,
    prompt,
    seeing_request,
)
from tests.models.test_speculation import often_wrong
from tests.models.tiny import VOCABULARY
from tests.support.models import open_model

from antiphon.model_worker.batching import state as batching_state
from antiphon.model_worker.batching.plan import StepPlan
from antiphon.model_worker.batching.plan_buffer import pack, unpack
from antiphon.model_worker.batching.positions import media_positions
from antiphon.model_worker.batching.state import ChoiceKey
from antiphon.model_worker.observability.replay import replay
from antiphon.wire.codec import pack_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from tests.models.seeing_loop import Part

    from antiphon.model_worker.batching.plan import Ints
    from antiphon.model_worker.batching.state import RequestState
    from antiphon.model_worker.observability.flight_recorder import StepRecord
    from antiphon.model_worker.runner.opening import OpenModel
    from antiphon.wire.media import MediumSpan

HIDDEN = 64
IMAGE = 120
NEW = 10
PROMPTS: Sequence[tuple[Part, ...]] = (
    (3, (3, 5, 1), 4),
    ((1, 7, 2), 9),
    (2, (4, 2, 3), 6, (2, 6, 1), 2),
    (5, (2, 2, 1), 1, (5, 1, 4), 17),
    (13,),
)


@dataclass(frozen=True)
class Pair:
    """The same weights in transformers and as we load them."""

    reference: transformers.Qwen2_5_VLForConditionalGeneration
    folder: Path

    def opened(self, **values: Any) -> OpenModel:
        whole = {"page_tokens": 4, "pages": 160, "dtype": "float32", "linear": LINEAR} | values
        return open_model(self.folder, **whole)

    @torch.inference_mode()
    def check(self, parts: Sequence[Part], output: Sequence[int]) -> None:
        """Compare greedy tokens with those of transformers for this prompt."""
        ids, _ = prompt(parts, IMAGE)
        assert len(output) == NEW
        check_greedy(self._logits(parts, [*ids, *output]), output, len(ids), parts)

    def _logits(self, parts: Sequence[Part], ids: list[int]) -> torch.Tensor:
        model = self.reference
        images = [part for part in parts if not isinstance(part, int)]
        tokens = torch.tensor([ids])
        embedded = model.get_input_embeddings()(tokens)
        for (rows, columns, content), each in zip(images, prompt(parts, IMAGE)[1], strict=True):
            first = each.span.start
            found = torch.as_tensor(embedding(content, rows * columns, HIDDEN))
            embedded[0, first : first + rows * columns] = found
        states = model.model.language_model(
            inputs_embeds=embedded, position_ids=theirs(model, images, tokens)
        )
        return model.lm_head(states.last_hidden_state)[0]


def theirs(
    model: transformers.Qwen2_5_VLForConditionalGeneration,
    images: Sequence[tuple[int, int, int]],
    tokens: torch.Tensor,
) -> torch.Tensor:
    grids = torch.tensor([[1, 2 * rows, 2 * columns] for rows, columns, _ in images])
    index: Callable[..., tuple[torch.Tensor, torch.Tensor]] = model.model.get_rope_index
    return index(tokens, (tokens == IMAGE).int(), image_grid_thw=grids if images else None)[0]


def request(parts: Sequence[Part], name: str) -> RequestState:
    return seeing_request(parts, IMAGE, name, max_new_tokens=NEW)


def made(folder: Path, architecture: Any, sections: Sequence[int], **text: Any) -> Pair:
    rope = {
        "rope_type": "default",
        "rope_theta": 100.0,
        "mrope_section": sections,
        "partial_rotary_factor": 1.0,
    }
    config = architecture.config_class(
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": HIDDEN,
        },
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "rope_parameters": rope,
            **text,
        },
        image_token_id=IMAGE,
        tie_word_embeddings=False,
    )
    model = architecture(config).eval()
    draw(model)
    model.save_pretrained(folder)
    return Pair(model, folder)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("axes")
    return made(folder, transformers.Qwen2_5_VLForConditionalGeneration, [2, 3, 3])


def check_each(pair: Pair, outputs: Sequence[Sequence[int]]) -> None:
    for parts, output in zip(PROMPTS, outputs, strict=True):
        pair.check(parts, output)


WAYS: dict[str, dict[str, Any]] = {
    "in turn": {},
    "in small chunks, overlapped": {"chunk_tokens": 3, "overlap": True},
    "in windows of rows": {"chunk_tokens": 5, "rows_max": 3},
    "in whole prompts": {"chunk_tokens": None, "step_tokens_max": 64},
}


def run(pair: Pair, way: dict[str, Any], **how: Any) -> tuple[SeeingLoop, list[list[int]]]:
    loop = SeeingLoop(pair.opened(), **{"step_tokens_max": 16, "chunk_tokens": 8, **way})
    requests = [request(parts, str(number)) for number, parts in enumerate(PROMPTS)]
    return loop, [output.ids for output in loop.run(requests, **how)]


@pytest.mark.parametrize("way", WAYS)
def test_text_after_images_is_that_of_transformers(pair: Pair, way: str) -> None:
    _, outputs = run(pair, WAYS[way])
    check_each(pair, outputs)


def places(span: MediumSpan) -> Ints:
    return np.arange(span.start, span.start + span.tokens, dtype=np.int32)


def check_image_positions(model: Any) -> None:
    """Positions of two images, and of text before, between and behind them, are the model's."""
    types = torch.tensor([[0, 0, *[1] * 15, 0, 0, 0, *[1] * 8, 0, 0]])
    grids = torch.tensor([[1, 6, 10], [1, 8, 4]])
    expected, _ = model.get_rope_index(types, types, image_grid_thw=grids)
    _, media = prompt((2, (3, 5, 1), 3, (4, 2, 2), 2), IMAGE)
    positions, offset = media_positions((each.span, places(each.span)) for each in media)
    rest = np.tile(np.arange(positions.shape[1], 30) + offset, (3, 1))
    np.testing.assert_array_equal(np.concatenate([positions, rest], axis=1), expected[:, 0])


def no_offset(media: Iterable[tuple[MediumSpan, Ints]]) -> tuple[Ints, int]:
    return media_positions(media)[0], 0


def rows_as_columns(media: Iterable[tuple[MediumSpan, Ints]]) -> tuple[Ints, int]:
    positions, offset = media_positions(media)
    return positions[[0, 2, 1]], offset


def as_text(media: Iterable[tuple[MediumSpan, Ints]]) -> tuple[Ints, int]:
    positions, _ = media_positions(media)
    return positions[:, :0], 0


@pytest.mark.parametrize("mutant", [no_offset, rows_as_columns, as_text])
def test_a_mutant_of_positions_is_found(
    pair: Pair, mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching_state, "media_positions", mutant)
    _, outputs = run(pair, {})
    with pytest.raises(AssertionError):
        check_each(pair, outputs)


def test_retracted_requests_find_their_positions_again(pair: Pair) -> None:
    loop, outputs = run(pair, {}, retract_at=(6, 11))
    check_each(pair, outputs)
    assert loop.loads > 7


def test_states_behind_images_are_those_of_transformers(tmp_path: Path) -> None:
    """Of a Qwen3.5, retracted and overlapped; the same image and question again is cached."""
    pair = made(
        tmp_path,
        transformers.Qwen3_5ForConditionalGeneration,
        [4, 2, 2],
        head_dim=16,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=12,
        linear_value_head_dim=8,
    )
    for way in WAYS.values():
        _, outputs = run(pair, way, retract_at=(6, 11))
        check_each(pair, outputs)
    loop = SeeingLoop(pair.opened(), tree=True, step_tokens_max=16, chunk_tokens=8)
    outputs = [loop.run([request(PROMPTS[2], name)])[0] for name in ("first", "again")]
    for output in outputs:
        pair.check(PROMPTS[2], output.ids)
    assert [output.cached_tokens > 0 for output in outputs] == [False, True]


def test_a_cached_prefix_may_end_within_an_image(pair: Pair) -> None:
    loop = SeeingLoop(pair.opened(), tree=True, step_tokens_max=16, chunk_tokens=8)
    before, longer = (2, (4, 4, 1), 5), (2, (4, 4, 1), 5, (2, 3, 2), 3)
    other = (2, (4, 4, 9), 5)  # another image in the same place
    outputs = [loop.run([request(parts, str(parts))])[0] for parts in (before, longer, other)]
    for parts, output in zip((before, longer, other), outputs, strict=True):
        pair.check(parts, output.ids)
    assert [output.cached_tokens for output in outputs] == [0, 20, 0]
    (again,) = loop.run([request(before, "again")])
    assert again.ids == outputs[0].ids
    assert again.cached_tokens == 20


@pytest.mark.parametrize("overlap", [False, True])
def test_drafts_after_images_are_verified_at_their_positions(pair: Pair, overlap: bool) -> None:
    _, plain = run(pair, {})
    texts = {
        ChoiceKey(key): [*prompt(parts, IMAGE)[0], *output]
        for key, (parts, output) in enumerate(zip(PROMPTS, plain, strict=True))
    }
    loop, outputs = run(pair, {"drafter": often_wrong(texts), "overlap": overlap})
    assert outputs == plain
    assert loop.reports[-1].totals.drafts_accepted > 5


def test_rows_that_follow_drafts_in_flight_have_their_positions(pair: Pair) -> None:
    """The draft model sees no images: its drafts behind them are mostly wrong."""
    model = with_draft(pair.opened(), open_draft(pair.folder))
    loop = SeeingLoop(model, step_tokens_max=16, chunk_tokens=8, overlap=True)
    requests = [request(parts, str(number)) for number, parts in enumerate(PROMPTS)]
    check_each(pair, [output.ids for output in loop.run(requests)])
    plans = [record.plan for record in loop.loop.recorder.records()]
    assert any(
        plan.position_offsets is not None and plan.draft_counts is not None for plan in plans
    )
    assert loop.reports[-1].totals.drafts_accepted > 0


def test_positions_are_those_of_transformers(pair: Pair) -> None:
    for parts in PROMPTS:
        ids, media = prompt(parts, IMAGE)
        images = [part for part in parts if not isinstance(part, int)]
        expected = theirs(pair.reference, images, torch.tensor([ids]))[:, 0].numpy()
        positions, offset = media_positions((each.span, places(each.span)) for each in media)
        rest = np.arange(positions.shape[1], len(ids)) + offset
        found = np.concatenate([positions, np.tile(rest, (3, 1))], axis=1)
        np.testing.assert_array_equal(found, expected)


def test_a_text_has_no_positions_in_its_plans(pair: Pair) -> None:
    loop = SeeingLoop(pair.opened(), step_tokens_max=16, chunk_tokens=8)
    loop.run([request((13,), "text")])
    for record in loop.loop.recorder.records():
        plan = record.plan
        assert (plan.position_offsets, plan.axis_tokens) == (None, None)


def test_a_request_that_moves_goes_on_from_its_positions(pair: Pair) -> None:
    """Its outputs so far are computed with its prompt, as tokens behind its images."""
    loop, outputs = run(pair, {})
    moved = [
        msgspec.structs.replace(request(parts, f"moved {number}"), output_ids=pack_ids(output[:4]))
        for number, (parts, output) in enumerate(zip(PROMPTS, outputs, strict=True))
    ]
    assert [output.ids for output in loop.run(moved)] == [output[4:] for output in outputs]


@pytest.mark.parametrize("dropped", ["", "position_offsets", "axis_tokens"])
def test_a_recording_is_replayed_and_misses_no_position(pair: Pair, dropped: str) -> None:
    loop, _ = run(pair, {})
    records: list[StepRecord] = []
    for record in loop.loop.recorder.records():
        plan = unpack(pack(record.plan), StepPlan)
        if dropped:
            plan = msgspec.structs.replace(plan, **{dropped: None})
        records.append(msgspec.structs.replace(record, plan=plan))
    model = pair.opened()
    result = replay(records, model.groups, model.runner)
    assert (result.difference is None) == (not dropped)
    if not dropped:
        assert (result.plans, result.passed) == (len(records), 0)
