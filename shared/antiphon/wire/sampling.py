"""Sampling parameters of a request, as the worker reads them, with grammar and stop conditions."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, get_args

from msgspec import Meta

from antiphon.wire.base import Value
from antiphon.wire.bounds import INT64_MAX, Count, Positive, Signed, TokenCount

if TYPE_CHECKING:
    from collections.abc import Mapping


TokenId = TokenCount
TokenSet = Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=4096)]


class DisallowTokens(Value, tag="disallow_tokens"):
    """Never sample these tokens."""

    token_ids: TokenSet


class AllowTokens(Value, tag="allow_tokens"):
    """Sample only these tokens. End-of-sequence tokens must be listed, too, to be sampled."""

    token_ids: TokenSet


class AllowRange(Value, tag="allow_range"):
    """Sample only token ids from `first` to `last`, both included."""

    first: TokenId
    last: TokenId


class ThinkingBudget(Value, tag="thinking_budget"):
    """Ends reasoning after `tokens_max` tokens, by forcing `closing_ids` one after the other.

    Reasoning lasts from a `begin_id`, in the prompt or the output, to the last closing id. Its
    tokens count from the later of `begin_id` and the start of the output.
    """

    tokens_max: TokenCount
    begin_id: TokenId
    closing_ids: Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=64)]


class DisallowFirst(Value, tag="disallow_first"):
    """Never sample these tokens as the first of an output."""

    token_ids: TokenSet


class TimestampRules(Value, tag="timestamp_rules"):
    """Timestamps are the tokens from `first_id` on; they never decrease, and come in pairs.

    An output begins with one, of which `initial_max` steps is the latest. After the first of a pair
    comes text, which ends with the first of the next pair; after two of them comes no third. One is
    sampled where all that may follow are together more likely than each text token. The token
    before `first_id` is not sampled. `end_id` may follow any timestamp; text ids are below.
    """

    first_id: TokenId
    end_id: TokenId
    initial_max: TokenId | None = None


LogitProcessor = (
    DisallowTokens | AllowTokens | AllowRange | ThinkingBudget | DisallowFirst | TimestampRules
)
REGISTERED: Mapping[str, type[LogitProcessor]] = {
    str(kind.__struct_config__.tag): kind for kind in get_args(LogitProcessor)
}
"""Processors by name."""
LogitProcessors = Annotated[tuple[LogitProcessor, ...], Meta(max_length=8)]


def named_ids(processor: LogitProcessor) -> tuple[int, ...]:
    """Token ids that must be in the model's vocabulary for the processor to be valid."""
    match processor:
        case (
            DisallowTokens(token_ids=ids)
            | AllowTokens(token_ids=ids)
            | DisallowFirst(token_ids=ids)
        ):
            return ids
        case TimestampRules(first_id=first_id, end_id=end_id):
            return (first_id, end_id)
        case AllowRange(first=first):
            return (first,)
        case ThinkingBudget(begin_id=begin_id, closing_ids=closing_ids):
            return (begin_id, *closing_ids)


GRAMMAR_TEXT_MAX = 131_072
"""Maximum length of a grammar, in characters: schemas of hundreds of tools fit."""


