"""A batching loop over a model that makes vectors, driven by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from tests.models.model_loop import ModelLoop
from tests.support.models import open_model
from tests.support.worker import state

from antiphon.kernels.cpu.extension import unavailable_reason
from antiphon.model_card.card import read_card
from antiphon.model_card.pooling import PoolMode, read_pooling
from antiphon.wire.ids import RequestId
from antiphon.wire.sampling import PoolParams, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from antiphon.wire.errors import ErrorReply

PAGE_TOKENS = 4
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
        self._loop = ModelLoop(
            model,
            tree=pooling.mode is PoolMode.LAST and card.causal,
            step_tokens_max=512,
            chunk_tokens=chunk if card.causal else None,
            running_max=batch,
            queue_max=1000,
            pool_width=pooling.card.width,
        )
        self.errors: dict[int, ErrorReply] = {}
        self.cached_tokens = 0

    def vectors_of(
        self,
        prompts: Sequence[Sequence[int]],
        params: PoolParams | None = None,
        sampling: SamplingParams | None = None,
    ) -> list[np.ndarray]:
        """The vectors of prompts that arrive at once; `errors` has those of the others."""
        sampling = sampling or SamplingParams(max_new_tokens=0, pool=params or PoolParams())
        vectors: list[np.ndarray] = []
        requests = [
            state(prompt, request_id=RequestId(str(number)), sampling=sampling)
            for number, prompt in enumerate(prompts)
        ]
        for output in self._loop.run(requests):
            (progress,) = output.progress
            assert not output.ids
            self.cached_tokens += output.cached_tokens
            if output.finish.error is not None:
                self.errors[progress.key] = output.finish.error
                continue
            assert progress.details.count == 1
            vectors.append(np.frombuffer(progress.details.pooled, "<f4"))
        return vectors
