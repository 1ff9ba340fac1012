"""How many bytes the output of a request may take where it is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.wire.codec import id_count
from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from antiphon.gateway.requests.generation_request import GenerationRequest
    from antiphon.wire.submit import SubmitRequest

TEXT_BYTES = 16
"""Approximate message bytes of a token's text, bytes and id."""
KEPT_TOKEN_BYTES = 8
"""Size of an output token where it is kept, about: its id and its text."""


class TokenOutputBudget:
    """Byte budget for the token outputs of all prompts of one body."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0

    def reserve(
        self, submit: SubmitRequest, gen_request: GenerationRequest, *, hidden_size: int
    ) -> None:
        """Reserve the maximum size of a request's token outputs.

        Raises:
            InvalidRequest: The budget is exceeded; names the field with the largest share.
        """
        columns = _bytes_per_token(submit, hidden_size)
        tokens = _reported_tokens(submit)
        self._bytes += sum(columns.values()) * tokens
        if self._bytes <= self._bytes_max:
            return
        largest = max(columns, key=lambda name: columns[name])
        raise InvalidRequest.at(
            gen_request.field(f"details.{largest}"),
            f"token outputs may take {self._bytes} bytes ({sum(columns.values())} per token for "
            f"{tokens} tokens); the limit is {self._bytes_max} bytes (gateway.details_bytes_max). "
            "Request fewer choices, fewer tokens or fewer outputs",
        )


def output_bytes(submit: SubmitRequest, *, hidden_size: int) -> int:
    """Maximum size of a request's output where it is kept: ids, text and token outputs."""
    outputs = submit.choices * submit.sampling.max_new_tokens
    if (wanted := submit.sampling.details) is None:
        return KEPT_TOKEN_BYTES * outputs
    columns = 4 * (1 + wanted.logprobs + len(wanted.named_ids) + hidden_size * wanted.hidden)
    aligned = submit.sampling.alignment
    times = 0 if aligned is None else 4 * aligned.tokens
    columns += 8 * wanted.top + times
    return KEPT_TOKEN_BYTES * outputs + columns * _reported_tokens(submit)


def _reported_tokens(submit: SubmitRequest) -> int:
    """Number of tokens with outputs. A request for no new tokens has one for the next position."""
    first = submit.sampling.details_from(id_count(submit.prompt_ids)) or 0
    return submit.choices * (max(1, submit.sampling.max_new_tokens) - first)


def _bytes_per_token(submit: SubmitRequest, hidden_size: int) -> Mapping[str, int]:
    wanted = submit.sampling.details
    if wanted is None:
        return {"ids": 0}
    text = TEXT_BYTES if submit.stop.token_texts else 0
    return {
        "ids": 4,
        "logprobs": 4 * wanted.logprobs + text,
        "top": (8 + text) * wanted.top,
        "named_ids": 4 * len(wanted.named_ids),
        "hidden": 4 * hidden_size * wanted.hidden,
    }
