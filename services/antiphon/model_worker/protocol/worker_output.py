"""The held requests and their output messages: the bus side of the worker, a pure state machine.

Events go in with the time at which they happen; `RunChoice` and `DropChoice` for the batching loop
come out, and from `take` the messages for the detokenizers. There is no replay buffer: everything
is sent from each choice's own outputs, and sent again as often as it is requested.
"""

from __future__ import annotations

import logging
from itertools import count
from typing import TYPE_CHECKING

import msgspec

from antiphon.model_worker.batching.state import ChoiceKey, Finish, Progress, RequestState
from antiphon.model_worker.protocol.commands import AttemptTombstones, CommandFilter
from antiphon.model_worker.protocol.held_request import HeldChoice, HeldRequest
from antiphon.model_worker.protocol.outbox import PlainStreams, TokenOutbox
from antiphon.service.followed_lists import OpenLists, PublishedList, running_content
from antiphon.wire.base import Attempt
from antiphon.wire.claim import Claim
from antiphon.wire.command import Abort, Admit, CommandBatch, Rebind, ResendTokens, StopChoice
from antiphon.wire.errors import EngineError, Internal, InvalidRequest, WorkerLost, decode_error
from antiphon.wire.heartbeat import RunningList, RunningListState
from antiphon.wire.ids import RequestId
from antiphon.wire.submit import FetchOpenList

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable

    from antiphon.model_worker.batching.state import AnyProgress, SampledTokens
    from antiphon.service.followed_lists import ListUpdate
    from antiphon.service.sequence import SeqSender
    from antiphon.wire.base import Process, Term
    from antiphon.wire.heartbeat import FetchRunningList, RunningRequest
    from antiphon.wire.ids import InstanceId
    from antiphon.wire.submit import OpenList, OpenListState
    from antiphon.wire.tokens import TokenBatch

log = logging.getLogger(__name__)

FREED_AFTER_MS = 2_000
"""Time past its deadline after which a request is freed: its owner has ended it by then."""
FORGOTTEN_AFTER_MS = 10_000
"""Time past its deadline after which no process can request a request's ids any more."""
TOMBSTONE_MS = 10_000
"""Far longer than an admit can be in flight: a command carries the time until which it is valid."""
OPEN_GRACE_MS = 1_000
"""Two periods of the open list: a younger request may be missing because the list is older."""


class RunChoice(msgspec.Struct, frozen=True):
    key: ChoiceKey
    state: RequestState
    traceparent: str | None
    choice: HeldChoice


class DropChoice(msgspec.Struct, frozen=True, gc=False):
    """Drop a choice from the batching loop.

    `kept` is the number of output ids in the response, where more were sampled and it is known:
    only these are inserted into the prefix cache.
    """

    key: ChoiceKey
    kept: int | None = None


class FetchPrompt(msgspec.Struct, frozen=True):
    """Fetch the prompt of an attempt from its owner, until `due_ms` by our clock."""

    request_id: RequestId
    attempt: Attempt
    claim: Claim
    due_ms: int


class DropPrompt(msgspec.Struct, frozen=True):
    """The prompt of an attempt is not needed any more."""

    request_id: RequestId
    attempt: Attempt


Action = RunChoice | DropChoice | FetchPrompt | DropPrompt | FetchOpenList


