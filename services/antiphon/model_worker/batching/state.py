"""Values that the engine core takes and returns: limits, the state of choices, their progress."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NewType

import msgspec
import numpy as np

from antiphon.model_worker.batching.plan import Floats, Ints, Longs
from antiphon.model_worker.batching.positions import media_positions
from antiphon.model_worker.batching.token_store import OutputIds
from antiphon.wire.base import FinishReason
from antiphon.wire.errors import EngineError, ErrorReply, encode_error
from antiphon.wire.ids import DEFAULT_TENANT, RequestId, TenantId
from antiphon.wire.media import Medium
from antiphon.wire.namespaces import key_ids, source_salt
from antiphon.wire.sampling import SamplingParams
from antiphon.wire.token_outputs import TokenOutputs

if TYPE_CHECKING:
    from numpy.typing import NDArray

ChoiceKey = NewType("ChoiceKey", int)
"""Names one admission of one choice. Never reused, so that a late command hits no other choice."""

QueueKey = tuple[float, float, int]
"""Rank by priority, then the key of the policy, then arrival. It is unique."""

WIRE_IDS = np.dtype("<i4")
"""The layout of token ids in bytes."""


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a step, of a request and of the model.

    Attributes:
        chunk_tokens: Maximum length of a prefill chunk. None: chunked prefill is off, and a prompt
            that is longer than a step has a step to itself.
        alone_tokens: The same while there is no other request. None: as beside others.
        fill_tokens: Number of prefill tokens with which a plan is full: no further prefill joins
            it, so that the first requests decode before the last ones are prefilled.
        mixed: Whether prefill chunks and decodes share a plan (mixed chunked prefill). If not,
            prefill steps and decode steps alternate, so that neither waits for more than one plan
            of the other kind.
        pool_width: Width of the pooled vector of a model that generates no tokens. None: a
            generative model, which pools nothing.
        flights: Steps in flight at once, each of other requests: one for each pipeline stage.
        media_width: Width of the embeddings of a model that takes media; None: it takes none.
        media_grids: Whether positions of media have axes.
        span_tokens: Most tokens of an image, if they attend to each other in both directions: a
            chunk has all of an image's tokens that are not cached, or none.
        source_shape: Tokens and width of what a request attends to beside its text, of a model
            with cross attention: one medium, which has no tokens in the prompt.
        source_heads: Layers that attend to it, and heads of each.
        checkpoint_tokens: Distance of the cached checkpoints of recurrent states; whole pages.
    """

    step_tokens_max: int
    chunk_tokens: int | None
    alone_tokens: int | None = None
    fill_tokens: int | None = None
    prefill_max: int | None = None  # prefilling requests in a plan
    mixed: bool = True
    running_max: int
    queue_max: int = 256  # beyond those that get a free slot
    context_tokens: int  # of prompt and output, by model and page pool
    vocab_size: int
    end_ids: frozenset[int]
    weights_digest: str
    weight_version: str = "default"  # may change after the weights were loaded
    stream_interval: int = 1  # output tokens from one message of a stream to the next
    hidden_states: bool = False
    pool_width: int | None = None
    media_width: int | None = None
    media_grids: bool = False
    span_tokens: int | None = None
    source_shape: tuple[int, int] | None = None
    source_heads: tuple[int, int] = (0, 0)
    flights: int = 1
    queue_timeout_s: float | None = None
    running_timeout_s: float | None = None
    checkpoint_tokens: int = 256
    follow_timeout_s: float = 10.0  # for a grammar matcher to accept a token
    conservativeness: float = 1.0  # a factor; see `NewTokenRatio`


