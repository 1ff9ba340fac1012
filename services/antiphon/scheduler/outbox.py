"""Outgoing messages of a leader: numbered command batches per worker, notices per gateway.

They leave as actions for the service. A lost action is repaired from state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from antiphon.scheduler.leader_config import GRACE_BEATS, LeaderConfig
from antiphon.service.sequence import SeqSender
from antiphon.wire.codec import split_rows
from antiphon.wire.command import Abort, Admit, ChoiceOutput, Command, CommandBatch, Rebind
from antiphon.wire.heartbeat import FetchRunningList
from antiphon.wire.media import MEDIUM_BYTES
from antiphon.wire.seal import SEALS_MAX, SealAttempts
from antiphon.wire.submit import FetchOpenList, LostRequest, NoticeBatch
from antiphon.wire.tokens import TokenColumns, TokenStep

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from antiphon.scheduler.request_table import RequestEntry, SealedOutput
    from antiphon.service.clock import Clock
    from antiphon.wire.base import Attempt, Process, Term
    from antiphon.wire.errors import ErrorReply
    from antiphon.wire.ids import InstanceId, RequestId
    from antiphon.wire.sampling import SamplingParams
    from antiphon.wire.seal import SealRequest


ENVELOPE_BYTES = 8 * 1024
"""More than an admit needs besides its prompt, stop strings and sampling parameters."""
RESUBMISSIONS_MAX = 1_000
"""How many requests a gateway is asked for at once; the others follow after its next list."""


@dataclass(frozen=True, slots=True)
class RequestBound:
    """A request was bound to a worker, which holds `cached_blocks` of its prompt's blocks."""

    request_id: RequestId
    attempt: Attempt
    worker: Process
    waited_s: float
    blocks: int = 0
    cached_blocks: int = 0


@dataclass(frozen=True, slots=True)
class RequestRequeued:
    request_id: RequestId
    worker: Process


