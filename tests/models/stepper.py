"""Drives a runner by hand, plan by plan, where a test wants to say what each step holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from tests.models.tiny import VOCABULARY
from tests.support.worker import sampling_columns

from antiphon.model_worker.batching.plan import Ints, PlanRunner, StepOutcome, StepPlan, future
from antiphon.model_worker.cache.groups import CacheGroup, GroupKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from antiphon.kernels.cpu.fused_decoder import FusedDecoderOutput
    from antiphon.model_worker.runner.input_batch import InputBatch
    from antiphon.model_worker.runner.model_runner import ModelRunner as Rank
    from antiphon.model_worker.runner.opening import OpenModel


SAMPLING = ("temperature", "top_p", "min_p", "top_k", "seed", "choice")


@dataclass(slots=True)
class Line:
    """One sequence: its tokens so far, how many are in the cache, and how it is sampled."""

    ids: list[int]
    pages: list[list[int]]
    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    seed: int = 0
    choice: int = 0
    computed: int = 0
    statuses: list[int] = field(default_factory=list[int])


class Stepper:
    """Sequences in slots, with pages handed out in a shuffled order and never given back."""

    def __init__(self, runner: PlanRunner, groups: Sequence[CacheGroup], seed: int = 0) -> None:
        self.runner = runner
        self.groups = groups
        self.lines: dict[int, Line] = {}
        self.plans: list[StepPlan] = []
        random = np.random.default_rng(seed)
        self._free = [random.permutation(group.pages_total).tolist() for group in groups]

    def add(self, ids: Sequence[int]) -> Line:
        """Put a prompt into the next slot; change the line's fields to sample it otherwise."""
        line = Line(list(ids), [[] for _ in self.groups])
        self.lines[len(self.lines)] = line
        return line

    def step(
        self,
        lengths: Mapping[int, int],
        *,
        drafts: Mapping[int, Sequence[int]] | None = None,
        all_logits: bool = False,
        as_future: bool = False,
    ) -> StepOutcome:
        """Compute the next `lengths[slot]` tokens of each slot, and its drafts after them.

        With `all_logits` every token's are asked for; with `as_future` the last known token of a
        decoding row is left for the runner to fill in.
        """
        drafted = {slot: list(ids) for slot, ids in (drafts or {}).items()}
        plan = self._plan(dict(lengths), drafted, all_logits=all_logits, as_future=as_future)
        self.plans.append(plan)
        outcome = self.runner.run(plan)
        for row, (slot, length) in enumerate(lengths.items()):
            line = self.lines[slot]
            accepted = outcome.token_ids[outcome.starts[row] : outcome.starts[row + 1]].tolist()
            line.statuses.append(int(outcome.status[row]))
            line.computed += length
            if line.computed == len(line.ids):
                # Of the drafts, those before the last accepted token are in the cache for good.
                line.computed += max(0, len(accepted) - 1)
                line.ids += accepted
        return outcome

    def share(self, first: Line, second: Line, tokens: int) -> None:
        """Let a sequence begin with so many tokens of another: its pages and its last state."""
        for group, own, theirs in zip(self.groups, second.pages, first.pages, strict=True):
            pages = 1 if group.kind is GroupKind.STATE else tokens // group.page_tokens
            own.extend(theirs[:pages])
        second.computed = tokens

    def prefill(self, chunk: int | None = None) -> None:
        """Compute all that is known, in pieces of `chunk` tokens a row."""
        while pending := {
            slot: min(chunk or len(line.ids), len(line.ids) - line.computed)
            for slot, line in self.lines.items()
            if len(line.ids) - line.computed > 1 or line.computed == 0
        }:
            self.step(pending)

    def decode(self, steps: int, *, as_future: bool = False) -> None:
        """Give every slot one token, `steps` times."""
        for _ in range(steps):
            self.step(dict.fromkeys(self.lines, 1), as_future=as_future)

    def _plan(
        self,
        lengths: dict[int, int],
        drafts: dict[int, list[int]],
        *,
        all_logits: bool,
        as_future: bool,
    ) -> StepPlan:
        lines = [self.lines[slot] for slot in lengths]
        tokens: list[list[int]] = []
        wanted: list[np.ndarray[tuple[int], np.dtype[np.bool_]]] = []
        for (slot, length), line in zip(lengths.items(), lines, strict=True):
            row = line.ids[line.computed : line.computed + length]
            if as_future and length == 1:
                row = [future(slot)]
            logits = np.zeros(length, np.bool_)
            logits[-1] = line.computed + length == len(line.ids)
            tokens.append(row + drafts.get(slot, []))
            wanted.append(
                np.concatenate([logits | all_logits, np.ones(len(tokens[-1]) - length, np.bool_)])
            )
        query_len = _ints(map(len, tokens))
        computed = _ints(line.computed for line in lines)
        kv_len = computed + query_len
        sampling = {name: [getattr(line, name) for line in lines] for name in SAMPLING}
        return StepPlan(
            step=len(self.plans) + 1,
            slot=_ints(lengths),
            query_start=(np.cumsum(query_len) - query_len).astype(np.int32),
            query_len=query_len,
            kv_len=kv_len,
            tokens=_ints(token for row in tokens for token in row),
            logit_tokens=np.flatnonzero(np.concatenate(wanted)).astype(np.int32),
            sampling=sampling_columns(len(lines), **sampling),
            page_tables=tuple(
                self._table(lines, kv_len, index) for index in range(len(self.groups))
            ),
        )

    def _table(self, lines: list[Line], kv_len: Ints, index: int) -> Ints:
        group = self.groups[index]
        if group.kind is GroupKind.STATE:
            return self._states(lines, index)
        for line, length in zip(lines, kv_len, strict=True):
            pages = line.pages[index]
            while len(pages) < group.table_len(int(length)):
                pages.append(self._free[index].pop())
            # What no query sees any more may be any row's: nothing may read it.
            dead = group.dead_len(line.computed)
            pages[:dead] = [-1] * dead
        table = np.full((len(lines), max(len(line.pages[index]) for line in lines)), -1, np.int32)
        for row, line in enumerate(lines):
            table[row, : len(line.pages[index])] = line.pages[index]
        return table

    def _states(self, lines: list[Line], index: int) -> Ints:
        """Each row reads its last state and writes another; a line remembers all that it wrote."""
        pairs: list[tuple[int, int]] = []
        for line in lines:
            states = line.pages[index]
            read = states[-1] if line.computed else -1
            states.append(self._free[index].pop())
            pairs.append((read, states[-1]))
        return np.array(pairs, np.int32)


