"""Asks Antiphon over NATS, with the client that Python programs use."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

from tests.bench.serving.client import Piece, Timeline

from antiphon.wire.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.client import Client


class NatsTarget:
    """The gateways behind a broker. Outputs have the requested length; prompts are not counted."""

    def __init__(self, client: Client, model: str) -> None:
        self._client = client
        self._model = model

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.__aexit__(*error)

    async def ask(self, said: Sequence[str], output_tokens: int, due_s: float) -> Timeline:
        pieces: list[Piece] = []
        error: str | None = None
        sent_s = time.perf_counter()
        answer = self._client.generate(
            self._model, _turns(said), max_tokens=output_tokens, temperature=0.0, ignore_eos=True
        )
        try:
            async for piece in answer:
                pieces.append(Piece(time.perf_counter(), piece.text))  # noqa: PERF401 kept on error
        except EngineError as refused:
            error = f"{refused.code}: {refused.message}"
        return Timeline(
            due_s=due_s,
            sent_s=sent_s,
            ended_s=time.perf_counter(),
            pieces=tuple(pieces),
            output_tokens=output_tokens,
            error=error,
        )


class WholeNatsTarget(NatsTarget):
    """Asks for whole answers: no times within one, but all that the server counts."""

    async def ask(self, said: Sequence[str], output_tokens: int, due_s: float) -> Timeline:
        sent_s = time.perf_counter()
        try:
            answer = await self._client.complete(
                self._model,
                _turns(said),
                max_tokens=output_tokens,
                temperature=0.0,
                ignore_eos=True,
            )
        except EngineError as refused:
            error = f"{refused.code}: {refused.message}"
            ended_s = time.perf_counter()
            return Timeline(due_s=due_s, sent_s=sent_s, ended_s=ended_s, error=error)
        ended_s = time.perf_counter()
        return Timeline(
            due_s=due_s,
            sent_s=sent_s,
            ended_s=ended_s,
            pieces=(Piece(ended_s, answer.text),),
            prompt_tokens=answer.usage.prompt_tokens,
            output_tokens=answer.usage.completion_tokens,
            cached_tokens=answer.usage.cached_tokens,
        )


def _turns(said: Sequence[str]) -> list[tuple[str, str]]:
    return [("assistant" if n % 2 else "user", text) for n, text in enumerate(said)]
