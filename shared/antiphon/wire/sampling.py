"""How tokens are chosen and when a choice ends: the part of a request that the worker reads."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from antiphon.wire.base import Value
from antiphon.wire.bounds import INT64_MAX, Count, Positive
from antiphon.wire.grammar import Grammar
from antiphon.wire.processors import LogitProcessors, TokenId
from antiphon.wire.thinking import ThinkingMarks

Temperature = Annotated[float, Meta(ge=0.0, le=100.0)]
TopP = Annotated[float, Meta(gt=0.0, le=1.0)]
MinP = Annotated[float, Meta(ge=0.0, le=1.0)]
TokensMax = Annotated[int, Meta(ge=0, le=INT64_MAX)]
StopString = Annotated[str, Meta(min_length=1, max_length=4096)]
StopPattern = Annotated[str, Meta(min_length=1, max_length=256)]
STOPS_MAX = 32
"""Most stop strings of a request, and most patterns."""
StopStringList = Annotated[tuple[StopString, ...], Meta(max_length=STOPS_MAX)]
StopPatternList = Annotated[tuple[StopPattern, ...], Meta(max_length=STOPS_MAX)]
Priority = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
AdditivePenalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
RepetitionPenalty = Annotated[float, Meta(ge=1e-3, le=2.0)]
TokenIds = Annotated[tuple[TokenId, ...], Meta(max_length=1024)]

BIASES_MAX = 1024
"""Most entries of a logit bias."""
BIAS_MAX = 1e4
"""Largest value of one, either way: far beyond every logit, and far from what overflows."""
TOP_MAX = 128
"""Most of the likeliest tokens that are told beside each token; the OpenAI API allows 20."""
NAMED_MAX = 128
"""Most ids whose log-probabilities a request may name."""
TopLogprobs = Annotated[int, Meta(ge=0, le=TOP_MAX)]
NamedIds = Annotated[tuple[TokenId, ...], Meta(max_length=NAMED_MAX)]
PromptStart = Annotated[int, Meta(ge=-1, le=INT64_MAX)]
Dimensions = Positive

TEMPERATURE_MIN = 1e-6
"""Below this a temperature means greedy: the division would only make infinities."""


class LogitBias(Value):
    """Numbers added to the logits of single tokens: the i-th value to the i-th id, each id once.

    Both are little-endian, int32 and float32 from -BIAS_MAX to BIAS_MAX.
    """

    token_ids: Annotated[bytes, Meta(max_length=4 * BIASES_MAX)]
    values: Annotated[bytes, Meta(max_length=4 * BIASES_MAX)]


class TokenOutputParams(Value):
    """What is told of each token beside its text.

    Attributes:
        ids: The token itself; told wherever anything is.
        logprobs: The log-probability of each token, after penalties and temperature.
        top: How many of the likeliest tokens are told beside it.
        named_ids: Tokens whose log-probabilities are told beside it, likely or not.
        hidden: The hidden state that each token followed from; only if the server allows it.
        prompt_start: From which prompt token on the prompt is told of, too; -1: it is not. The
            log-probabilities of a prompt are of the plain softmax. Its first token follows nothing,
            so nothing is told of it.

    A request of no new tokens is told of what would come next: one token more, with the id -1.
    """

    ids: bool = False
    logprobs: bool = False
    top: TopLogprobs = 0
    named_ids: NamedIds = ()
    hidden: bool = False
    prompt_start: PromptStart = -1

    def prompt_entries(self, prompt_tokens: int) -> int:
        """How many tokens of such a prompt are told of."""
        return 0 if self.prompt_start < 0 else max(0, prompt_tokens - max(1, self.prompt_start))


class PoolParams(Value):
    """The prompt becomes one vector, and nothing is drawn after it.

    Attributes:
        dimensions: The vector is its first so many numbers, of length 1 where the whole one is;
            None: all of it.
        second_from: Where the second text of a pair begins, in tokens, for models that tell the
            two apart.
    """

    dimensions: Dimensions | None = None
    second_from: Positive | None = None


class SamplingParams(Value):
    """What one choice's next token is drawn from, what ends the choice, and what is told of it.

    Applied in this order: frequency and presence penalty, repetition penalty (all three on the
    answer's own tokens), masks of grammar and processors, logit bias, `min_new_tokens`; then the
    draw, greedy or by temperature, top-k, top-p and min-p.

    `top_k` 0 keeps the whole vocabulary. `stop_token_ids` joins the model's own end tokens, which
    `ignore_eos` switches off. Before `min_new_tokens` no end token is drawn. `max_new_tokens` 0
    only computes the prompt; with `pool` set, that becomes a vector. `seed` is always set by the
    owner, so that a later attempt draws the same numbers.
    """

    max_new_tokens: TokensMax
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: Count = 0
    min_p: MinP = 0.0
    frequency_penalty: AdditivePenalty = 0.0
    presence_penalty: AdditivePenalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    min_new_tokens: TokensMax = 0
    logit_bias: LogitBias | None = None
    processors: LogitProcessors = ()
    grammar: Grammar | None = None
    seed: Seed = 0
    stop_token_ids: TokenIds = ()
    ignore_eos: bool = False
    details: TokenOutputParams | None = None
    pool: PoolParams | None = None

    def details_from(self, prompt_tokens: int) -> int | None:
        """The token offset from which on such a prompt's choices are told of; None: they are not.

        Outputs are counted from 0; tokens of the prompt lie before. A vector is told as one output.
        """
        if self.pool is not None:
            return 0
        return None if self.details is None else -self.details.prompt_entries(prompt_tokens)

    @property
    def penalised(self) -> bool:
        """Whether a token's logit depends on how often it was drawn before."""
        return bool(
            self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0
        )

    @property
    def greedy(self) -> bool:
        """Whether the highest logit is taken, so that neither seed nor filters matter."""
        return self.temperature < TEMPERATURE_MIN or self.top_k == 1


class StopStrings(Value):
    """Where the detokenizer ends a choice, and how it writes tokens as text."""

    strings: StopStringList = ()
    patterns: StopPatternList = ()
    """Regular expressions, as `antiphon.text.stop_patterns` reads them (`stop_regex`)."""
    include: bool = False
    """Whether what was matched stays in the text (`no_stop_trim`)."""
    skip_special_tokens: bool = True
    token_texts: bool = False
    """Whether details name the text of each token by itself."""
    thinking: ThinkingMarks | None = None
    """Between which marks tokens count as thinking; None: none is counted."""

    @property
    def texts(self) -> tuple[str, ...]:
        """All that it is searched for, for whoever counts bytes."""
        return self.strings + self.patterns