class GrammarKind(StrEnum):
    """Language of a grammar's text."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    """Any JSON object; the text is empty."""
    REGEX = "regex"
    EBNF = "ebnf"
    """Rules like `root ::= "a" | "b" root`; the output matches `root`."""
    STRUCTURAL_TAG = "structural_tag"
    """Free text with tags whose content has grammars of its own; as JSON."""


class Grammar(Value):
    """The output, or what follows its reasoning, matches this grammar.

    When the match is complete and cannot continue, the choice ends with finish reason `stop`.

    Attributes:
        begins_after: Output ids after which the grammar applies, such as a model's end of
            reasoning; before them nothing is masked. Empty: it applies from the first token.
    """

    kind: GrammarKind
    text: Annotated[str, Meta(max_length=GRAMMAR_TEXT_MAX)] = ""
    begins_after: Annotated[tuple[TokenId, ...], Meta(max_length=64)] = ()


Temperature = Annotated[float, Meta(ge=0.0, le=100.0)]
TopP = Annotated[float, Meta(gt=0.0, le=1.0)]
MinP = Annotated[float, Meta(ge=0.0, le=1.0)]
StopString = Annotated[str, Meta(min_length=1, max_length=4096)]
StopPattern = Annotated[str, Meta(min_length=1, max_length=256)]
STOPS_MAX = 32
"""Maximum stop strings of a request, and maximum stop patterns."""
StopStringList = Annotated[tuple[StopString, ...], Meta(max_length=STOPS_MAX)]
StopPatternList = Annotated[tuple[StopPattern, ...], Meta(max_length=STOPS_MAX)]
Priority = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
AdditivePenalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
RepetitionPenalty = Annotated[float, Meta(ge=1e-3, le=2.0)]
TokenIds = Annotated[tuple[TokenId, ...], Meta(max_length=1024)]

BIASES_MAX = 1024
"""Maximum entries of a logit bias."""
BIAS_MAX = 1e4
"""Maximum magnitude of a bias: far beyond every logit, and far from overflow."""
TOP_MAX = 128
"""Maximum top logprobs per token; the OpenAI API allows 20."""
NAMED_MAX = 128
"""Maximum token ids whose logprobs a request may ask for by id."""
TopLogprobs = Annotated[int, Meta(ge=0, le=TOP_MAX)]
NamedIds = Annotated[tuple[TokenId, ...], Meta(max_length=NAMED_MAX)]
PromptStart = Annotated[int, Meta(ge=-1, le=INT64_MAX)]
Dimensions = Positive
HEADS_MAX = 4096
"""Maximum heads of cross attention that align one request."""
AlignmentHeads = Annotated[tuple[tuple[Count, Count], ...], Meta(max_length=HEADS_MAX)]
FilterWidth = Annotated[int, Meta(ge=1, le=255)]

Mark = Annotated[str, Meta(min_length=1, max_length=128)]
MARKS_MAX = 16
SPACE_MAX = 16
"""Maximum white space before reasoning at the start of the output."""

TEMPERATURE_MIN = 1e-6
"""A lower temperature means greedy sampling: the division would only produce infinities."""


class SamplingDefaults(Value):
    """Fields that a model recommends, an operator prefers and a client sets; None: unset."""

    temperature: Temperature | None = None
    """Sampling temperature. 0 is greedy sampling."""
    top_p: TopP | None = None
    """Nucleus sampling: total probability of the tokens to sample from."""
    top_k: Signed | None = None
    """Number of most likely tokens to consider. -1: all."""
    min_p: MinP | None = None
    """Minimum probability, relative to the most likely token."""
    repetition_penalty: RepetitionPenalty | None = None
    """Divides the logits of generated tokens. 1 disables it."""


class LogitBias(Value):
    """Values added to the logits of single tokens: the i-th value to the i-th id, each id once.

    Both are little-endian: int32 ids, and float32 values from -BIAS_MAX to BIAS_MAX.
    """

    token_ids: Annotated[bytes, Meta(max_length=4 * BIASES_MAX)]
    values: Annotated[bytes, Meta(max_length=4 * BIASES_MAX)]


class TokenOutputParams(Value):
    """Which outputs are returned per token beside its text.

    Attributes:
        ids: Token ids; included with any other output.
        logprobs: Logprob of each token, after penalties and temperature.
        top: Number of top logprobs per token.
        named_ids: Token ids whose logprobs are returned at each position.
        hidden: Hidden state that each token was computed from; only if the server allows it.
        prompt_start: First prompt token to include; -1: none. Prompt logprobs are of the plain
            softmax. The first prompt token has no logprob and is never included.

    A request of no new tokens returns the outputs of the next position, with the token id -1.
    """

    ids: bool = False
    logprobs: bool = False
    top: TopLogprobs = 0
    named_ids: NamedIds = ()
    hidden: bool = False
    prompt_start: PromptStart = -1

    @property
    def sampled_only(self) -> bool:
        """Whether output tokens have nothing but their ids and logprobs."""
        return not (self.top or self.named_ids or self.hidden)

    def prompt_entries(self, prompt_tokens: int) -> int:
        """Number of prompt tokens included, for a prompt of this length."""
        return 0 if self.prompt_start < 0 else max(0, prompt_tokens - max(1, self.prompt_start))


class PoolParams(Value):
    """Pool the prompt to one vector, without generating.

    Attributes:
        dimensions: Truncate the vector to this length, and normalize it again if the whole one is
            normalized; None: keep all of it.
        second_from: Token index where the second text of a pair begins, for models with token type
            ids.
    """

    dimensions: Dimensions | None = None
    second_from: Positive | None = None


class AlignmentParams(Value):
    """Find where the last tokens of a prompt are in what it attends to beside its text.

    Attributes:
        tokens: How many tokens are aligned: the last ones.
        source_tokens: With how many tokens of the encoder: the first ones.
        heads: Layer and number of each head of cross attention whose weights say it.
        filter_width: Tokens of the encoder over which weights are smoothed by their median; odd.
    """

    tokens: Positive
    source_tokens: Positive
    heads: AlignmentHeads
    filter_width: FilterWidth = 7


class SamplingParams(Value):
    """Sampling parameters, stop conditions and token outputs of each choice.

    Applied in this order: frequency and presence penalty, repetition penalty (all three on the
    output tokens), masks of grammar and processors, logit bias, `min_new_tokens`; then sampling,
    greedy or by temperature, top-k, top-p and min-p.

    `top_k` 0 keeps the whole vocabulary. `stop_token_ids` adds to the model's EOS tokens, which
    `ignore_eos` disables. Before `min_new_tokens` no stop token is sampled. `max_new_tokens` 0
    only runs prefill; with `pool` set, the result is a vector, and with `alignment` the times of
    tokens. The owner always sets `seed`, so that a later attempt samples with the same random
    numbers.
    """

    max_new_tokens: Count
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: Count = 0
    min_p: MinP = 0.0
    frequency_penalty: AdditivePenalty = 0.0
    presence_penalty: AdditivePenalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    min_new_tokens: Count = 0
    logit_bias: LogitBias | None = None
    processors: LogitProcessors = ()
    grammar: Grammar | None = None
    seed: Seed = 0
    stop_token_ids: TokenIds = ()
    ignore_eos: bool = False
    details: TokenOutputParams | None = None
    pool: PoolParams | None = None
    alignment: AlignmentParams | None = None

    def details_from(self, prompt_tokens: int) -> int | None:
        """First token offset with token outputs, for a prompt of this length; None: there are none.

        Output tokens count from 0; prompt tokens have negative offsets. A pooled vector is returned
        as one output token.
        """
        if self.pool is not None:
            return 0
        return None if self.details is None else -self.details.prompt_entries(prompt_tokens)

    @property
    def penalised(self) -> bool:
        """Whether any penalty is active: logits depend on the tokens sampled before."""
        additive = self.frequency_penalty or self.presence_penalty
        return bool(additive or self.repetition_penalty != 1.0)

    @property
    def greedy(self) -> bool:
        """Whether sampling is greedy, so that neither the seed nor top-p and min-p matter."""
        return self.temperature < TEMPERATURE_MIN or self.top_k == 1


class ThinkingMarks(Value):
    """Marks of reasoning in the text of a choice.

    Reasoning tokens are those from the first mark to the last, both included.

    Attributes:
        cuts: Other marks that end reasoning without being part of it.
        inside: The output begins as reasoning: its first mark is in the prompt.
        again: Reasoning may occur anywhere and repeatedly; else only at the start of the output.
    """

    begin: Mark
    end: Mark
    cuts: Annotated[tuple[Mark, ...], Meta(max_length=MARKS_MAX)] = ()
    inside: bool = False
    again: bool = False


class StopStrings(Value):
    """Stop strings and detokenization options of a request."""

    strings: StopStringList = ()
    patterns: StopPatternList = ()
    """Regular expressions (`stop_regex`), as `antiphon.text.stop_patterns` parses them."""
    include: bool = False
    """Whether the matched stop stays in the text (`no_stop_trim`)."""
    skip_special_tokens: bool = True
    token_texts: bool = False
    """Whether token outputs include the text of each token."""
    thinking: ThinkingMarks | None = None
    """Marks between which tokens count as reasoning; None: they are not counted."""

    @property
    def texts(self) -> tuple[str, ...]:
        return self.strings + self.patterns
