"""The share of the maximum output for which pages are reserved for running requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from antiphon.model_worker.batching.request import Request

_START = 0.7
_LEAST = 0.14  # of the start
_DECAY_STEPS = 600
_GRACE_TOKENS = 20


class NewTokenRatio:
    """The share of its remaining output tokens that admission reserves for each running request.

    Outputs end early: to reserve all of it would leave most of the pool idle, and to reserve none
    would admit requests only to retract them. The share decays from step to step, and jumps to what
    proved to be needed when a request had to be retracted. The numbers are SGLang's (0.5.23,
    `new_token_ratio`).
    """

    def __init__(self, conservativeness: float) -> None:
        self._start = min(_START * conservativeness, 1.0)
        self._least = _LEAST * self._start
        self.value = self._start

    def decay(self) -> None:
        """Lower the ratio after a decode step without a retraction."""
        self.value = max(self._least, self.value - (self._start - self._least) / _DECAY_STEPS)

    def retracted(self, running: Collection[Request]) -> None:
        """Raise the ratio after a retraction, by what the remaining requests have generated."""
        generated = sum(request.outputs for request in running)
        longest = sum(request.tokens_max - request.prompt_tokens for request in running)
        self.value = min(1.0, (generated + _GRACE_TOKENS * len(running)) / (longest + 1))

    def reset(self) -> None:
        """Forget what was learned, which is about requests that are gone."""
        self.value = self._start