class CoreTotals(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Numbers of a step's report. All but those of `running` and `waiting` are since start."""

    running: int
    waiting: int
    retractions: int = 0
    retracted_tokens: int = 0
    retracted_prompt_tokens: int = 0
    new_token_ratio: float = 0.0
    preemptions: int = 0
    evicted_tokens: int = 0
    verify_rows: int = 0
    drafts_proposed: int = 0
    drafts_accepted: int = 0


class RequestState(msgspec.Struct, frozen=True, kw_only=True):
    """All that determines how a choice continues, on this worker or on another.

    Retraction, migration and hand-off are one operation: take the state, run the state.
    """

    request_id: RequestId
    choice: int
    prompt_ids: bytes  # int32, little-endian, as are `output_ids`
    output_ids: bytes = b""  # that were sent before, by this worker or another
    sampling: SamplingParams
    priority: int = 0
    cache_salt: bytes = b""  # only requests of the same salt find the cached prefix
    tenant: TenantId = DEFAULT_TENANT
    waited_ms: int = 0  # in queues, before the request arrived here
    deadline_unix_ms: int
    media: tuple[Medium, ...] = ()  # of the prompt, in its order

    def key_ids(self) -> bytes:
        """The prompt ids as keys have them: with words made of media in place of placeholders."""
        if not self.media:
            return self.prompt_ids
        spans = [(each.span.start, each.span.tokens, each.span.key) for each in self.media]
        return key_ids(self.prompt_ids, spans)

    @property
    def page_salt(self) -> bytes:
        """The salt of its pages: also by what all of its tokens attend to beside the prompt."""
        salt = self.cache_salt
        for each in self.media:
            if not each.span.tokens:
                salt = source_salt(salt, each.span.key)
        return salt


class MediumRows(msgspec.Struct, frozen=True):
    """The rows of an embedding from `first` to `last`, which is not among them."""

    medium: Medium
    first: int
    last: int


_NO_ROWS: tuple[int, Floats] = 0, np.empty((0, 0), np.float32)


class RequestMedia:
    """The media of one choice, and the embeddings that are there.

    `prompt` are the token ids, (P,): of a medium's tokens those are placeholders that equal the
    first one.

    Of an embedding only a window of rows may be there, which moves on with the prefill. A medium
    without tokens in the prompt is attended to beside it: all of its rows are there, or none.

    Attributes:
        number: Of its last load; 0: there was none.
        loading: What that brings, if it has not ended.
        positions: See `media_positions`.
        position_offset: What positions of tokens behind these are beyond their indices.
    """

    __slots__ = ("_places", "_rows", "loading", "media", "number", "position_offset", "positions")

    def __init__(self, media: tuple[Medium, ...], prompt: Ints) -> None:
        self.media = media
        self._places = [placeholders(medium, prompt) for medium in media]
        self.positions, self.position_offset = media_positions(
            zip((each.span for each in media), self._places, strict=True)
        )
        self.number = 0
        self.loading: dict[int, MediumRows] = {}
        self._rows: dict[int, tuple[int, Floats]] = {}  # the index of the first one, and (rows, H)

    def lacks(self, tokens: int) -> bool:
        """Whether the row of the first placeholder behind so many tokens is not there.

        Or those of a medium that is beside the prompt, which a request needs once, when it starts.
        """
        for index, places in enumerate(self._places):
            if not len(places) and index not in self._rows:
                return True
            if (row := int(np.searchsorted(places, tokens))) < len(places):
                first, rows = self._rows.get(index, _NO_ROWS)
                return not first <= row < first + len(rows)
        return False

    def window(self, tokens: int, rows_max: int | None, *, whole: bool) -> dict[int, MediumRows]:
        """The rows of the placeholders behind so many tokens, at most `rows_max`; one at least.

        With `whole` no medium is cut: it has all of its rows there, or none.
        """
        window: dict[int, MediumRows] = {}
        left = rows_max
        for index, places in enumerate(self._places):
            if not len(places):
                medium = self.media[index]
                window[index] = MediumRows(medium, 0, medium.span.rows)
                continue
            first = int(np.searchsorted(places, tokens))
            taken = lacking = len(places) - first
            if not lacking:
                continue
            if left is not None:
                if window and (lacking > left if whole else not left):
                    break
                taken = lacking if whole else min(lacking, max(left, 1))
                left = max(0, left - taken)
            window[index] = MediumRows(self.media[index], first, first + taken)
            if taken < lacking:
                break
        return window

    def ready(self, start: int, end: int) -> int:
        """Up to which token, at most `end`, those from `start` on can be computed."""
        for index, places in enumerate(self._places):
            begin, stop = np.searchsorted(places, (start, end)).tolist()
            if begin < stop:
                first, rows = self._rows.get(index, _NO_ROWS)
                known = max(begin, first + len(rows)) if first <= begin else begin
                if known < stop:
                    return int(places[known])
        return end

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First token, and the one behind the last, of each medium."""
        return [(each.span.start, each.span.start + each.span.tokens) for each in self.media]

    def put(self, number: int, embeddings: dict[int, Floats]) -> bool:
        """Take what a load has brought; whether it is the one that the request waits for."""
        if number != self.number or not self.loading:
            return False
        self._rows = {
            index: (self.loading[index].first, rows) for index, rows in embeddings.items()
        }
        self.loading = {}
        return True

    def clear(self) -> bool:
        """Forget all rows, and a load; return whether there was anything."""
        held = bool(self.loading or self._rows)
        self.loading, self._rows = {}, {}
        return held

    def source(self) -> Floats:
        """The rows (S, H) of the only medium, which is beside the prompt.

        Raises:
            AssertionError: They are not there: the first chunk must not be computed.
        """
        assert 0 in self._rows, "a request was started without what it attends to"
        return self._rows[0][1]

    def rows(self, start: int, end: int) -> list[tuple[Ints, Floats]]:
        """The spliced tokens from `start` to `end`, rising, and their rows.

        Raises:
            AssertionError: A row is not there: the chunk must not be computed.
        """
        found: list[tuple[Ints, Floats]] = []
        for index, places in enumerate(self._places):
            begin, stop = np.searchsorted(places, (start, end)).tolist()
            if begin < stop:
                first, rows = self._rows.get(index, _NO_ROWS)
                there = first <= begin and stop <= first + len(rows)
                assert there, "a chunk was planned without its embeddings"
                found.append((places[begin:stop], rows[begin - first : stop - first]))
        return found


def placeholders(medium: Medium, prompt: Ints) -> Ints:
    """The indices of a medium's placeholders in a prompt (P,), as many as it has rows."""
    start, tokens = medium.span.start, medium.span.tokens
    found = np.flatnonzero(prompt[start : start + tokens] == prompt[start])
    return (found + start).astype(np.int32)


class Finish(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How a choice finished."""

    reason: FinishReason
    matched_stop: int | None = None
    error: ErrorReply | None = None

    @classmethod
    def at_length(cls) -> Finish:
        return cls(reason=FinishReason.LENGTH)

    @classmethod
    def failed(cls, error: EngineError) -> Finish:
        return cls(reason=FinishReason.ERROR, error=encode_error(error))


class Progress(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a step did to one choice: new ids, a finish, or both. Cf. `SampledTokens`.

    Attributes:
        slot: The slot in which it runs; -1 if it does not.
        outputs: Where its output ids are; None if it ended before it had any.
        start: Output ids [start, end) are new.
        weights: Name of the weights that sampled these ids.
        retractions: Counted since the choice was added.
    """

    key: ChoiceKey
    slot: int = -1
    outputs: OutputIds | None = None
    start: int = 0
    end: int = 0
    details: TokenOutputs = TokenOutputs()
    cached_tokens: int = 0
    weights: str = ""
    retractions: int = 0
    finish: Finish | None = None


class SampledTokens(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One new output id for each of many choices: all that a decode step does to most of them.

    A choice is among them only after a `Progress` gave its slot and outputs, while its weights and
    retractions are those of that `Progress`, and if its only token outputs are logprobs of sampled
    tokens. The arrays are not changed later.

    Axes: N choices.
    """

    slots: Ints  # (N,)
    keys: Longs  # (N,)
    offsets: Ints  # (N,) index of the id among the outputs of its choice
    ids: Ints  # (N,)
    logprobs: Floats | None = None  # (N,) NaN where not requested; None: nowhere

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: NDArray[Any]) -> SampledTokens:
        """Those of some rows, by their indices or by a mask."""
        return SampledTokens(
            slots=self.slots[rows],
            keys=self.keys[rows],
            offsets=self.offsets[rows],
            ids=self.ids[rows],
            logprobs=None if self.logprobs is None else self.logprobs[rows],
        )


AnyProgress = Progress | SampledTokens
