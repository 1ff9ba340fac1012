"""Prompts that become vectors: asked of a plan, and taken from its outcome.

A model either draws tokens or makes vectors: of a plan, all rows do the one or the other.
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

_NOTHING = pack_ids([-1])
"""What stands in place of the token that is not drawn."""


def check_pooling(sampling: SamplingParams, width: int | None) -> None:
    """Refuse what a model does not do whose vectors have this width; None: it draws tokens.

    Raises:
        Unsupported: Vectors of a model that draws tokens, or tokens of one that does not.
        InvalidRequest: Of a vector more is wanted than there is.
    """
    wanted = sampling.pool
    if wanted is None:
        if width is not None:
            raise Unsupported("this model does not generate: it makes vectors of texts")
        return
    if width is None:
        raise Unsupported("this model does not embed: it generates", param="pool")
    if sampling.max_new_tokens or sampling.details is not None:
        raise InvalidRequest("a text that becomes a vector has no answer", param="pool")
    if wanted.dimensions is not None and wanted.dimensions > width:
        raise InvalidRequest(f"dimensions: the vector has {width}", param="dimensions")


def pooling_request(rows: Sequence[BatchRow]) -> PoolingRequest | None:
    """What the plan of these rows is asked to pool; None if the model draws tokens."""
    if rows[0].request.state.sampling.pool is None:
        return None
    wanted = [row.request.state.sampling.pool for row in rows]
    return PoolingRequest(
        ends=np.array([row.end == row.request.prompt_tokens for row in rows], np.bool_),
        dimensions=np.array([(pool and pool.dimensions) or 0 for pool in wanted], np.int32),
    )


def token_types(rows: Sequence[BatchRow]) -> Ints | None:
    """1 for each token of the second text of a pair, (T,); None if no row has one."""
    wanted = [row.request.state.sampling.pool for row in rows]
    if not any(pool is not None and pool.second_from is not None for pool in wanted):
        return None
    types = [
        np.arange(row.start, row.end) >= (row.end if second is None else second)
        for row, second in zip(rows, (pool and pool.second_from for pool in wanted), strict=True)
    ]
    return np.concatenate(types).astype(np.int32)


@dataclass(frozen=True, slots=True)
class PooledVector:
    """What a row's prompt became."""

    values: Floats

    @classmethod
    def of(cls, vectors: PooledVectors, row: int) -> PooledVector | None:
        """None if the prompt goes on after the row."""
        start, end = vectors.starts[row : row + 2].tolist()
        return cls(vectors.values[start:end]) if end > start else None

    def write_to(self, request: Request, *, accepted: int, kept: int) -> None:
        """Give it to the row's request, as of the one token that would have come next."""
        assert not accepted, "a token was drawn in place of a vector"
        assert not kept, "a token was kept in place of a vector"
        pooled = self.values.astype("<f4", copy=False).tobytes()
        request.tell(TokenOutputs(count=1, token_ids=_NOTHING, pooled=pooled), 0)
