"""Values that the engine core takes and returns: limits, the state of choices, their progress."""

from __future__ import annotations

from enum import Enum
from typing import NewType

import msgspec
import numpy as np

from antiphon.wire.base import FinishReason
from antiphon.wire.errors import EngineError, ErrorReply, encode_error
from antiphon.wire.ids import DEFAULT_TENANT, RequestId, TenantId
from antiphon.wire.sampling import SamplingParams
from antiphon.wire.token_outputs import TokenOutputs

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
        fill_tokens: Number of prefill tokens with which a plan is full: no further prefill joins
            it, so that the first requests decode before the last ones are prefilled.
        prefill_max: Maximum number of prefilling requests in a plan.
        mixed: Whether prefill chunks and decodes share a plan (mixed chunked prefill). If not,
            prefill steps and decode steps alternate, so that neither waits for more than one plan
            of the other kind.
        queue_max: Maximum number of waiting requests beyond those that get a free slot.
        context_tokens: Maximum number of tokens of prompt and output, by model and page pool.
        weight_version: Name of the weights, which may change after they were loaded.
        stream_interval: Number of output tokens from one message of a stream to the next.
        pool_width: Width of the pooled vector of a model that generates no tokens. None: a
            generative model, which pools nothing.
        checkpoint_tokens: Distance of the cached checkpoints of recurrent states; whole pages.
        follow_timeout_s: Maximum time for a grammar matcher to accept a token.
        conservativeness: Factor on the share of remaining output tokens for which pages are
            reserved; see `NewTokenRatio`.
    """

    step_tokens_max: int
    chunk_tokens: int | None
    fill_tokens: int | None = None
    prefill_max: int | None = None
    mixed: bool = True
    running_max: int
    queue_max: int = 256
    context_tokens: int
    vocab_size: int
    end_ids: frozenset[int]
    weights_digest: str
    weight_version: str = "default"
    stream_interval: int = 1
    hidden_states: bool = False
    pool_width: int | None = None
    queue_timeout_s: float | None = None
    running_timeout_s: float | None = None
    checkpoint_tokens: int = 256
    follow_timeout_s: float = 10.0
    conservativeness: float = 1.0


class RequestState(msgspec.Struct, frozen=True, kw_only=True):
    """All that determines how a choice continues, on this worker or on another.

    Retraction, migration and hand-off are one operation: take the state, run the state.

    Attributes:
        prompt_ids: int32, little-endian, as are `output_ids`.
        emitted: Number of output ids that were already sent, by this worker or another.
        weights_digest: Digest of the weights that computed the outputs; empty if there are none.
        cache_salt: The cached prefix is found only by requests of the same salt.
        waited_ms: Time already spent in queues when the request arrived here.
    """

    request_id: RequestId
    choice: int
    prompt_ids: bytes
    output_ids: bytes = b""
    emitted: int = 0
    sampling: SamplingParams
    weights_digest: str = ""
    adapter_digest: str = ""
    priority: int = 0
    cache_salt: bytes = b""
    tenant: TenantId = DEFAULT_TENANT
    waited_ms: int = 0
    deadline_unix_ms: int


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
    """What a step did to one choice: new ids, a finish, or both.

    `weights` names the weights that sampled these ids; `retractions` counts since the choice was
    added.
    """

    key: ChoiceKey
    token_ids: bytes = b""
    details: TokenOutputs = TokenOutputs()
    cached_tokens: int = 0
    weights: str = ""
    retractions: int = 0
    finish: Finish | None = None


class Phase(Enum):
    """Phase of a choice. It may alternate between the first two until it ends."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"
