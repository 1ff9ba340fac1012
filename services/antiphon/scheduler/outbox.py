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
from antiphon.wire.command import Admit, ChoiceOutput, Command, CommandBatch
from antiphon.wire.submit import LostRequest, NoticeBatch
from antiphon.wire.tokens import TokenColumns, TokenStep

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.scheduler.request_table import RequestEntry
    from antiphon.service.clock import Clock
    from antiphon.wire.base import Attempt, Process, Term
    from antiphon.wire.errors import ErrorReply
    from antiphon.wire.ids import RequestId
    from antiphon.wire.sampling import SamplingParams


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


Action = CommandBatch | NoticeBatch | RequestBound | RequestRequeued | RequestRemoved


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
        self._lacking: dict[Process, tuple[RequestId, ...]] = {}
        self._actions: list[Action] = []

    def command(self, worker: Process, command: Command) -> None:
        self._commands.setdefault(worker, []).append(command)

    def notice(self, lost: FailedRequest) -> None:
        self._lost.setdefault(lost.owner, {})[lost.request_id] = lost

    def request_resubmission(self, gateway: Process, requests: Sequence[RequestId]) -> None:
        self._lacking[gateway] = tuple(requests[:RESUBMISSIONS_MAX])

    def add_action(self, action: Action) -> None:
        self._actions.append(action)

    def take_actions(self) -> list[Action]:
        actions = [*self._batches(), *self._notices(), *self._actions]
        self._commands, self._lost, self._lacking, self._actions = {}, {}, {}, []
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
                lacking=self._lacking.get(gateway, ()),
                not_after_unix_ms=self._not_after(),
            )
            for gateway in {**self._lost, **self._lacking}
        ]

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
        detokenizer=binding.detokenizer,
        prompt_ids=submit.prompt_ids,
        choices=tuple(ChoiceOutput(choice=index) for index in range(submit.choices)),
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
    )


def command_bytes(command: Command) -> int:
    """An upper bound."""
    if not isinstance(command, Admit):
        return ENVELOPE_BYTES
    return admit_bytes(command.prompt_ids, command.stop.texts, command.sampling)


def admit_bytes(prompt_ids: bytes, stop: tuple[str, ...], sampling: SamplingParams) -> int:
    """An upper bound."""
    texts = sum(4 + len(text.encode()) for text in stop)
    return ENVELOPE_BYTES + len(prompt_ids) + texts + len(msgspec.msgpack.encode(sampling))
