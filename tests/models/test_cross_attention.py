"""Whisper's text model in the batching loop: cross attention to what each request has of its own.

The embeddings of the audio are random: what is tested is that each request attends to its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from tests.models.families_transcribing import ROWS, SOURCE
from tests.models.model_loop import LINEAR, ModelLoop
from tests.models.parity import draw
from tests.models.seeing_loop import CLAIM, embedding
from tests.support import worker
from tests.support.models import open_model
from transformers.modeling_outputs import BaseModelOutput

from antiphon.model_worker.batching.media import MediaLoaded
from antiphon.model_worker.batching.state import RequestState
from antiphon.model_worker.runner.cross_cache import CrossCache
from antiphon.wire.ids import RequestId
from antiphon.wire.media import Medium, MediumSpan
from antiphon.wire.namespaces import medium_key
from antiphon.wire.sampling import SamplingParams, TokenOutputParams

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from antiphon.model_worker.batching.mailbox import Mail
    from antiphon.model_worker.batching.media import MediaLoad
    from antiphon.model_worker.batching.state import ChoiceKey
    from antiphon.model_worker.runner.opening import OpenModel

HIDDEN, VOCABULARY = 64, 101
NEW_TOKENS = 12
NEAR = 1e-3
RANDOM = np.random.default_rng(8)
SHARED = RANDOM.integers(4, VOCABULARY, 21).tolist()
Part = tuple[list[int], int]
"""A prompt, and the content of its audio; 0: it has none."""
PARTS: list[Part] = [
    ([3, 9], 1),
    (SHARED, 2),
    ([*SHARED, 7], 3),
    ([*SHARED, 8, 9], 2),
    (RANDOM.integers(4, VOCABULARY, 33).tolist(), 4),
    ([*SHARED, 30], 0),
    ([3], 5),
]


@dataclass(frozen=True)
class Pair:
    """The same weights in transformers and as we load them."""

    reference: transformers.WhisperForConditionalGeneration
    folder: Path

    def opened(self, **values: Any) -> OpenModel:
        fields = {"page_tokens": 4, "pages": 160, "dtype": "float32", "linear": LINEAR}
        return open_model(self.folder, **fields, **values)

    @torch.inference_mode()
    def check(self, part: Part, output: Sequence[int]) -> None:
        """Compare greedy tokens with those of transformers for this prompt and audio."""
        ids, content = part
        source = np.zeros((SOURCE, HIDDEN), np.float32)
        if content:
            source = embedding(content, SOURCE, HIDDEN)
        rows = self.reference(
            encoder_outputs=BaseModelOutput(last_hidden_state=torch.as_tensor(source)[None]),
            decoder_input_ids=torch.tensor([[*ids, *output]]),
        ).logits[0]
        assert len(output) == NEW_TOKENS
        for index, token in enumerate(output, start=len(ids) - 1):
            assert rows[index, token] >= rows[index].max() - NEAR, f"{part}: {index}"


def made_pair(folder: Path) -> Pair:
    config: Any = ROWS[0].made()
    model = transformers.WhisperForConditionalGeneration(config).eval()
    draw(model)
    model.save_pretrained(folder)
    return Pair(model, folder)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return made_pair(tmp_path_factory.mktemp("whisper"))


def request(part: Part, name: str, **sampling: Any) -> RequestState:
    ids, content = part
    media = ()
    if content:
        key = medium_key(bytes([content]) * 32, b"")
        span = MediumSpan(start=0, tokens=0, key=key, placeholders=SOURCE)
        media = (Medium(span=span, width=content, height=1, claim=CLAIM),)
    params = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True, **sampling}
    return worker.state(
        ids, request_id=RequestId(name), media=media, sampling=SamplingParams(**params)
    )


class CrossLoop(ModelLoop):
    """Embeddings are brought in the turn after they are loaded; the content is a medium's width."""

    def __init__(self, model: OpenModel, **values: Any) -> None:
        super().__init__(
            model,
            media_width=HIDDEN,
            source_shape=(SOURCE, HIDDEN),
            source_heads=model.spec.cross_heads,
            context_tokens=64,
            **values,
        )
        self.loads = 0
        self._landed: list[MediaLoaded] = []
        for core in self.cores:
            core.batch.media.use(self, rows_max=7)

    def load(self, load: MediaLoad) -> None:
        self.loads += 1
        found = {
            index: embedding(each.medium.width, SOURCE, HIDDEN)[each.first : each.last]
            for index, each in load.media.items()
        }
        self._landed.append(MediaLoaded(load.key, load.number, found))

    def release(self, key: ChoiceKey, number: int) -> None:
        pass

    def _turn(self, mail: Mail) -> None:
        landed, self._landed = self._landed, []
        super()._turn(msgspec.structs.replace(mail, landed=list(landed)))


