"""The protocol of a step on several ranks: one of them plans and samples, all of them compute.

Rank 0 broadcasts each plan, and the tokens sampled from it, as messages in one order. Every rank
checks a plan when it arrives, which may be while the plan before is computed, and all agree on it
before any of them computes it. So a plan that one rank refuses is computed by none, and the loop of
rank 0 runs its rows again in halves. From then on the ranks are in collectives: what fails there
cannot be undone on the others, and ends all of them.

Ranks on devices launch plans, and read the outcome of the oldest one when rank 0 does: it sends
what it has sampled then. So all of them launch their collectives in one order. Plans that ask for
drafts are run in turn there, as on the CPU: a draft model reads their outcomes.
"""

from __future__ import annotations

import logging
from collections import deque
from enum import IntEnum
from itertools import chain
from queue import SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from antiphon.model_worker.batching.flights import InStream, StreamRunner
from antiphon.model_worker.batching.plan import (
    PLAIN,
    DeviceLost,
    Flags,
    Ints,
    Longs,
    Sampled,
    SamplingPart,
    StepOutcome,
    StepPlan,
)
from antiphon.model_worker.batching.plan_buffer import pack, unpack
from antiphon.model_worker.ranks.page_shards import PagesRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from threading import Thread

    from antiphon.model_worker.batching.plan import Flight, Launcher

log = logging.getLogger(__name__)


class StepMode(IntEnum):
    """Kind of a forward pass: what ranks must agree on before they choose kernels for it."""

    IDLE = 0
    DECODE = 1
    EXTEND = 2


class PassFacts(msgspec.Struct, frozen=True, gc=False):
    """The size of a forward pass, or of one attention group's part of it."""

    mode: int = StepMode.IDLE
    tokens: int = 0
    padded_tokens: int = 0
    logits: int = 0

    @classmethod
    def of(cls, rows: int, tokens: int, logits: int) -> PassFacts:
        mode = StepMode.IDLE
        if tokens:
            mode = StepMode.DECODE if tokens == rows == logits else StepMode.EXTEND
        # The kernels of a CPU compute as many tokens as there are.
        return cls(mode=mode, tokens=tokens, padded_tokens=tokens, logits=logits)


class StepFacts(msgspec.Struct, frozen=True, gc=False):
    """What ranks compare of a plan; of a refused one, the number of the rank that refused it."""

    refused_by: int = 0  # 1 + the rank; 0: none
    step: int = 0
    whole: PassFacts = PassFacts()
    groups: tuple[PassFacts, ...] = ()  # of each attention group, if there are several

    @classmethod
    def of(cls, plan: StepPlan) -> StepFacts:
        whole = PassFacts.of(len(plan.slot), len(plan.tokens), len(plan.logit_tokens))
        return cls(step=plan.step, whole=whole, groups=tuple(_group_facts(plan)))

    @classmethod
    def refused(cls, plan: StepPlan, rank: int) -> StepFacts:
        groups = (PassFacts(),) * plan.groups_count
        return cls(refused_by=1 + rank, step=plan.step, groups=groups)

    @property
    def numbers(self) -> list[int]:
        """All of them, as many as of any plan of so many groups."""
        passes = (self.whole, *self.groups)
        return [self.refused_by, self.step, *chain(*map(msgspec.structs.astuple, passes))]


def _group_facts(plan: StepPlan) -> Iterator[PassFacts]:
    for group in range(plan.groups_count):
        rows = plan.rows_of(group)
        tokens = plan.tokens_of(rows)
        first, last = np.searchsorted(plan.logit_tokens, (tokens.start, tokens.stop)).tolist()
        yield PassFacts.of(rows.stop - rows.start, tokens.stop - tokens.start, last - first)


class StepRefused(Exception):
    """A rank refused a plan: no rank computes it."""


class RanksDisagree(Exception):
    """The ranks hold different plans, or have failed to load: the instance cannot go on."""


class RankChannel(Protocol):
    """What ranks exchange beside tensors, over CPU groups of their own."""

    @property
    def rank(self) -> int: ...

    def send(self, message: bytearray) -> None:
        """Broadcast a message, on rank 0."""
        ...

    def receive(self) -> bytearray:
        """Wait for the next message of rank 0, on the others."""
        ...

    def max(self, values: Longs) -> Longs:
        """The maximum over ranks of each of (N,), on all ranks at once."""
        ...


class RankRunner(Protocol):
    """Computes one rank's shard of plans: see `PlanRunner`."""

    def check(self, plan: StepPlan) -> StepPlan:
        """Build what a plan needs of what earlier ones have changed  ->  the plan to run.

        Called in the order of plans, and again for another plan of that step if it was refused.
        Raises whatever is wrong with the plan.
        """
        ...

    def run(
        self, plan: StepPlan, part: Callable[[], SamplingPart] | None = None
    ) -> StepOutcome: ...

    def make_drafts(self) -> Ints:
        """Make the drafts after the last plan, which asks for some."""
        ...


