"""What models make of whole texts that draw no tokens: theirs and ours, side by side.

A model with a head of scores says those; one without any says the stream itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from tests.models.parity import MISSED, Saved, error, mutants, opened, texts, without_tensors
from tests.models.pooling import PoolingEngine
from tests.models.stepper import Stepper
from torch import Tensor

from antiphon.model_worker.batching.plan import StepOutcome, StepPlan
from antiphon.model_worker.cache.groups import GroupKind
from antiphon.model_worker.runner.input_batch import build_input_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from antiphon.model_worker.runner.model_runner import OpenModel

POOLED: Mapping[str, Callable[[Tensor], Tensor]] = {
    "last": lambda stream: stream[-1],
    "cls": lambda stream: stream[0],
    "mean": lambda stream: stream.mean(dim=0),
}
"""What stands for a text, of its stream (T, D)."""


class Reader:
    """A runner that draws nothing, and keeps by slot what leaves the last layer."""

    def __init__(self, model: OpenModel, types: int) -> None:
        self._runner, self._types = model.runner, types
        self.kept: dict[int, list[Tensor]] = {}

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutcome:
        """Compute a plan; types of tokens are those of `typed`."""
        runner, rows = self._runner, len(plan.slot)
        if self._types:
            types = (plan.tokens % self._types).astype(np.int32)
            plan = msgspec.structs.replace(plan, token_types=types)
        self.ctx = runner._contexts.of(
            plan, build_input_batch(plan, runner._shapes, runner._states_count)
        )
        tokens = torch.as_tensor(plan.tokens.astype(np.int64))
        left = runner._model.own_decoder.forward(self.ctx, tokens)[0]
        for slot, piece in zip(plan.slot, left.split(plan.query_len.tolist()), strict=True):
            self.kept.setdefault(int(slot), []).append(piece)
        nothing = np.zeros(0, np.int32)
        status, starts = np.zeros(rows, np.int32), np.zeros(rows + 1, np.int32)
        return StepOutcome(step=plan.step, starts=starts, token_ids=nothing, status=status)


def typed(ids: list[int], types: int) -> Tensor:
    """The type of each token, (1, T)."""
    return torch.tensor([ids]) % types


@torch.inference_mode()
def theirs(saved: Saved) -> Tensor:
    """What transformers makes of every text, one at a time."""
    said: list[Tensor] = []
    for ids in texts():
        types = saved.row.types
        beside = {"token_type_ids": typed(ids, types)} if types else {}
        out = saved.model(torch.tensor([ids]), **beside)
        said.append(out.logits if "logits" in out else out.last_hidden_state[0])
    return torch.cat(said)


def ours(saved: Saved, model: OpenModel, chunk: int | None = None) -> Tensor:
    """What we make of every text, all side by side, each in pieces if it may be cut."""
    reader = Reader(model, saved.row.types)
    batch = Stepper(reader, model.groups)
    for ids in texts():
        batch.add(ids)
    batch.prefill(chunk if model.spec.causal else None)
    return said(model, reader, range(len(texts())))


@torch.inference_mode()
def said(model: OpenModel, reader: Reader, slots: range) -> Tensor:
    """The scores of each text, or its stream."""
    streams = [torch.cat(reader.kept[slot]) for slot in slots]
    if model.spec.head is None:
        return torch.cat(streams)
    pooled = torch.stack([POOLED[model.spec.pooling](stream) for stream in streams])
    return model.runner._model.own_decoder.scores(reader.ctx, pooled)


def check_said(saved: Saved, linear: str) -> None:
    """All texts side by side, in pieces where they may be cut."""
    reference = theirs(saved)
    for chunk in (None, 17):
        assert error(ours(saved, opened(saved, linear), chunk), reference) < saved.row.limit


def check_shared_beginning(saved: Saved) -> None:
    """A text whose first pages another one has computed; of an encoder, nothing is kept at all."""
    ids, model = texts()[-1], opened(saved)
    if not model.spec.causal:
        assert [(group.kind, group.page_bytes) for group in model.groups] == [(GroupKind.PASS, 0)]
        return
    reader = Reader(model, saved.row.types)
    batch = Stepper(reader, model.groups)
    first, second = batch.add(ids[:40]), batch.add(ids)
    batch.step({0: 40})
    for own, others in zip(second.pages, first.pages, strict=True):
        own.extend(others[:9])
    second.computed = 36
    batch.step({1: len(ids) - 36})
    reference = theirs(saved)
    known = reader.kept[1][0] if model.spec.head is None else said(model, reader, range(1, 2))
    apart = (known - reference[-len(known) :]).abs().max() / reference.std()
    assert apart < saved.row.limit


def check_absences(saved: Saved) -> None:
    """Without any one feature, and without the tensors of any one name, something else is said."""
    reference = theirs(saved)
    for feature, mutant in mutants(saved).items():
        missed = error(ours(saved, opened(saved, mutant=mutant)), reference)
        assert missed > MISSED * saved.row.limit, f"nobody misses {feature}: {missed:.1e}"
    for kind, model in without_tensors(saved):
        missed = error(ours(saved, model), reference)
        assert not missed < MISSED * saved.row.limit, f"nobody misses {kind}: {missed:.1e}"


def check_served(saved: Saved, chunk: int | None) -> None:
    """All texts through the batching loop, which asks for no types and takes two at a time."""
    saved = replace(saved, row=replace(saved.row, types=0))
    engine = PoolingEngine(saved.folder, chunk=chunk, batch=2)
    spec = opened(saved).spec
    assert engine.pooling.mode == spec.pooling
    reference = theirs(saved)
    if spec.head is None:
        streams = reference.split([len(ids) for ids in texts()])
        pooled = torch.stack([POOLED[spec.pooling](stream) for stream in streams])
        reference = torch.nn.functional.normalize(pooled, dim=1)
    ours = torch.tensor(np.stack(engine.vectors_of(texts())))
    assert error(ours, reference) < saved.row.limit
