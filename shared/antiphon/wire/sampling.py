"""How tokens are chosen and when a choice ends: the part of a request that the worker reads."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from antiphon.wire.base import Value

Temperature = Annotated[float, Meta(ge=0.0, le=100.0)]
TopP = Annotated[float, Meta(gt=0.0, le=1.0)]
MinP = Annotated[float, Meta(ge=0.0, le=1.0)]
TokensMax = Annotated[int, Meta(ge=0)]
StopString = Annotated[str, Meta(min_length=1, max_length=4096)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]

TEMPERATURE_MIN = 1e-6
"""Below this a temperature means greedy: the division would only make infinities."""


class SamplingParams(Value):
    """What one choice's next token is drawn from, and what ends the choice.

    `top_k` 0 keeps the whole vocabulary. `stop_token_ids` joins the model's own end tokens, which
    `ignore_eos` switches off. `seed` is always set by the owner, so that a later attempt draws the
    same numbers.
    """

    max_new_tokens: TokensMax
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: Annotated[int, Meta(ge=0)] = 0
    min_p: MinP = 0.0
    seed: Seed = 0
    stop_token_ids: tuple[Annotated[int, Meta(ge=0)], ...] = ()
    ignore_eos: bool = False

    @property
    def greedy(self) -> bool:
        """Whether the highest logit is taken, so that neither seed nor filters matter."""
        return self.temperature < TEMPERATURE_MIN or self.top_k == 1


class StopStrings(Value):
    """Where the detokenizer ends a choice, and how it writes tokens as text."""

    strings: Annotated[tuple[StopString, ...], Meta(max_length=32)] = ()
    include: bool = False
    """Whether the matched string stays in the text (`no_stop_trim`)."""
    skip_special_tokens: bool = True
