"""A worker without a model: it says the prompt's own tokens back, over the real routes.

What a request takes with it is what the services themselves take: the benchmark's zero. Run as a
process in the worker's place: `python -m antiphon.testing.echo_worker --config FILE ...`.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from antiphon.service.endpoint import Follow
from antiphon.service.main import run
from antiphon.service.model import served_name
from antiphon.service.service import Report
from antiphon.wire.base import FinishReason, Role
from antiphon.wire.codec import id_count, pack_ids, unpack_ids
from antiphon.wire.command import Admit, CommandBatch
from antiphon.wire.heartbeat import StreamSeq, WorkerLoad
from antiphon.wire.routes import COMMAND, TOKENS
from antiphon.wire.tokens import TokenBatch, TokenRow, TokenStream

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from antiphon.config.settings import Settings
    from antiphon.service.endpoint import Endpoint
    from antiphon.service.service import Runtime
    from antiphon.wire.base import Term
    from antiphon.wire.ids import InstanceId, ModelName

CONTEXT_TOKENS = 2048
RUNNING_MAX = 1024


class EchoWorker:
    """Answers each admit at once with one token a batch; knows no abort, for it is done by then."""

    role = Role.WORKER

    def __init__(self, settings: Settings) -> None:
        self._model = served_name(settings)
        self._seqs: dict[InstanceId, int] = {}
        self._steps = 0
        self._leader: Term | None = None
        self._commands_seq = 0

    @asynccontextmanager
    async def lifespan(self, runtime: Runtime) -> AsyncGenerator[None]:
        """Nothing to load."""
        self._runtime = runtime
        yield

    def endpoints(self) -> Sequence[Endpoint]:
        """Commands."""
        here = {"worker": self._runtime.process.instance}
        return (Follow(route=COMMAND, apply=self._on_commands, address=here),)

    def model(self) -> ModelName | None:
        """The model whose place it takes."""
        return self._model

    def report(self) -> Report:
        """Room without end."""
        worker = WorkerLoad(
            pages_free=1_000_000,
            pages_total=1_000_000,
            page_tokens=16,
            running_max=RUNNING_MAX,
            step=self._steps,
            step_age_s=0.0,
            context_tokens=CONTEXT_TOKENS,
            term=self._leader,
            commands_seq=self._commands_seq,
        )
        streams = tuple(StreamSeq(receiver=to, seq=seq) for to, seq in self._seqs.items())
        return Report(load=0, worker=worker, streams=streams)

    async def drain(self) -> None:
        """Nothing runs."""

    async def _on_commands(self, batch: CommandBatch) -> None:
        if batch.worker != self._runtime.process:
            return
        self._leader, self._commands_seq = batch.leader, batch.seq
        for command in batch.commands:
            if isinstance(command, Admit):
                await self._echo(command)

    async def _echo(self, admit: Admit) -> None:
        ids = unpack_ids(admit.prompt_ids)[: admit.sampling.max_new_tokens]
        stream = TokenStream(
            owner=admit.owner,
            prompt_tokens=id_count(admit.prompt_ids),
            continues=admit.continues,
            stop=admit.stop,
            deadline_unix_ms=admit.deadline_unix_ms,
            traceparent=admit.traceparent,
        )
        for offset, token_id in enumerate(ids):
            last = offset == len(ids) - 1
            row = TokenRow(
                request_id=admit.request_id,
                choice=0,
                attempt=admit.attempt,
                offset=offset,
                token_ids=pack_ids([token_id]),
                stream=stream if offset == 0 else None,
                finish_reason=FinishReason.LENGTH if last else None,
            )
            await self._send(admit.detokenizer, row)

    async def _send(self, detokenizer: InstanceId, row: TokenRow) -> None:
        self._steps += 1
        seq = self._seqs.get(detokenizer, 0) + 1
        self._seqs[detokenizer] = seq
        batch = TokenBatch(worker=self._runtime.process, seq=seq, step=self._steps, rows=(row,))
        await self._runtime.bus.publish(TOKENS, batch, detokenizer=detokenizer)


if __name__ == "__main__":
    run(Role.WORKER, EchoWorker)