def _ints(values: Iterable[int]) -> Ints:
    return np.array(list(values), np.int32)


def spy_on_logits(runner: Rank) -> list[Tensor]:
    """The logits of each pass from here on, before anything changes them."""
    seen: list[Tensor] = []
    at_once, by_parts = runner._contexts.score, runner._score

    def spy_at_once(
        plan: StepPlan, batch: InputBatch, tokens: Ints, *, bare: bool
    ) -> FusedDecoderOutput | None:
        del bare  # a caller that asks for less gets more
        scored = at_once(plan, batch, tokens, bare=False)
        if scored is not None:
            seen.append(scored.logits.clone())
        return scored

    def spy_by_parts(plan: StepPlan, batch: InputBatch, tokens: Ints) -> FusedDecoderOutput:
        scored = by_parts(plan, batch, tokens)
        seen.append(scored.logits.clone())
        return scored

    runner._contexts.score, runner._score = spy_at_once, spy_by_parts
    return seen


def prompts(
    vocabulary: int = VOCABULARY, lengths: Sequence[int] = (1, 2, 7, 16, 33, 90)
) -> list[list[int]]:
    random = np.random.default_rng(7)
    return [random.integers(0, vocabulary, length).tolist() for length in lengths]


def stepper(model: OpenModel, batch: Iterable[Sequence[int]], seed: int = 0) -> Stepper:
    """These prompts in the first slots of a model."""
    made = Stepper(model.runner, model.groups, seed)
    for ids in batch:
        made.add(ids)
    return made


def logits_of(model: OpenModel, ids: Sequence[int], chunk: int) -> Tensor:
    """Of every token, computed in chunks."""
    seen = spy_on_logits(model.runner)
    one = stepper(model, [ids])
    for start in range(0, len(ids), chunk):
        one.step({0: min(chunk, len(ids) - start)}, all_logits=True)
    return torch.cat(seen)
