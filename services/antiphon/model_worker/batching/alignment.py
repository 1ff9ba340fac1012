"""Where tokens are in the audio that a request attends to: asked for in the step plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from antiphon.model_worker.batching.plan import AlignmentRequest
from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.model_worker.batching.plan import Ints
    from antiphon.model_worker.batching.request import Request
    from antiphon.model_worker.batching.rows import StepRows
    from antiphon.model_worker.batching.state import EngineLimits, RequestState


def check_alignment(state: RequestState, limits: EngineLimits) -> None:
    """Reject an alignment that the model cannot make.

    Raises:
        InvalidRequest: It does not fit the request, or the model.
    """
    if (wanted := state.sampling.alignment) is None:
        return
    text, details = None, state.sampling.details
    source_tokens = 0 if limits.source_shape is None else limits.source_shape[0]
    layers, heads = limits.source_heads
    if not source_tokens or not state.media:
        text = "requires a model that attends to audio beside its text, and audio"
    elif state.sampling.max_new_tokens or details is None or details.prompt_start >= 0:
        text = "requires a request of no new tokens, with token outputs of none of its prompt"
    elif not wanted.heads or not wanted.filter_width % 2:
        text = "requires heads, and an odd filter_width"
    elif any(layer >= layers or head >= heads for layer, head in wanted.heads):
        text = f"has other heads than those of {layers} layers with {heads} heads"
    elif wanted.source_tokens > source_tokens:
        text = f"source_tokens must be at most {source_tokens}"
    elif wanted.tokens > len(state.prompt_ids) // 4:
        text = "has more tokens than the prompt"
    if text is not None:
        raise InvalidRequest(f"alignment {text}", param="alignment")


def alignment_request(chunks: Sequence[Request], rows: StepRows) -> AlignmentRequest | None:
    """The alignments of the prompts that end in these rows; None if there are none."""
    wanted = [
        (row, request, request.state.sampling.alignment, request.media)
        for row, request in enumerate(chunks, start=rows.verified)
        if request.aligned_at(rows.ends.item(row))
    ]
    found = [
        (row, request.prompt, params, media.source())
        for row, request, params, media in wanted
        if params is not None and media is not None
    ]
    if not found:
        return None
    return AlignmentRequest(
        rows=_ints([row for row, *_ in found]),
        token_starts=_starts([len(prompt) for _, prompt, *_ in found]),
        tokens=np.concatenate([prompt for _, prompt, *_ in found]).astype(np.int32, copy=False),
        counts=_ints([params.tokens for *_, params, _ in found]),
        head_starts=_starts([len(params.heads) for *_, params, _ in found]),
        heads=np.concatenate([np.array(params.heads, np.int32) for *_, params, _ in found]),
        sources=np.stack([source for *_, source in found]),
        source_tokens=_ints([params.source_tokens for *_, params, _ in found]),
        filter_widths=_ints([params.filter_width for *_, params, _ in found]),
    )


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, np.int32)


def _starts(lengths: Sequence[int]) -> Ints:
    return np.cumsum([0, *lengths], dtype=np.int32)
