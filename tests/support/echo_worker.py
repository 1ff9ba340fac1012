"""A worker without a model: it sends the prompt's own tokens back, over the real routes.

A request's time with it is the time of the services alone: the baseline of benchmarks. Run it as a
process in place of the worker: `python -m tests.support.echo_worker --config FILE ...`, with the
time of a step as `STEP_S` in its environment.
"""

from __future__ import annotations

import asyncio
import math
import os
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from antiphon.model_card.served_model import served_name
from antiphon.service.endpoint import Endpoint, StreamEndpoint
from antiphon.service.main import run
from antiphon.service.service import Report, Runtime
from antiphon.wire.base import FinishReason, Role, Term
from antiphon.wire.codec import id_count, pack_ids, pack_numbers, unpack_ids
from antiphon.wire.command import Admit, CommandBatch
from antiphon.wire.heartbeat import StreamSeq, WorkerLoad
from antiphon.wire.routes import COMMAND, TOKENS
from antiphon.wire.token_outputs import TokenOutputs, pack_floats
from antiphon.wire.tokens import TokenBatch, TokenColumns, TokenRow, TokenStream

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from antiphon.wire.ids import InstanceId, ModelName

CONTEXT_TOKENS = 2048
RUNNING_MAX = 1024


@dataclass(frozen=True)
class Answer:
    """The tokens that a request gets, and how it finishes."""

    ids: Sequence[int]
    finish_reason: FinishReason


@dataclass
class _Echo:
    """A running request, and its tokens that are still to be sent."""

    number: int
    admit: Admit
    answer: Answer
    stream: TokenStream | None = field(init=False)
    offset: int = 0

    def __post_init__(self) -> None:
        self.stream = TokenStream(
            owner=self.admit.owner,
            prompt_tokens=id_count(self.admit.prompt_ids),
            details_from=None if self.admit.sampling.details is None else 0,
            continues=self.admit.continues,
            stop=self.admit.stop,
            deadline_unix_ms=self.admit.deadline_unix_ms,
            traceparent=self.admit.traceparent,
        )

    @property
    def ended(self) -> bool:
        return self.offset == len(self.answer.ids)

    @property
    def plain(self) -> bool:
        """Whether its next token may go into columns."""
        within = 0 < self.offset < len(self.answer.ids) - 1
        return within and self.admit.columns and self.admit.sampling.details is None

    def take(self) -> tuple[int, int, int]:
        """The next token, as columns have it."""
        self.offset += 1
        return self.number, self.offset - 1, self.answer.ids[self.offset - 1]

    def row(self) -> TokenRow:
        """The next token; the first row introduces the stream, the last one ends it."""
        offset, stream = self.offset, self.stream
        self.offset, self.stream = offset + 1, None
        return TokenRow(
            request_id=self.admit.request_id,
            choice=0,
            attempt=self.admit.attempt,
            offset=offset,
            token_ids=pack_ids([self.answer.ids[offset]]),
            details=self._details(self.answer.ids[offset]),
            stream=stream,
            finish_reason=self.answer.finish_reason if self.ended else None,
            stream_number=self.number,
        )

    def _details(self, token: int) -> TokenOutputs | None:
        """The logprobs of a token that is certain."""
        wanted = self.admit.sampling.details
        if wanted is None:
            return None
        others = max(0, wanted.top - 1)
        return TokenOutputs(
            count=1,
            token_ids=pack_ids([token]),
            logprobs=pack_floats([0.0]),
            top_ids=pack_ids([token, *[-1] * others][: wanted.top]),
            top_logprobs=pack_floats([0.0, *[-math.inf] * others][: wanted.top]),
        )


class EchoWorker:
    """Sends one token per admitted request and step; it ignores aborts.

    Args:
        step_s: Duration of a step; 0 sends everything at once.
        context_tokens: Maximum tokens of prompt and answer, as its heartbeats report it.
    """

    role = Role.WORKER

    def __init__(self, *, step_s: float = 0.0, context_tokens: int = CONTEXT_TOKENS) -> None:
        self._step_s = step_s
        self._context_tokens = context_tokens
        self._live: list[_Echo] = []
        self._seqs: dict[InstanceId, int] = {}
        self._steps = self._numbers = 0
        self._leader: Term | None = None
        self._commands_seq = 0

    @asynccontextmanager
    async def lifespan(self, runtime: Runtime) -> AsyncGenerator[Self]:
        self._runtime = runtime
        if self._step_s:
            runtime.group.create_task(self._pace(), name="pace")
        yield self

    def endpoints(self) -> Sequence[Endpoint]:
        here = {"worker": self._runtime.process.instance}
        return (StreamEndpoint(route=COMMAND, apply=self._on_commands, address=here),)

    def model(self) -> ModelName | None:
        return served_name(self._runtime.settings)

    def report(self) -> Report:
        """Report practically unlimited capacity."""
        worker = WorkerLoad(
            pages_free=1_000_000,
            pages_total=1_000_000,
            page_tokens=16,
            running_max=RUNNING_MAX,
            step=self._steps,
            step_age_s=0.0,
            context_tokens=self._context_tokens,
            term=self._leader,
            commands_seq=self._commands_seq,
        )
        streams = tuple(StreamSeq(receiver=to, seq=seq) for to, seq in self._seqs.items())
        return Report(load=0, worker=worker, streams=streams)

    async def drain(self) -> None:
        """Nothing runs."""

    def answer(self, admit: Admit) -> Answer:
        """Choose the tokens of an answer: here the prompt's own, up to the limit."""
        ids = unpack_ids(admit.prompt_ids)[: max(1, admit.sampling.max_new_tokens)]
        return Answer(ids, FinishReason.LENGTH)

    def _on_commands(self, batch: CommandBatch) -> None:
        if batch.worker != self._runtime.process:
            return
        self._leader, self._commands_seq = batch.leader, batch.seq
        for command in batch.commands:
            if isinstance(command, Admit):
                self._numbers += 1
                self._live.append(_Echo(self._numbers, command, self.answer(command)))
        while self._live and not self._step_s:
            self._step()

    async def _pace(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + self._step_s, loop.time())
            await asyncio.sleep(due - loop.time())
            if self._live:
                self._step()

    def _step(self) -> None:
        """Send one token of each request, in one batch per detokenizer."""
        self._steps += 1
        live: dict[InstanceId, list[_Echo]] = {}
        for echo in self._live:
            live.setdefault(echo.admit.detokenizer, []).append(echo)
        for detokenizer, echoes in live.items():
            plain = [echo for echo in echoes if echo.plain]
            others = [echo for echo in echoes if not echo.plain]
            seq = self._seqs[detokenizer] = self._seqs.get(detokenizer, 0) + 1
            batch = TokenBatch(
                worker=self._runtime.process,
                seq=seq,
                step=self._steps,
                rows=tuple(echo.row() for echo in others),
                columns=_columns([echo.take() for echo in plain]) if plain else None,
            )
            self._runtime.bus.publish(TOKENS, batch, detokenizer=detokenizer)
        self._live = [echo for echo in self._live if not echo.ended]


def _columns(tokens: Sequence[tuple[int, int, int]]) -> TokenColumns:
    streams, offsets, ids = zip(*tokens, strict=True)
    return TokenColumns(
        streams=pack_numbers(streams), offsets=pack_ids(offsets), token_ids=pack_ids(ids)
    )


if __name__ == "__main__":
    run(EchoWorker(step_s=float(os.environ["STEP_S"])))  # noqa: TID251 no service reads it
