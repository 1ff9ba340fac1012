"""How much of the longest possible answers is kept free for those who run."""

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
    """The share of what each running request may still write that admission leaves free for it.

    Answers end early, so that all of it would leave most of the pool idle, and none of it would
    admit requests only to retract them. The share falls from step to step while all goes well, and
    jumps to what was seen to be needed when somebody had to be retracted. The numbers are SGLang's
    (0.5.23, `new_token_ratio`).
    """

    def __init__(self, conservativeness: float) -> None:
        self._start = min(_START * conservativeness, 1.0)
        self._least = _LEAST * self._start
        self.value = self._start

    def decay(self) -> None:
        """A step of decodes went well."""
        self.value = max(self._least, self.value - (self._start - self._least) / _DECAY_STEPS)

    def retracted(self, running: Collection[Request]) -> None:
        """Somebody was retracted, and these are left."""
        drawn = sum(request.outputs for request in running)
        longest = sum(request.tokens_max - request.prompt_tokens for request in running)
        self.value = min(1.0, (drawn + _GRACE_TOKENS * len(running)) / (longest + 1))

    def reset(self) -> None:
        """Nothing runs: what was learned is about requests that are gone."""
        self.value = self._start
