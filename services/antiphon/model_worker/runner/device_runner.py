"""Runs plans on a device that computes while the host goes on: launched now, concluded later.

Axes: R rows, T tokens, L rows of logits, S slots.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import torch

from antiphon.kernels.cpu.fused_decoder import FusedDecoderOutput
from antiphon.model_worker.batching.plan import (
    DeviceLost,
    Ints,
    Sampled,
    SamplingPart,
    StepOutcome,
    StepPlan,
)
from antiphon.model_worker.runner.decode_graphs import DecodeGraphs
from antiphon.model_worker.runner.device_pages import DevicePages, PageStream
from antiphon.model_worker.runner.input_batch import PlanRefused
from antiphon.model_worker.runner.model_runner import ModelRunner
from antiphon.model_worker.runner.prefill_graphs import PrefillGraphs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from antiphon.kernels.stream import Download, Stream
    from antiphon.model_worker.cache.codec import PageMemory
    from antiphon.model_worker.cache.groups import CacheGroup
    from antiphon.model_worker.model.load import LoadedModel
    from antiphon.model_worker.runner.draft_model import DraftModel
    from antiphon.model_worker.runner.graphs import Captured
    from antiphon.model_worker.runner.input_batch import InputBatch
    from antiphon.model_worker.runner.model_runner import SampleExchange
    from antiphon.model_worker.runner.pooling import Pooler

SLOTS, POSITIONS = 256, 1024
"""Of a runner that is not given their numbers."""
UNRECORDED = -1


class DeviceRunner(ModelRunner):
    """Launches plans in their order; what a plan reads of the one before it stays on the device.

    The last token of each slot is a tensor there, which a plan's placeholders are resolved from.
    The host reads nothing of a plan but its outcome. Prompts are pooled when the outcome is read,
    one by one as on the CPU. With a draft model plans are run in turn: it drafts when the outcome
    was read, and the host gives its drafts to the next plan.

    Of several ranks, which launch and conclude the same plans in one order, each samples and
    drafts; what rank 0 has sampled counts. Its last tokens reach the others at the beginning of the
    next pass, and the outcomes by the `exchange`. Ranks of earlier stages have a
    `DeviceStageRunner`.
    """

    def __init__(
        self,
        model: LoadedModel,
        groups: tuple[CacheGroup, ...],
        stream: Stream,
        *,
        forced: dict[str, str] | None = None,
        pooler: Pooler | None = None,
        draft: DraftModel | None = None,
        slots: int = SLOTS,
        positions: int = POSITIONS,
        deterministic: bool = False,
        exchange: SampleExchange | None = None,
    ) -> None:
        super().__init__(
            model,
            groups,
            forced=forced,
            fused=False,
            pooler=pooler,
            draft=draft,
            deterministic=deterministic,
            exchange=exchange,
        )
        self._stream = stream
        self._tp = model.build.tp
        self._by_slot = dict[int, bool]()  # of checked steps, whether their page tables are
        self._last = torch.zeros(slots, dtype=torch.int32, device=model.build.device)  # (S,)
        self._launched = deque[LaunchedPlan]()  # that are not concluded
        self._contexts.prepare(positions)
        self._decode = DecodeGraphs(
            model,
            self.ops,
            self._contexts,
            list(zip((pool.group for pool in self.pools), self._shapes, strict=True)),
            stateful=bool(self.states),
            last=self._last,
            positions=positions,
            stream=self._stream,
            upload=self._upload,
        )
        self._prefill = PrefillGraphs(model, self.ops, self._contexts, self._stream)

    def capture(
        self,
        sizes: Sequence[int],
        *,
        padded: bool = True,
        report: Callable[[int, int], None] | None = None,
    ) -> Captured:
        """Capture decode steps of these sizes: see `DecodeGraphs.capture`."""
        return self._decode.capture(sizes, padded=padded, report=report)

    def capture_prefills(
        self, sizes: Sequence[int], report: Callable[[int, int], None] | None = None
    ) -> Captured:
        """Capture passes of these numbers of tokens: see `PrefillGraphs.capture`."""
        return self._prefill.capture(sizes, report)

    def page_memories(self) -> list[PageMemory]:
        copies = PageStream(self._stream.beside(), self.ops, self._upload)
        memories = [DevicePages(pool.memory, copies) for pool in self._every_pool]
        for each in memories:
            each.compile()
        return [*memories]

    def check(self, plan: StepPlan) -> StepPlan:
        """Fill in what is kept by slot, and refuse what a device lacks  ->  the plan to launch.

        Called in the order of plans. What a pass needs is built when it is launched.

        Raises:
            PlanRefused: The plan uses what this runner does not support.
        """
        # Pages of other attention groups are on other ranks.
        self._by_slot[plan.step] = not plan.page_tables and plan.group_rows is None
        plan = self._tables.fill(plan)  # later plans rely on its changes, even if it is refused
        if plan.draft_counts is not None and self.draft is None:
            raise PlanRefused(f"step {plan.step}: this runner has no draft model")
        if plan.pooling is not None:
            self._require_pooler(plan)
        if (most := int(plan.slot.max(initial=0))) >= len(self._last):
            raise PlanRefused(f"step {plan.step}: slot {most}, of {len(self._last)}")
        return plan

    def launch(self, plan: StepPlan) -> LaunchedPlan:
        """Launch a plan, or as much of it as needs no sampling part. Returns at once."""
        # A captured pass overwrites what an earlier one is yet to be sampled from.
        staged = self._model.build.pp is not None
        assert staged or all(each.sampled for each in self._launched), "a plan without its part"
        launched = LaunchedPlan(self, plan, shared=self._exchange is not None)
        self._launched.append(launched)
        launched.attempt(self._launch)
        if plan.part is not None:
            launched.attempt(self._launch_sampling)
        return launched

    def run(self, plan: StepPlan, part: Callable[[], SamplingPart] | None = None) -> StepOutcome:
        launched = self.launch(plan)
        if plan.part is None:
            assert part is not None, "a plan without a sampling part"
            launched.sample(part())
        outcome = launched.outcome()
        if launched.plan.draft_counts is not None:
            outcome = self._await_drafts(launched.plan, outcome)
        self._aux = None
        return outcome

    def make_drafts(self) -> Ints:
        with torch.inference_mode(), self._stream.reading():
            return super().make_drafts()

    def sample(self, launched: LaunchedPlan, part: SamplingPart) -> None:
        """Give a plan its sampling part, and launch what depends on it."""
        launched.plan = msgspec.structs.replace(launched.plan, part=part)
        launched.attempt(self._launch_sampling)

    def conclude(self, launched: LaunchedPlan) -> None:
        """Wait for a plan, after all that were launched before it, and make its outcome."""
        while not launched.concluded:
            earlier = self._launched.popleft()
            earlier.concluded = True
            earlier.attempt(self._conclude_launched)
            if not isinstance(earlier.error, DeviceLost | None):
                self._forget(earlier)
            if earlier.batch is not None:
                earlier.batch.own.drop_groups()

    def _launch(self, launched: LaunchedPlan) -> None:
        plan = launched.plan
        if self._step is not None and plan.step != self._step + 1:
            raise PlanRefused(f"step {plan.step} does not follow step {self._step}")
        self._step = plan.step
        if plan.step not in self._by_slot:
            plan = launched.plan = self.check(plan)
        by_slot = self._by_slot.pop(plan.step)
        if self.draft is not None:
            plan = launched.plan = self._slots.resolve(plan, self._states)
        launched.batch = batch = self._batch(plan)
        with torch.inference_mode(), self._stream.launching():
            if by_slot and plan.changes is not None:
                self._decode.apply(plan.changes)
            self._share_last(plan)
            if by_slot and self._decode.takes(plan):
                launched.scored = self._decode.score(plan, batch.groups)
            else:
                launched.scored = self._score_launched(plan, batch)

    def _share_last(self, plan: StepPlan) -> None:
        """Give all ranks the last tokens of rank 0, if the plan is to be resolved from them."""
        if self._tp.ranks > 1 and (plan.tokens < 0).any():
            mine = self._last.clone() if self._tp.rank == 0 else torch.zeros_like(self._last)
            self._last.copy_(self._tp.all_reduce(mine))

    def _score_launched(self, plan: StepPlan, batch: InputBatch) -> FusedDecoderOutput:
        ids = self.ops.resolve_futures(self._upload(plan.tokens), self._last)
        if plan.pooling is not None:
            plan = self._require_pooler(plan).texts(plan)
        run_layers = self._prefill.run_layers if self._prefill.takes(plan) else None
        if plan.pooling is None:
            return self._contexts.score_by_layer(plan, batch, ids, run_layers)
        _, (hidden, finite, _) = (run_layers or self._contexts.run_layers)(plan, batch, ids)
        return FusedDecoderOutput(hidden, finite, hidden[:0], None, None)

    def _launch_sampling(self, launched: LaunchedPlan) -> None:
        plan, batch, scored = launched.plan, launched.batch, launched.scored
        assert batch is not None, "it was launched"
        assert scored is not None, "it was launched"
        part = plan.part
        assert part is not None, "a sampling part was given"
        if part.penalties is not None:
            self._conclude_before(launched)  # penalties count their tokens
        with torch.inference_mode(), self._stream.launching():
            finite, logits_finite, logits = scored.finite, scored.logits_finite, scored.logits
            assert finite is not None, "layers run one by one"
            if plan.details is not None or plan.pooling is not None:
                # The next step may overwrite them, and logits below.
                launched.scored = scored = scored._replace(hidden=scored.hidden.clone())
            if not len(plan.logit_tokens):
                launched.download = self._stream.download([finite])
                return
            assert logits_finite is not None, "layers run one by one"
            blockable = self._sampler.change_logits(plan, batch.logit_row, plan.tokens, logits)
            sampled = self._sampler.draw(
                plan.sampling, logits, batch.logit_row, batch.logit_position
            )
            slots, vocabulary = self._upload(_sampling_slots(plan, batch)), logits.shape[-1]
            self.ops.record_futures(self._last, slots, sampled, logits_finite, vocabulary)
            results = [finite, logits_finite, sampled]
            if blockable:
                results.append(torch.isneginf(logits.amax(dim=-1)))
            launched.download = self._stream.download(results)
            if plan.details is not None:
                launched.scored = scored._replace(logits=logits.clone())

    def _conclude_before(self, launched: LaunchedPlan) -> None:
        place = self._launched.index(launched)
        if place:
            self.conclude(self._launched[place - 1])

    def _conclude_launched(self, launched: LaunchedPlan) -> None:
        plan, batch, scored = launched.plan, launched.batch, launched.scored
        assert batch is not None, "it was launched"
        assert scored is not None, "it was launched"
        assert launched.download is not None, "a sampling part was given"
        results = _Results(*launched.download.wait())
        failed = batch.failed_of(results.finite, results.logits_finite)
        blocked = results.blocked
        tokens = results.sampled.astype(np.int32)
        sampled = Sampled(tokens, None if blocked is None or not blocked.any() else blocked, failed)
        if self._exchange is not None:
            # Before what follows, in which there may be collectives.
            sampled = self._exchange.share(plan.step, partial(Sampled, *sampled))
        if plan.details is None and plan.pooling is None and sampled.failed is None:
            launched.result = self._conclude(plan, batch, plan.tokens, scored, sampled)
        else:
            with torch.inference_mode(), self._stream.reading():
                launched.result = self._conclude_reading(plan, batch, scored, sampled)
        self._aux, launched.scored = scored.aux, None

    def _conclude_reading(
        self, plan: StepPlan, batch: InputBatch, scored: FusedDecoderOutput, sampled: Sampled
    ) -> StepOutcome:
        """The outcome of a plan of which the host computes more. Inside `reading`."""
        if plan.pooling is None:
            return self._conclude(plan, batch, plan.tokens, scored, sampled)
        ctx = self._contexts.of(plan, batch)
        return self._pooled(plan, batch, ctx, scored.hidden, sampled.failed)

    def _forget(self, launched: LaunchedPlan) -> None:
        """After a plan failed: zero what its rows have written or sampled.

        Plans made before the failure was known still run, and are dropped. The next owner of these
        pages masks what lies beyond its own tokens, but a NaN left there would get through.
        """
        batch, launched.scored = launched.batch, None
        if batch is None:
            return
        if self.draft is not None:
            self._slots.record_failure(launched.plan, self._states)
        slots = torch.as_tensor(launched.plan.slot.astype(np.int64))
        with torch.inference_mode(), self._stream.reading():
            self._last[slots.to(self._last.device)] = 0
            self._wipe(batch, np.ones(len(launched.plan.slot), np.bool_))

    def _record_tokens(
        self, plan: StepPlan, starts: Ints, token_ids: Ints, ended: NDArray[np.bool_] | None
    ) -> None:
        """The device has recorded them, and the host only needs them beside drafts."""
        if self.draft is not None:
            super()._record_tokens(plan, starts, token_ids, ended)


class LaunchedPlan:
    """A plan that was launched; its `outcome` waits for the device.

    Once it is `shared` with other ranks, none of them can go on if one of them fails.
    """

    def __init__(self, runner: DeviceRunner, plan: StepPlan, *, shared: bool = False) -> None:
        self._runner = runner
        self._shared = shared
        self.plan = plan
        self.batch: InputBatch | None = None
        self.scored: FusedDecoderOutput | None = None
        self.download: Download | None = None
        self.concluded = False
        self.result: StepOutcome | None = None
        self.error: Exception | None = None

    @property
    def sampled(self) -> bool:
        """Whether nothing of it is left to launch."""
        return self.download is not None or self.error is not None

    def attempt(self, work: Callable[[LaunchedPlan], None]) -> None:
        """Work on the plan, unless it has failed; if that raises, it has.

        An error of the device, which may be one of an earlier launch, is `DeviceLost`, and so is
        any of a plan that other ranks run: nothing can be computed after it.
        """
        if self.error is not None:
            return
        try:
            work(self)
        except Exception as error:  # noqa: BLE001  # raised where the outcome is read
            self.error = error
            if self._shared or isinstance(error, torch.AcceleratorError):
                self.error = DeviceLost(str(error))
                self.error.__cause__ = error

    def sample(self, part: SamplingPart) -> None:
        self._runner.sample(self, part)

    def outcome(self) -> StepOutcome:
        self._runner.conclude(self)
        if self.error is not None:
            raise self.error
        assert self.result is not None, "it was concluded"
        return self.result

    def drafts(self) -> Ints:
        raise AssertionError("plans with drafts are run in turn")


class _Results(NamedTuple):
    """What is downloaded of a plan."""

    finite: NDArray[np.bool_]  # (T,) whether the hidden state of a token is
    logits_finite: NDArray[np.bool_] = np.zeros(0, np.bool_)  # (L,)
    sampled: NDArray[np.int64] = np.zeros(0, np.int64)  # (L,)
    blocked: NDArray[np.bool_] | None = None  # (L,) whether no token is left; None: one is


def _sampling_slots(plan: StepPlan, batch: InputBatch) -> Ints:
    """The slot of each row of logits, (L,); `UNRECORDED` in a row that verifies drafts."""
    row = batch.logit_row
    slots = plan.slot[row]
    if batch.decodes:
        return slots
    several = np.bincount(row, minlength=len(plan.slot)) > 1
    return np.where(several[row], UNRECORDED, slots).astype(np.int32)