@dataclass(frozen=True, slots=True)
class RequestRemoved:
    """It ended or failed."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class SealCall:
    """A call of a detokenizer. Its reply, if one arrives, goes to `SchedulerCore.on_sealed`."""

    detokenizer: InstanceId
    message: SealAttempts


Action = (
    CommandBatch
    | NoticeBatch
    | SealCall
    | FetchOpenList
    | FetchRunningList
    | RequestBound
    | RequestRequeued
    | RequestRemoved
)


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """A failed request, until its gateway no longer lists it."""

    request_id: RequestId
    owner: Process
    attempt: Attempt | None
    error: ErrorReply
    deadline_unix_ms: int


class CommandOutbox:
    """Collects the messages of one event, so that each worker gets one batch of them."""

    def __init__(self, term: Term, clock: Clock, rules: LeaderConfig) -> None:
        self._term = term
        self._clock = clock
        self._rules = rules
        self._seqs = SeqSender()
        self._commands: dict[Process, list[Command]] = {}
        self._lost: dict[Process, dict[RequestId, FailedRequest]] = {}
        self._lacking: dict[Process, dict[RequestId, None]] = {}
        self._seals: dict[InstanceId, list[SealRequest]] = {}
        self._owner_seals: dict[Process, list[SealRequest]] = {}
        self._actions: list[Action] = []

    def command(self, worker: Process, command: Command) -> None:
        self._commands.setdefault(worker, []).append(command)

    def notice(self, lost: FailedRequest) -> None:
        self._lost.setdefault(lost.owner, {})[lost.request_id] = lost

    def seal(self, detokenizer: InstanceId, request: SealRequest) -> None:
        self._seals.setdefault(detokenizer, []).append(request)

    def seal_by_owner(self, gateway: Process, request: SealRequest) -> None:
        self._owner_seals.setdefault(gateway, []).append(request)

    def request_resubmission(self, gateway: Process, requests: Sequence[RequestId]) -> None:
        self._lacking.setdefault(gateway, {}).update(dict.fromkeys(requests))

    def add_action(self, action: Action) -> None:
        self._actions.append(action)

    def take_actions(self) -> list[Action]:
        actions = [*self._batches(), *self._notices(), *self._seal_calls(), *self._actions]
        self._commands, self._lost, self._lacking, self._actions = {}, {}, {}, []
        self._seals, self._owner_seals = {}, {}
        return actions

    def forget(self, worker: Process) -> None:
        """Drop pending commands of a dead worker. Its sequence numbers continue if it returns."""
        self._commands.pop(worker, None)

    def _batches(self) -> list[CommandBatch]:
        return [
            CommandBatch(
                leader=self._term,
                worker=worker,
                seq=self._seqs.next(worker.instance),
                commands=tuple(part),
                not_after_unix_ms=self._not_after(),
            )
            for worker, commands in self._commands.items()
            for part in split_rows(commands, command_bytes, self._rules.payload_bytes_max)
        ]

    def _notices(self) -> list[NoticeBatch]:
        return [
            NoticeBatch(
                leader=self._term,
                gateway=gateway,
                requests=tuple(
                    LostRequest(request_id=one.request_id, attempt=one.attempt, error=one.error)
                    for one in self._lost.get(gateway, {}).values()
                ),
                lacking=tuple(self._lacking.get(gateway, ()))[:RESUBMISSIONS_MAX],
                seals=tuple(self._owner_seals.get(gateway, ())[:RESUBMISSIONS_MAX]),
                not_after_unix_ms=self._not_after(),
            )
            for gateway in {**self._lost, **self._lacking, **self._owner_seals}
        ]

    def _seal_calls(self) -> Iterator[SealCall]:
        for detokenizer, requests in self._seals.items():
            for start in range(0, len(requests), SEALS_MAX):
                part = tuple(requests[start : start + SEALS_MAX])
                yield SealCall(detokenizer, SealAttempts(leader=self._term, requests=part))

    def _not_after(self) -> int:
        # After this time the same message is sent again anyway.
        return self._clock.unix_ms() + round(self._rules.beats(GRACE_BEATS) * 1000)


def admit_command(entry: RequestEntry, now: float) -> Admit:
    binding, submit = entry.binding, entry.submit
    assert binding is not None
    assert submit is not None
    assert binding.detokenizer is not None
    return Admit(
        request_id=entry.request_id,
        owner=entry.owner,
        attempt=binding.attempt,
        continues=entry.sealed.attempts[-1] if entry.sealed else None,
        lineage=entry.sealed.attempts[:-1] if entry.sealed else (),
        owner_sealed=entry.sealed is not None and entry.sealed.detokenizer is None,
        detokenizer=binding.detokenizer.instance,
        detokenizer_incarnation=binding.detokenizer.incarnation,
        prompt_ids=submit.prompt_ids,
        prompt=submit.prompt,
        choices=_outputs(entry.sealed, submit.choices),
        sampling=submit.sampling,
        stop=submit.stop,
        priority=submit.priority,
        cache_salt=submit.cache_salt,
        waited_ms=round((now - entry.queued_at) * 1000),
        steps=TokenStep.__name__ in binding.reads,
        columns=TokenColumns.__name__ in binding.reads,
        tenant=submit.tenant,
        deadline_unix_ms=submit.deadline_unix_ms,
        traceparent=submit.traceparent,
        resume_ms=submit.resume_ms,
        media=submit.media,
    )


def rebind_command(entry: RequestEntry, continues: Attempt) -> Rebind:
    """`continues` is the attempt that its worker runs, which may have missed earlier rebinds."""
    binding, submit = entry.binding, entry.submit
    assert binding is not None
    assert binding.detokenizer is not None
    return Rebind(
        request_id=entry.request_id,
        attempt=binding.attempt,
        continues=continues,
        detokenizer=binding.detokenizer.instance,
        detokenizer_incarnation=binding.detokenizer.incarnation,
        columns=TokenColumns.__name__ in binding.reads,
        owner=entry.owner,
        deadline_unix_ms=None if submit is None else submit.deadline_unix_ms,
        # Another gateway has other claims.
        media=() if submit is None or submit.resume is None else submit.media,
    )


def _outputs(sealed: SealedOutput | None, choices: int) -> tuple[ChoiceOutput, ...]:
    if sealed is None:
        return tuple(ChoiceOutput(choice=index) for index in range(choices))
    return sealed.choices


def command_bytes(command: Command) -> int:
    """An upper bound."""
    if isinstance(command, Rebind):
        return ENVELOPE_BYTES + MEDIUM_BYTES * len(command.media)
    if isinstance(command, Abort):
        return ENVELOPE_BYTES
    outputs = sum(map(_output_bytes, command.choices))
    return outputs + admit_bytes(
        command.prompt_ids, command.stop.texts, command.sampling, media=len(command.media)
    )


def continuation_bytes(entry: RequestEntry) -> int:
    """Size of the admit that continues a sealed request: an upper bound."""
    submit, sealed = entry.submit, entry.sealed
    assert submit is not None
    outputs = sum(map(_output_bytes, () if sealed is None else sealed.choices))
    return outputs + admit_bytes(
        submit.prompt_ids, submit.stop.texts, submit.sampling, media=len(submit.media)
    )


def _output_bytes(choice: ChoiceOutput) -> int:
    return len(choice.output_ids) + (0 if choice.details is None else choice.details.size_bytes)


def admit_bytes(
    prompt_ids: bytes, stop: tuple[str, ...], sampling: SamplingParams, *, media: int = 0
) -> int:
    """An upper bound; `media` is their number."""
    texts = sum(4 + len(text.encode()) for text in stop) + MEDIUM_BYTES * media
    return ENVELOPE_BYTES + len(prompt_ids) + texts + len(msgspec.msgpack.encode(sampling))
