"""One choice of a request: as a value that can move, and as what it is while it lives here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NewType

import msgspec
import numpy as np

from antiphon.wire.base import FinishReason
from antiphon.wire.errors import EngineError, ErrorReply, encode_error
from antiphon.wire.ids import RequestId
from antiphon.wire.sampling import SamplingParams

if TYPE_CHECKING:
    from antiphon.model_worker.batching.plan import Ints
    from antiphon.model_worker.cache.table import PageTable

ChoiceKey = NewType("ChoiceKey", int)
"""Names one admission of one choice. Never used twice, so that a late word hits nobody else."""

WIRE_IDS = np.dtype("<i4")
"""How token ids lie in bytes."""


class RequestState(msgspec.Struct, frozen=True, kw_only=True):
    """All that determines how a choice goes on, here or on another worker.

    Retraction, migration and hand-off are one move: make the state, run the state.

    Attributes:
        prompt_ids: int32, little-endian, as are `output_ids`.
        emitted: How many of the output ids somebody else has handed on already.
        weights_digest: What computed the outputs; empty if nobody has begun.
        adapter_digest: The adapter that was on; empty without one.
    """

    request_id: RequestId
    choice: int
    prompt_ids: bytes
    output_ids: bytes = b""
    emitted: int = 0
    sampling: SamplingParams
    weights_digest: str = ""
    adapter_digest: str = ""
    deadline_unix_ms: int


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """How a choice ended."""

    reason: FinishReason
    matched_stop: int | None = None
    error: ErrorReply | None = None

    @classmethod
    def failed(cls, error: EngineError) -> Finish:
        """It ended with an error."""
        return cls(reason=FinishReason.ERROR, error=encode_error(error))


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a step did to one choice: more ids, an end, or both."""

    key: ChoiceKey
    token_ids: bytes = b""
    cached_tokens: int = 0
    finish: Finish | None = None


class Phase(Enum):
    """Where a choice is. It goes round between the first two until it ends."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class Request:
    """One choice in the batching loop.

    Its tokens are known up to `length`; those below `computed` have their keys and values in the
    cache. Prefill and decode differ in nothing but how many tokens lie between.
    """

    def __init__(
        self, key: ChoiceKey, state: RequestState, *, arrival: int, outputs_max: int
    ) -> None:
        prompt = np.frombuffer(state.prompt_ids, WIRE_IDS)
        outputs = np.frombuffer(state.output_ids, WIRE_IDS)
        self.key = key
        self.state = state
        self.arrival = arrival
        self.phase = Phase.WAITING
        self.prompt_tokens = len(prompt)
        self.tokens_max = len(prompt) + max(outputs_max, len(outputs))
        self.length = len(prompt) + len(outputs)
        self.ids: Ints = np.empty(self.tokens_max, np.int32)
        self.ids[: len(prompt)] = prompt
        self.ids[len(prompt) : self.length] = outputs
        self.emitted = state.emitted
        self.slot = -1
        self.table: PageTable | None = None
        self.cached_tokens = 0
        self.finish: Finish | None = None
        if outputs_max <= len(outputs):
            self.finish = Finish(reason=FinishReason.LENGTH)

    @property
    def computed(self) -> int:
        """Tokens whose keys and values are in the cache."""
        return 0 if self.table is None else self.table.committed

    @property
    def pending(self) -> int:
        """Tokens still to be computed before the next one can be drawn."""
        return self.length - self.computed

    @property
    def covered(self) -> bool:
        """Whether it has pages for all tokens that it knows."""
        return self.table is not None and self.length <= self.table.reserved

    @property
    def outputs(self) -> int:
        """Tokens of the answer so far."""
        return self.length - self.prompt_tokens

    def start(self, slot: int, table: PageTable) -> None:
        """It has a slot and pages."""
        assert self.phase is Phase.WAITING, "a request was started twice"
        self.phase = Phase.RUNNING
        self.slot = slot
        self.table = table
        self.cached_tokens = max(self.cached_tokens, table.committed)

    def retract(self) -> None:
        """It lost its slot and its pages, and keeps its tokens."""
        assert self.phase is Phase.RUNNING, "only what runs can be retracted"
        self.phase = Phase.WAITING
        self.slot = -1
        self.table = None

    def accept(self, token_ids: Ints, end_ids: frozenset[int]) -> None:
        """Append what a step drew, up to the end. The token that ends a choice is not kept."""
        assert self.finish is None, "tokens were drawn for a request that has ended"
        for token in token_ids.tolist():
            if self._ends_at(token, end_ids):
                self.finish = Finish(reason=FinishReason.STOP, matched_stop=token)
                return
            self.ids[self.length] = token
            self.length += 1
            if self.length == self.tokens_max:
                self.finish = Finish(reason=FinishReason.LENGTH)
                return

    def progress(self) -> Progress | None:
        """What nobody was told yet, once; None if there is nothing."""
        fresh = self.ids[self.prompt_tokens + self.emitted : self.length]
        if not len(fresh) and self.finish is None:
            return None
        self.emitted = self.outputs
        return Progress(
            key=self.key,
            token_ids=fresh.astype(WIRE_IDS).tobytes(),
            cached_tokens=self.cached_tokens,
            finish=self.finish,
        )

    def snapshot(self) -> RequestState:
        """The value that goes on from here, wherever it is run."""
        outputs = self.ids[self.prompt_tokens : self.length]
        return msgspec.structs.replace(
            self.state, output_ids=outputs.astype(WIRE_IDS).tobytes(), emitted=self.emitted
        )

    def _ends_at(self, token: int, end_ids: frozenset[int]) -> bool:
        sampling = self.state.sampling
        if sampling.ignore_eos:
            return False
        return token in end_ids or token in sampling.stop_token_ids
