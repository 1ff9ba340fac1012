"""A batching loop over a model that makes vectors, driven by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from tests.support.models import open_model

from antiphon.kernels.cpu.extension import unavailable_reason
from antiphon.model_card.card import read_card
from antiphon.model_card.pooling import PoolMode, read_pooling
from antiphon.model_worker.batching.engine_core import EngineCore
from antiphon.model_worker.batching.loop import BatchingLoop, StepReport
from antiphon.model_worker.batching.mailbox import Mail, Mailbox
from antiphon.model_worker.batching.state import ChoiceKey, EngineLimits, RequestState
from antiphon.model_worker.cache.pages import CachePools
from antiphon.model_worker.cache.radix import RadixIndex
from antiphon.wire.codec import pack_ids
from antiphon.wire.ids import RequestId
from antiphon.wire.sampling import PoolParams, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from antiphon.wire.errors import ErrorReply

PAGE_TOKENS = 4
CONTEXT_TOKENS = 256
TURNS_MAX = 1000
LINEAR = "plain" if unavailable_reason() else "packed"


class PoolingEngine:
    """Prompts in, vectors out; a model that takes its last token finds prefixes in the cache."""

    def __init__(
        self,
        folder: Path,
        *,
        chunk: int | None = None,
        batch: int = 8,
        pages: int = 512,
        linear: str = LINEAR,
        deterministic: bool = False,
    ) -> None:
        card = read_card(folder)
        pooling = read_pooling(folder, card, embedding=True)
        assert pooling is not None
        self.pooling, self.causal = pooling, card.causal
        model = open_model(
            folder,
            page_tokens=PAGE_TOKENS,
            pages=pages,
            dtype="float32",
            linear=linear,
            deterministic=deterministic,
            pooling=pooling,
        )
        pools = CachePools(model.groups)
        limits = EngineLimits(
            step_tokens_max=512,
            chunk_tokens=chunk if card.causal else None,
            running_max=batch,
            queue_max=1000,
            context_tokens=min(CONTEXT_TOKENS, pools.tokens_max),
            vocab_size=model.spec.vocabulary,
            end_ids=frozenset(),
            weights_digest="",
            pool_width=pooling.card.width,
        )
        index = RadixIndex(pools) if pooling.mode is PoolMode.LAST and card.causal else None
        self._batching = EngineCore(limits, pools, index)
        self._loop = BatchingLoop(self._batching, model.runner, Mailbox(1), lambda _: None)
        self._keys = 0
        self.vectors: dict[int, np.ndarray] = {}
        self.errors: dict[int, ErrorReply] = {}
        self.cached_tokens = 0

    def vectors_of(
        self,
        prompts: Sequence[Sequence[int]],
        params: PoolParams | None = None,
        sampling: SamplingParams | None = None,
    ) -> list[np.ndarray]:
        """The vectors of prompts that arrive at once."""
        sampling = sampling or SamplingParams(max_new_tokens=0, pool=params or PoolParams())
        keys = [ChoiceKey(self._keys + number) for number in range(len(prompts))]
        self._keys += len(prompts)
        runs = {
            key: RequestState(
                request_id=RequestId(str(key)),
                choice=0,
                prompt_ids=pack_ids(prompt),
                sampling=sampling,
                deadline_unix_ms=2**52,
            )
            for key, prompt in zip(keys, prompts, strict=True)
        }
        self._hear(self._loop.turn(Mail(runs=runs)))
        for _ in range(TURNS_MAX):
            if self._batching.idle:
                return [self.vectors[key] for key in keys if key in self.vectors]
            self._hear(self._loop.turn(Mail()))
        raise AssertionError("the loop does not come to an end")

    def _hear(self, report: StepReport) -> None:
        for progress in report.progress:
            assert progress.finish is not None, "a prompt that becomes a vector says nothing before"
            assert not progress.token_ids
            self.cached_tokens += progress.cached_tokens
            if progress.finish.error is not None:
                self.errors[progress.key] = progress.finish.error
                continue
            assert progress.details.count == 1
            self.vectors[progress.key] = np.frombuffer(progress.details.pooled, "<f4")
