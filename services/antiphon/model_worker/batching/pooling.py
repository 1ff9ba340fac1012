"""Pooled vectors of prompts: requested in the step plan, read from its outcome.

A model either generates tokens or pools, so all rows of a plan do the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from antiphon.model_worker.batching.plan import PoolingRequest
from antiphon.wire.codec import pack_ids
from antiphon.wire.errors import InvalidRequest, Unsupported
from antiphon.wire.token_outputs import TokenOutputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.model_worker.batching.builder import BatchRow
    from antiphon.model_worker.batching.plan import Floats, Ints, PooledVectors
    from antiphon.model_worker.batching.request import Request
    from antiphon.wire.sampling import SamplingParams

_NO_TOKEN = pack_ids([-1])
"""The id in place of a sampled token."""


def check_pooling(sampling: SamplingParams, width: int | None) -> None:
    """Reject what the model cannot do: one with a vector `width` pools, one without generates.

    Raises:
        Unsupported: Pooling is requested of a generative model, or tokens of a pooling model.
        InvalidRequest: The parameters do not fit the pooling model.
    """
    params = sampling.pool
    if params is None:
        if width is not None:
            raise Unsupported("this model does not generate: it returns a vector for each text")
        return
    if width is None:
        raise Unsupported("this model does not embed: it generates", param="pool")
    if sampling.max_new_tokens or sampling.details is not None:
        text = "a pooling request generates no tokens and returns no logprobs"
        raise InvalidRequest(text, param="pool")
    if params.dimensions is not None and params.dimensions > width:
        raise InvalidRequest(f"dimensions must be at most {width}", param="dimensions")


def pooling_request(rows: Sequence[BatchRow]) -> PoolingRequest | None:
    """The pooling of these rows; None if the model generates tokens."""
    if rows[0].request.state.sampling.pool is None:
        return None
    params = [row.request.state.sampling.pool for row in rows]
    return PoolingRequest(
        ends=np.array([row.end == row.request.prompt_tokens for row in rows], np.bool_),
        dimensions=np.array([(pool and pool.dimensions) or 0 for pool in params], np.int32),
    )


def token_types(rows: Sequence[BatchRow]) -> Ints | None:
    """1 for each token of the second text of a pair, (T,); None if no row has one."""
    params = [row.request.state.sampling.pool for row in rows]
    if not any(pool is not None and pool.second_from is not None for pool in params):
        return None
    types = [
        np.arange(row.start, row.end) >= (row.end if second is None else second)
        for row, second in zip(rows, (pool and pool.second_from for pool in params), strict=True)
    ]
    return np.concatenate(types).astype(np.int32)


@dataclass(frozen=True, slots=True)
class PooledVector:
    """The pooled vector of a row's prompt."""

    values: Floats

    @classmethod
    def of(cls, vectors: PooledVectors, row: int) -> PooledVector | None:
        """The vector of a row; None if its prompt continues after the row."""
        start, end = vectors.starts[row : row + 2].tolist()
        return cls(vectors.values[start:end]) if end > start else None

    def write_to(self, request: Request, *, accepted: int, kept: int) -> None:
        """Write it to the row's request, as output of the token after the prompt."""
        assert not accepted, "a token was sampled in place of a vector"
        assert not kept, "a token was kept in place of a vector"
        pooled = self.values.astype("<f4", copy=False).tobytes()
        request.tell(TokenOutputs(count=1, token_ids=_NO_TOKEN, pooled=pooled), 0)