class FollowerRunner(RankRunner, Protocol):
    """The same on a rank that is not the first."""

    def settle(self) -> None:
        """Record what was sampled from plans that have run, as far as it is known."""
        ...


class RankMessage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A plan, or what was sampled from the logits of an earlier one, or the end of the ranks.

    Between them, requests for shards of pages, and for the drafts after a plan.
    """

    plan: StepPlan | None = None
    step: int = 0
    sampled: Ints | None = None  # (L,)
    blocked: Flags | None = None  # (L,) as in `Sampled`
    failed: Flags | None = None  # (R,)
    pages: PagesRequest | None = None
    drafts_after: int | None = None  # the step of the plan


def agree(channel: RankChannel, facts: StepFacts) -> StepFacts:
    """Compare the facts of all ranks, and return them; a collective of all ranks.

    Raises:
        StepRefused: A rank has refused the plan.
        RanksDisagree: The ranks hold different plans.
    """
    mine = np.array(facts.numbers, np.int64)
    highest, lowest = np.split(channel.max(np.concatenate([mine, -mine])), 2)
    if highest[0]:
        raise StepRefused(f"rank {highest[0] - 1} refuses step {highest[1]}")
    if (highest != -lowest).any():
        raise RanksDisagree(f"from {(-lowest).tolist()} to {highest.tolist()}, here {facts}")
    return facts


class LeadRank:
    """Rank 0: announces plans to the other ranks, and gives them what it samples."""

    def __init__(self, channel: RankChannel) -> None:
        self._channel = channel
        self._runner: RankRunner | None = None
        self._lost: DeviceLost | None = None
        self._sending = Lock()  # plans, samples and requests for pages come from several threads
        self._ended = False
        self._step = 0  # of the last plan that was computed

    def use(self, runner: RankRunner) -> None:
        """Compute by this runner, which samples through `share`."""
        self._runner = runner

    @property
    def runner(self) -> RankRunner:
        """The runner of this rank."""
        assert self._runner is not None, "the model is loaded"
        return self._runner

    def announce(self, plan: StepPlan) -> StepPlan:
        """Send a plan to all ranks, and check it with them  ->  the plan to run.

        Raises:
            StepRefused: This or another rank refuses the plan, which no rank computes.
            DeviceLost: A rank does not answer.
        """
        self._raise_lost()
        error: Exception | None = None
        try:
            # The sampling part stays here: what it changes are logits.
            self._send(RankMessage(plan=msgspec.structs.replace(plan, part=PLAIN)))
            try:
                plan = self.runner.check(plan)
                facts = StepFacts.of(plan)
            except Exception as raised:  # noqa: BLE001  # the cause of what is raised
                error, facts = raised, StepFacts.refused(plan, 0)
            agree(self._channel, facts)
        except StepRefused as refused:
            raise refused from error
        except Exception as lost:
            self._lost = DeviceLost(f"step {plan.step} was not agreed on")
            raise self._lost from lost
        return plan

    def run(self, plan: StepPlan, part: Callable[[], SamplingPart] | None = None) -> StepOutcome:
        """Compute an announced plan with the other ranks.

        Raises:
            DeviceLost: It failed: the other ranks are in the middle of it.
        """
        self._raise_lost()
        self._step = plan.step
        try:
            return self.runner.run(plan, part)
        except Exception as error:
            self._lost = DeviceLost(f"step {plan.step} failed on rank 0")
            raise self._lost from error

    def make_drafts(self) -> Ints:
        """Let all ranks make the drafts after the last plan.

        Raises:
            DeviceLost: It failed: the other ranks are in the middle of it.
        """
        self._raise_lost()
        try:
            self._send(RankMessage(drafts_after=self._step))
            return self.runner.make_drafts()
        except Exception as error:
            self._lost = DeviceLost(f"drafts after step {self._step} failed on rank 0")
            raise self._lost from error

    @property
    def shared(self) -> bool:
        return True  # it samples itself

    def share(self, step: int, sample: Callable[[], Sampled]) -> Sampled:
        """Sample from the logits of a plan, and send the tokens to the other ranks."""
        sampled = sample()
        tokens, blocked, failed = sampled
        self._send(RankMessage(step=step, sampled=tokens, blocked=blocked, failed=failed))
        return sampled

    def request_pages(self, request: PagesRequest) -> None:
        """Send a request for shards of pages to all other ranks, from any thread.

        Each of them begins with it once it has recorded what was sampled up to here.

        Raises:
            DeviceLost: The ranks have ended.
        """
        self._raise_lost()
        self._send(RankMessage(pages=request))

    def end(self) -> None:
        """End the other ranks after the launched plans."""
        self._send(RankMessage(), last=True)

    def _send(self, message: RankMessage, *, last: bool = False) -> None:
        packed = pack(message)
        with self._sending:
            if self._ended:
                raise DeviceLost("the ranks have ended")
            self._ended = last
            self._channel.send(packed)

    def _raise_lost(self) -> None:
        """Raise again what has ended the ranks: a later plan would wait for them for ever."""
        if self._lost is not None:
            raise DeviceLost(str(self._lost)) from self._lost


class FollowerRank:
    """Any other rank: computes what rank 0 announces, until it ends."""

    def __init__(self, channel: RankChannel) -> None:
        self._channel = channel
        # With the steps whose drafts rank 0 makes now, and on a device those that it has read.
        self._plans = SimpleQueue[
            StepPlan | PagesRequest | RankMessage | int | BaseException | None
        ]()
        self._sampled = SimpleQueue[RankMessage | BaseException]()

    def receive(self, runner: RankRunner) -> None:
        """Receive and check plans until the end. The body of a thread of its own."""
        try:
            while self._receive(runner):
                pass
        except BaseException as error:  # noqa: BLE001  # raised in the thread that computes
            self._plans.put(error)
            self._sampled.put(error)
        else:
            self._plans.put(None)
            # Rank 0 may have failed in a step, and ended before it has sampled.
            self._sampled.put(RanksDisagree("rank 0 has ended within a step"))

    def compute(
        self, runner: FollowerRunner, begin: Callable[[PagesRequest], None] | None = None
    ) -> None:
        """Compute the plans that all ranks have agreed on, until the end.

        `begin` begins what rank 0 requests of pages, and returns at once. Drafts after a plan are
        made before the next plan, or sooner if rank 0 does so; until then it may have other work.
        On a device, plans that ask for none are launched.
        """
        undrafted: int | None = None  # the step of the last plan
        flights = deque["Flight"]()
        while (plan := self._plans.get()) is not None:
            if isinstance(plan, BaseException):
                raise plan
            if isinstance(plan, RankMessage):
                if flights:  # else its plan was run, and has waited for what was sampled
                    flights.popleft().outcome()
                continue
            if isinstance(plan, PagesRequest):
                assert begin is not None, "pages are stored"
                runner.settle()
                begin(plan)
                continue
            step = plan if isinstance(plan, int) else None
            if undrafted is not None and step in (None, undrafted):
                runner.make_drafts()
                undrafted = None
            if isinstance(plan, int):
                continue
            if isinstance(runner, StreamRunner) and plan.draft_counts is None:
                # If that fails it raises here: rank 0 would wait for its device, and that for what
                # was not launched, and it would never send that the outcome may be read.
                flights.append(InStream(runner).launch(plan))
                continue
            runner.run(plan)
            undrafted = None if plan.draft_counts is None else plan.step

    @property
    def shared(self) -> bool:
        """Whether rank 0 has sampled from the logits of the next plan: `share` does not wait."""
        return not self._sampled.empty()

    def share(self, step: int, sample: Callable[[], Sampled]) -> Sampled:
        """Wait for what rank 0 samples from the logits of a plan."""
        message = self._sampled.get()
        if isinstance(message, BaseException):
            raise message
        assert message.step == step, "samples come in the order of plans"
        assert message.sampled is not None, "a message of samples"
        return Sampled(message.sampled, message.blocked, message.failed)

    def _receive(self, runner: RankRunner) -> bool:
        message = unpack(self._channel.receive(), RankMessage)
        if message.pages is not None:
            self._plans.put(message.pages)
            return True
        if message.drafts_after is not None:
            self._plans.put(message.drafts_after)
            return True
        if message.plan is None:
            if message.sampled is not None:
                self._sampled.put(message)
                if isinstance(runner, StreamRunner):
                    self._plans.put(message)
            return message.sampled is not None
        plan = message.plan
        try:
            plan = runner.check(plan)
            facts = StepFacts.of(plan)
        except Exception:
            # Not the end of this rank: the loop of rank 0 finds the request at fault.
            log.exception("plan refused", extra={"step": plan.step})
            facts = StepFacts.refused(plan, self._channel.rank)
        try:
            agree(self._channel, facts)
        except StepRefused:
            return True
        self._plans.put(plan)
        return True


class RankedLauncher:
    """Launches plans that all ranks have agreed on."""

    def __init__(self, inner: Launcher, lead: LeadRank) -> None:
        self._inner, self._lead = inner, lead

    @property
    def thread(self) -> Thread | None:
        return self._inner.thread

    @property
    def draft_failures(self) -> int:
        return self._inner.draft_failures

    def launch(self, plan: StepPlan) -> Flight:
        return self._inner.launch(self._lead.announce(plan))

    def wait(self) -> None:
        self._inner.wait()

    def close(self) -> None:
        self._inner.close()