class WorkerOutput:
    """All requests that this worker has accepted and not forgotten.

    `list_part_max` of them go into a message of the running list. `our_time_ms` converts a time of
    another process to our clock; `leading` is the leader's term by the heartbeats of schedulers.
    """

    def __init__(
        self,
        process: Process,
        seqs: SeqSender,
        *,
        live_max: int,
        list_part_max: int = 4096,
        our_time_ms: Callable[[int, Process], int] = lambda unix_ms, _: unix_ms,
        leading: Callable[[], Term | None] = lambda: None,
    ) -> None:
        self.process = process
        self.live_max = live_max  # choices in the batching loop
        self.commands = CommandFilter(leading)
        self.draining = False  # a new request is requeued at once
        self.overrun_tokens = 0  # sampled beyond a stop string, and discarded
        self.requeued_count = 0
        self._our_time_ms = our_time_ms
        self._plain = PlainStreams(live_max)
        self._outbox = TokenOutbox(process, seqs, self._plain, self._fail_request)
        self._held: dict[RequestId, HeldRequest] = {}
        self._choices: dict[ChoiceKey, tuple[HeldRequest, HeldChoice]] = {}  # live ones
        self._tombstones = AttemptTombstones(TOMBSTONE_MS)
        # Whose prompts are being fetched; it may go on as a later attempt meanwhile.
        self._fetching: dict[RequestId, tuple[Admit, HeldRequest]] = {}
        self._lists = OpenLists()
        self._running = PublishedList(running_content, list_part_max)
        self._keys = count(1)
        self._actions: list[Action] = []  # that the loop was not given yet

    @property
    def live_count(self) -> int:
        return len(self._choices)

    @property
    def fetching_count(self) -> int:
        """Live choices whose prompts are being fetched."""
        choices = (choice for _, held in self._fetching.values() for choice in held.choices)
        return sum(choice.live for choice in choices)

    @property
    def held_count(self) -> int:
        return len(self._held)

    @property
    def has_unsent(self) -> bool:
        return self._outbox.filled

    def find(self, request_id: RequestId) -> HeldRequest | None:
        return self._held.get(request_id)

    def held(self) -> tuple[RunningRequest, ...]:
        self._plain.write_lengths()
        return tuple(held.line(exact=True) for held in self._held.values())

    def list_changes(self) -> tuple[RunningListState, tuple[RunningList, ...]]:
        """What the running list is by now, and the messages that lead to it from the last call."""
        self._plain.write_lengths()
        for held in self._held.values():
            self._running.put(held.line(exact=False))
        for request_id in self._running.lines.keys() - self._held.keys():
            self._running.remove(request_id)
        changes = tuple(self._list(update) for update in self._running.changes())
        state = RunningListState(
            version=self._running.version,
            count=len(self._running.lines),
            digest=self._running.digest,
            live=sum(not line.ended for line in self._running.lines.values()),
        )
        return state, changes

    def list_requested(self, message: FetchRunningList, now_ms: int) -> list[RunningList]:
        """The whole list as of the last call, in parts. The next heartbeat completes it."""
        if message.worker != self.process:
            return []
        return [self._list(update) for update in self._running.parts(now_ms / 1000)]

    def _list(self, update: ListUpdate[RunningRequest]) -> RunningList:
        return RunningList(
            worker=self.process,
            version=update.version,
            whole=update.whole,
            opened=update.opened,
            closed=update.closed,
            parts=update.parts,
        )

    def command(self, batch: CommandBatch, now_ms: int, offset_ms: int | None = 0) -> list[Action]:
        """Apply a leader's commands, unless they are refused; see `CommandFilter.accepts`."""
        # Another worker's are those for a previous process of this one.
        if batch.worker != self.process or not self.commands.accepts(batch, now_ms, offset_ms):
            return []
        for command in batch.commands:
            try:
                if isinstance(command, Admit):
                    self._admit(command, now_ms)
                elif isinstance(command, Rebind):
                    self._rebind(command, now_ms)
                else:
                    self._abort(command)
            except Exception:
                log.exception("command failed", extra={"request_id": command.request_id})
                self._fail_request(command.request_id)
        return self.take_actions()

    def stop(self, message: StopChoice) -> list[Action]:
        """End a choice, or all of a request, for its detokenizer; ignore other detokenizers."""
        held = self._held.get(message.request_id)
        if (
            held is None
            or held.attempt != message.attempt
            or held.detokenizer != message.detokenizer.instance
        ):
            return []
        if message.choice is None:
            self._stop(held, held.choices)
        else:
            chosen = [choice for choice in held.choices if choice.index == message.choice]
            self._stop(held, chosen, message.offset)
        return self.take_actions()

    def resend(self, message: ResendTokens) -> list[Action]:
        """Send a detokenizer all of its requests again, from the offsets that it expects."""
        if message.worker != self.process:
            return []
        offsets: dict[RequestId, dict[int, int]] = {}
        for place in message.places:
            offsets.setdefault(place.request_id, {})[place.choice] = place.offset
        self._outbox.drop_columns(message.detokenizer.instance)
        for held in self._held.values():
            if held.detokenizer == message.detokenizer.instance:
                for choice in held.choices:
                    self._plain.close(choice)
                expected = offsets.get(held.request_id, {})
                held.rewind(expected)
                if not held.can_rewind(expected):
                    self._lose(held)
                self._outbox.put(held)
        return self.take_actions()

    def open_list(self, message: OpenList | OpenListState, now_ms: int) -> list[Action]:
        """Forget requests that their owner has closed, or does not list.

        One that can be resumed may have been adopted: a rebind to its new owner is under way then,
        and else the leader aborts it.
        """
        if self._our_time_ms(message.not_after_unix_ms, message.owner) < now_ms:
            return []
        if (change := self._lists.apply(message, now_ms / 1000)) is None:
            return []
        if change.torn:
            self._actions.append(FetchOpenList(gateway=message.owner))
        gone = set(change.closed)
        if change.lines is not None:
            gone |= self._unlisted(message.owner, change.lines, now_ms)
            self._repeat_ends(message.owner, change.lines)
        for request_id in gone:
            held = self._held.get(request_id)
            if held is None or held.owner != message.owner:
                continue
            if not held.resume_ms:
                self._forget(held)
            elif held.unowned_ms is None:
                held.unowned_ms = now_ms
        return self.take_actions()

    def owner_died(self, owner: Process, now_ms: int) -> list[Action]:
        """Forget the requests of a dead gateway, and later those that another one may adopt."""
        self._lists.forget(owner)
        for held in [held for held in self._held.values() if held.owner == owner]:
            held.unowned_ms = now_ms
            if not held.resume_ms:
                self._forget(held)
        return self.take_actions()

    def step(self, step: int, progress: Iterable[AnyProgress], *, link_up: bool = True) -> bool:
        """Take in what a step did; return whether a choice has ended.

        Choices that were dropped meanwhile are skipped. While the link is down no stream is plain:
        what is unsent is noted choice by choice.
        """
        self._outbox.step = max(self._outbox.step, step)
        if not link_up:
            self._plain.close_all()
        ended = False
        for news in progress:
            if isinstance(news, Progress):
                ended |= self._extend(news)
            else:
                self._add_sampled(news)
        return ended

    def _extend(self, news: Progress) -> bool:
        """Add the progress of a choice; return whether it has ended."""
        if (known := self._choices.get(news.key)) is None:
            return False
        held, choice = known
        held.cached_tokens = max(held.cached_tokens, news.cached_tokens)
        self._plain.close(choice)
        try:
            choice.extend(news)
        except Exception:
            log.exception("progress failed", extra={"request_id": held.request_id})
            self._fail(held, choice)
            return True
        self._outbox.put(held)
        if choice.live:
            return False
        del self._choices[news.key]
        return True

    def _add_sampled(self, sampled: SampledTokens) -> None:
        """Add a token to each of these choices; those of plain streams go into columns."""
        columns, others = self._plain.take(sampled)
        self._outbox.put_columns(columns)
        if others is None:
            return
        for key, offset in zip(others.keys.tolist(), others.offsets.tolist(), strict=True):
            if (known := self._choices.get(key)) is not None:
                held, choice = known
                choice.length = offset + 1
                self._outbox.put(held)

    def fail_step(self, progress: Iterable[AnyProgress]) -> None:
        """End all requests of a step that could not be taken in."""
        for news in progress:
            for key in [news.key] if isinstance(news, Progress) else news.keys.tolist():
                if (known := self._choices.get(key)) is not None:
                    self._fail(*known)

    @property
    def has_actions(self) -> bool:
        """Whether `take_actions` would return anything."""
        return bool(self._actions)

    def take_actions(self) -> list[Action]:
        """What the loop has to do: also for choices whose progress could not be added or sent."""
        self._drop_prompts()
        actions, self._actions = self._actions, []
        return actions

    def _drop_prompts(self) -> None:
        """Fetch no prompts of requests that have ended, for whatever reason."""
        for request_id, (admit, held) in list(self._fetching.items()):
            if self._held.get(request_id) is not held or not held.live:
                del self._fetching[request_id]
                self._actions.append(DropPrompt(request_id, admit.attempt))

    def _fail_request(self, request_id: RequestId) -> None:
        """End each choice whose end was not sent, whether or not the loop still runs it."""
        if (held := self._held.get(request_id)) is not None:
            for choice in held.choices:
                if choice.end_unsent:
                    self._fail(held, choice)

    def _fail(self, held: HeldRequest, choice: HeldChoice) -> None:
        self._plain.close(choice)
        choice.fail(Finish.failed(Internal("internal error")))
        self._outbox.put(held)
        if self._choices.pop(choice.key, None) is not None:
            self._actions.append(DropChoice(choice.key))

    def started(self, keys: Iterable[ChoiceKey]) -> None:
        """Note that the batching loop has started these choices: they are not requeued any more."""
        for key in keys:
            if key in self._choices:
                self._choices[key][0].started = True

    def unstarted(
        self, admitted_ms: int, tokens_max: int | None = None
    ) -> list[tuple[ChoiceKey, ...]]:
        """The choices of each request that is not started, and was admitted by then; oldest first.

        The loop decides whether they are requeued, since it may have started them meanwhile. With
        `tokens_max` only requests of at most that length, output included.
        """
        return [
            tuple(choice.key for choice in held.choices)
            for held in self._held.values()
            if held.live and not held.started and held.admitted_ms <= admitted_ms
            if held.request_id not in self._fetching
            if tokens_max is None or held.tokens_max <= tokens_max
        ]

    def prompt_fetched(self, fetch: FetchPrompt, prompt_ids: bytes) -> list[Action]:
        """Run a request whose prompt has come, unless it has ended meanwhile."""
        if (admit := self._take_fetching(fetch)) is not None:
            held = self._held[fetch.request_id]
            self._actions += _runs(admit, held, prompt_ids)
        return self.take_actions()

    def prompt_failed(self, fetch: FetchPrompt, error: EngineError) -> list[Action]:
        """End a request whose prompt cannot be had."""
        if self._take_fetching(fetch) is not None:
            for choice in self._held[fetch.request_id].choices:
                if choice.live:
                    self.refuse(choice.key, error)
        return self.take_actions()

    def _take_fetching(self, fetch: FetchPrompt) -> Admit | None:
        self._drop_prompts()
        admit, _ = self._fetching.get(fetch.request_id, (None, None))
        if admit is None or admit.attempt != fetch.attempt:
            return None
        del self._fetching[fetch.request_id]
        return admit

    def requeued(self, keys: Iterable[ChoiceKey]) -> list[Action]:
        for key in keys:
            if key in self._choices:
                held, _ = self._choices[key]
                try:
                    self._requeue(held)
                except Exception:
                    # The loop has dropped it: without an end or a requeue it would hang.
                    log.exception("requeue failed", extra={"request_id": held.request_id})
                    held.requeued = False
                    self._fail_request(held.request_id)
        return self.take_actions()

    def refuse(self, key: ChoiceKey, error: EngineError) -> None:
        self.step(self._outbox.step, [Progress(key=key, finish=Finish.failed(error))])

    def tick(self, now_ms: int) -> list[Action]:
        """Free, and later forget, requests past their deadline; called several times a second."""
        self.commands.tick(now_ms)
        for held in list(self._held.values()):
            unowned = held.unowned_ms
            if now_ms >= held.due_ms + FORGOTTEN_AFTER_MS or (
                unowned is not None and now_ms >= unowned + held.resume_ms
            ):
                self._forget(held)
            elif now_ms >= held.due_ms + FREED_AFTER_MS:
                self._stop(held, [choice for choice in held.choices if choice.live])
        self._tombstones.expire(now_ms)
        self._lists.forget_silent((now_ms - FORGOTTEN_AFTER_MS) / 1000)
        return self.take_actions()

    def take(self) -> list[tuple[InstanceId, TokenBatch]]:
        """All unsent tokens, as numbered messages, ready to be published in this order."""
        return self._outbox.take()

    def _admit(self, admit: Admit, now_ms: int) -> None:
        due_ms = self._our_time_ms(admit.deadline_unix_ms, admit.owner)
        if now_ms >= due_ms + FREED_AFTER_MS:
            return
        if self._tombstones.covers(admit.request_id, admit.attempt):
            return
        known = self._held.get(admit.request_id)
        if known is not None and admit.attempt <= known.attempt:
            return
        keys = [ChoiceKey(next(self._keys)) for _ in admit.choices]
        held = HeldRequest(admit, keys, now_ms, due_ms)
        if known is not None:
            self._stop(known, known.choices)
            self._drop_prompts()
        self._held[held.request_id] = held
        for choice in held.choices:
            if choice.live:
                self._choices[choice.key] = (held, choice)
        if len(held.choices) > self.live_max:
            error = InvalidRequest(f"n must be at most {self.live_max}", param="n")
            for choice in held.choices:
                self.refuse(choice.key, error)
        elif self.draining or self.live_count > self.live_max:
            self._requeue(held)
        elif not held.live:  # it has ended before, so that no step follows
            self._outbox.put(held)
        elif admit.prompt is None:
            self._actions += _runs(admit, held, admit.prompt_ids)
        else:
            self._fetching[held.request_id] = (admit, held)
            fetch = FetchPrompt(held.request_id, admit.attempt, admit.prompt.claim, due_ms)
            self._actions.append(fetch)

    def _rebind(self, message: Rebind, now_ms: int) -> None:
        held = self._held.get(message.request_id)
        if held is None or held.attempt != message.continues:
            return
        for choice in held.choices:
            self._plain.close(choice)
        kept = message.detokenizer_incarnation == held.detokenizer_incarnation
        held.rebind(message, now_ms)
        if held.lacks_details and not kept:
            self._lose(held)
        self._outbox.put(held)

    def _lose(self, held: HeldRequest) -> None:
        """End a request of which only a detokenizer has had some token outputs."""
        error = WorkerLost(
            "the detokenizer that had the logprobs or hidden states of the request is lost; they "
            "are too large to be kept twice"
        )
        for choice in held.choices:
            self._plain.close(choice)
            choice.lose(Finish.failed(error))
            if self._choices.pop(choice.key, None) is not None:
                self._actions.append(DropChoice(choice.key))
        self._outbox.put(held)

    def _requeue(self, held: HeldRequest) -> None:
        """Requeue a request for another attempt. Heartbeats list it until the leader aborts it."""
        assert not held.started, "a request that was started cannot be requeued"
        held.requeued = True
        self.requeued_count += 1
        self._stop(held, held.choices)

    def _abort(self, abort: Abort) -> None:
        if (held := self._held.get(abort.request_id)) is None:
            self._tombstones.add(abort.request_id, abort.attempt)  # the admit may still arrive
            return
        if abort.attempt < held.attempt:
            return
        if abort.error is None:
            self._tombstones.add(abort.request_id, abort.attempt)
            self._forget(held)
            return
        error = decode_error(abort.error)
        for choice in held.choices:
            if choice.live:
                self._actions.append(DropChoice(choice.key))
                self.refuse(choice.key, error)

    def _unlisted(
        self, owner: Process, listed: Container[RequestId], now_ms: int
    ) -> set[RequestId]:
        return {
            held.request_id
            for held in self._held.values()
            if held.owner == owner
            and held.request_id not in listed
            and now_ms - held.admitted_ms >= OPEN_GRACE_MS
        }

    def _repeat_ends(self, owner: Process, listed: Container[RequestId]) -> None:
        """Send the finish of a request again, if its owner still waits two lists later.

        A running request recovers by itself, since its next row shows that one before it is lost.
        Nothing follows the last row: should that one be lost, or the detokenizer's request for it,
        only this repeats it.
        """
        for held in self._held.values():
            if held.request_id not in listed or held.owner != owner:
                continue
            held.unowned_ms = None
            if held.live:
                continue
            if held.listed_after_end:
                held.repeat_end()
                self._outbox.put(held)
            held.listed_after_end = True

    def _stop(
        self, held: HeldRequest, choices: Iterable[HeldChoice], offset: int | None = None
    ) -> None:
        kept = None if offset is None else max(0, offset)
        for choice in choices:
            self._plain.close(choice)
            if self._choices.pop(choice.key, None) is not None:
                self._actions.append(DropChoice(choice.key, kept))
            try:
                self.overrun_tokens += choice.stop(offset)
            except Exception:
                # The loop has to drop it, and the other choices, all the same.
                log.exception("stop failed", extra={"request_id": held.request_id})
                choice.silence()

    def _forget(self, held: HeldRequest) -> None:
        self._stop(held, held.choices)
        del self._held[held.request_id]
        self._outbox.remove(held)
        self._tombstones.add(held.request_id, held.attempt)


def _runs(admit: Admit, held: HeldRequest, prompt_ids: bytes) -> list[Action]:
    return [
        RunChoice(
            choice.key,
            RequestState(
                request_id=admit.request_id,
                choice=output.choice,
                prompt_ids=prompt_ids,
                output_ids=output.output_ids,
                sampling=admit.sampling,
                priority=admit.priority,
                cache_salt=admit.cache_salt,
                tenant=admit.tenant,
                waited_ms=admit.waited_ms,
                deadline_unix_ms=held.due_ms,
                media=admit.media,
            ),
            admit.traceparent,
            choice,
        )
        for choice, output in zip(held.choices, admit.choices, strict=True)
        if choice.live
    ]