def run(pair: Pair, way: dict[str, Any], **how: Any) -> tuple[CrossLoop, list[list[int]]]:
    values = {"step_tokens_max": 16, "chunk_tokens": 8, **way}
    loop = CrossLoop(pair.opened(), **values)
    requests = [request(part, str(number)) for number, part in enumerate(PARTS)]
    return loop, [output.ids for output in loop.run(requests, **how)]


def check_each(pair: Pair, outputs: Sequence[Sequence[int]]) -> None:
    for part, output in zip(PARTS, outputs, strict=True):
        pair.check(part, output)


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "in small chunks, overlapped, cached": (
        {"chunk_tokens": 3, "overlap": True, "tree": True},
        {},
    ),
    "in whole prompts, two at a time": (
        {"chunk_tokens": None, "step_tokens_max": 64, "running_max": 2, "overlap": True},
        {},
    ),
    "retracted": ({"tree": True}, {"retract_at": (6, 11)}),
    "one a turn": ({"tree": True}, {"one_a_turn": True}),
}


@pytest.mark.parametrize("way", WAYS)
def test_text_is_that_of_transformers(pair: Pair, way: str) -> None:
    values, how = WAYS[way]
    _, outputs = run(pair, values, **how)
    check_each(pair, outputs)


def test_pages_are_shared_by_requests_of_the_same_audio_alone(pair: Pair) -> None:
    loop = CrossLoop(pair.opened(), tree=True, step_tokens_max=16, chunk_tokens=8)
    found: list[int] = []
    for name, content in enumerate((2, 3, 2, 0, 0)):
        (output,) = loop.run([request((SHARED, content), str(name))])
        pair.check((SHARED, content), output.ids)
        found.append(output.cached_tokens)
    assert found == [0, 0, 20, 0, 20]
    assert loop.loads == 3, "what a request attends to is not cached"


@pytest.mark.parametrize(("tokens", "most"), [(3 * SOURCE, 3), (SOURCE // 2, 1)])
def test_few_requests_start_in_a_step(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, tokens: int, most: int
) -> None:
    """What they attend to counts as tokens of the step, and one may start in any case."""
    started, right = list[int](), CrossCache.of

    def watched(cache: CrossCache, ops: Any, plan: Any, token_row: Any) -> Any:
        started.append(0 if plan.source_slots is None else len(plan.source_slots))
        return right(cache, ops, plan, token_row)

    monkeypatch.setattr(CrossCache, "of", watched)
    _, outputs = run(pair, {"step_tokens_max": tokens, "chunk_tokens": tokens})
    check_each(pair, outputs)
    assert (sum(started), max(started)) == (len(PARTS), most)


def test_the_bits_of_a_request_do_not_depend_on_others(pair: Pair) -> None:
    details = TokenOutputParams(logprobs=True)
    requests = [request(part, str(number), details=details) for number, part in enumerate(PARTS)]

    def scored(states: Sequence[RequestState], chunk: int) -> list[list[tuple[int, float | None]]]:
        model = pair.opened(deterministic=True)
        loop = CrossLoop(model, step_tokens_max=16, chunk_tokens=chunk, overlap=chunk == 3)
        return [
            [(token.token_id, token.logprob) for token in output.tokens]
            for output in loop.run(states)
        ]

    together = scored(requests, 3)
    assert together == [scored([one], 16)[0] for one in requests]


def test_a_slot_of_another_request_is_found(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    right = CrossCache.of

    def mutant(cache: CrossCache, ops: Any, plan: Any, token_row: Any) -> Any:
        plan = msgspec.structs.replace(plan, slot=plan.slot ^ 1)
        return right(cache, ops, plan, token_row)

    monkeypatch.setattr(CrossCache, "of", mutant)
    _, outputs = run(pair, {})
    with pytest.raises(AssertionError):
        check_each(pair, outputs)


def test_pages_of_another_audio_are_found(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestState, "page_salt", property(lambda self: self.cache_salt))
    _, outputs = run(pair, {"tree": True}, one_a_turn=True)
    with pytest.raises(AssertionError):
        check_each(pair, outputs)
