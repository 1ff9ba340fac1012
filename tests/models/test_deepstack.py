"""Qwen3-VL's deepstack and its interleaved axes: against transformers, through the whole loop.

The embeddings of the images are random: what is tested is where their parts are added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from tests.models.model_loop import LINEAR
from tests.models.parity import draw
from tests.models.seeing_loop import SeeingLoop, check_greedy, embedding, prompt
from tests.models.test_position_axes import IMAGE, PROMPTS, request, theirs
from tests.models.tiny import VOCABULARY
from tests.support.models import open_model

from antiphon.kernels.rotary import RotarySpec
from antiphon.model_worker.batching import plan_builder
from antiphon.model_worker.batching.plan import StepPlan
from antiphon.model_worker.batching.plan_buffer import pack, unpack
from antiphon.model_worker.batching.state import RequestMedia
from antiphon.model_worker.observability.replay import replay

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.models.seeing_loop import Part

    from antiphon.model_worker.batching.plan import Floats, Ints
    from antiphon.model_worker.runner.opening import OpenModel

HIDDEN, LEVELS = 64, 2
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [4, 2, 2]},
}


@dataclass(frozen=True)
class Pair:
    """The same weights in transformers and as we load them."""

    reference: transformers.Qwen3VLForConditionalGeneration
    folder: Path

    def opened(self) -> OpenModel:
        return open_model(self.folder, page_tokens=4, pages=160, dtype="float32", linear=LINEAR)

    @torch.inference_mode()
    def check(self, parts: Sequence[Part], output: Sequence[int]) -> None:
        """Compare greedy tokens with those of transformers for this prompt."""
        ids, media = prompt(parts, IMAGE)
        check_greedy(self._logits(parts, [*ids, *output]), output, len(ids), parts)
        assert len(output) == 10
        assert len(media) == sum(not isinstance(part, int) for part in parts)

    def _logits(self, parts: Sequence[Part], ids: list[int]) -> torch.Tensor:
        model: Any = self.reference
        images = [part for part in parts if not isinstance(part, int)]
        tokens = torch.tensor([ids])
        embedded = model.get_input_embeddings()(tokens)
        stacked: dict[str, Any] = {}
        if images:
            wide = (1 + LEVELS) * HIDDEN
            rows = np.concatenate([embedding(c, a * b, wide) for a, b, c in images])
            first, *added = torch.as_tensor(rows).split(HIDDEN, dim=1)
            embedded[tokens == IMAGE] = first
            stacked = {"visual_pos_masks": tokens == IMAGE, "deepstack_visual_embeds": added}
        states = model.model.language_model(
            inputs_embeds=embedded, position_ids=theirs(model, images, tokens), **stacked
        )
        return model.lm_head(states.last_hidden_state)[0]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    config = transformers.Qwen3VLConfig(
        vision_config={
            "depth": LEVELS,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": HIDDEN,
            "deepstack_visual_indexes": [*range(LEVELS)],
        },
        text_config=TEXT,
        image_token_id=IMAGE,
        tie_word_embeddings=False,
    )
    model = transformers.Qwen3VLForConditionalGeneration(config).eval()
    draw(model)
    folder = tmp_path_factory.mktemp("deepstack")
    model.save_pretrained(folder)
    return Pair(model, folder)


def run(pair: Pair, way: dict[str, Any], **how: Any) -> tuple[SeeingLoop, list[list[int]]]:
    values = {"step_tokens_max": 16, "chunk_tokens": 8, **way}
    loop = SeeingLoop(pair.opened(), deepstack=LEVELS, **values)
    requests = [request(parts, str(number)) for number, parts in enumerate(PROMPTS)]
    return loop, [output.ids for output in loop.run(requests, **how)]


def check_each(pair: Pair, outputs: Sequence[Sequence[int]]) -> None:
    for parts, output in zip(PROMPTS, outputs, strict=True):
        pair.check(parts, output)


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "in small chunks, overlapped": ({"chunk_tokens": 3, "overlap": True}, {}),
    "in whole prompts": ({"chunk_tokens": None, "step_tokens_max": 64}, {}),
    "retracted": ({}, {"retract_at": (6, 11)}),
}


@pytest.mark.parametrize("way", WAYS)
def test_text_after_images_is_that_of_transformers(pair: Pair, way: str) -> None:
    values, how = WAYS[way]
    _, outputs = run(pair, values, **how)
    check_each(pair, outputs)


def unstacked(rows: Floats) -> Floats:
    return np.concatenate([rows[:, :HIDDEN], np.zeros_like(rows[:, HIDDEN:])], axis=1)


def exchanged(rows: Floats) -> Floats:
    first, one, two = np.split(rows, 1 + LEVELS, axis=1)
    return np.concatenate([first, two, one], axis=1)


@pytest.mark.parametrize("change", [unstacked, exchanged])
def test_a_mutant_of_splices_is_found(
    pair: Pair, change: Callable[[Floats], Floats], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = plan_builder._splices

    def mutant(*args: Any) -> Any:
        places, rows = right(*args)
        return places, None if rows is None else change(rows)

    monkeypatch.setattr(plan_builder, "_splices", mutant)
    _, outputs = run(pair, {})
    with pytest.raises(AssertionError):
        check_each(pair, outputs)


def test_a_chunk_with_rows_of_another_part_of_its_image_is_found(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = RequestMedia.rows

    def mutant(media: RequestMedia, start: int, end: int) -> list[tuple[Ints, Floats]]:
        found = right(media, start, end)
        return [(places, np.roll(rows, 1, axis=0)) for places, rows in found]

    monkeypatch.setattr(RequestMedia, "rows", mutant)
    _, outputs = run(pair, {})
    with pytest.raises(AssertionError):
        check_each(pair, outputs)


def test_axes_in_sections_are_found(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RotarySpec, "axes", lambda _: [0, 0, 0, 0, 1, 1, 2, 2])
    _, outputs = run(pair, {})
    with pytest.raises(AssertionError):
        check_each(pair, outputs)


@pytest.mark.parametrize("change", [None, unstacked])
def test_a_recording_has_all_that_is_added(
    pair: Pair, change: Callable[[Floats], Floats] | None
) -> None:
    loop, _ = run(pair, {})
    records: list[Any] = []
    for record in loop.loop.recorder.records():
        plan = unpack(pack(record.plan), StepPlan)
        if change is not None and plan.spliced_rows is not None:
            plan = msgspec.structs.replace(plan, spliced_rows=change(plan.spliced_rows))
        records.append(msgspec.structs.replace(record, plan=plan))
    model = pair.opened()
    result = replay(records, model.groups, model.runner)
    assert (result.difference is None) == (change is None)
