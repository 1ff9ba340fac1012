"""Limits the size of token outputs (logprobs, hidden states) before a request runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.wire.codec import id_count
from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from antiphon.gateway.requests.generation_request import GenerationRequest, TokenOutputFields
    from antiphon.wire.submit import SubmitRequest

TEXT_BYTES = 16
"""Approximate message bytes of a token's text, bytes and id."""


def check_logprob_start(gen_request: GenerationRequest, prompt_tokens: int) -> None:
    wanted = gen_request.sampling.details
    if wanted is not None and wanted.prompt_start > prompt_tokens:
        field = gen_request.detail_fields.start
        text = (
            f"{field} ({wanted.prompt_start}) is higher than the number of input tokens "
            f"({prompt_tokens})"
        )
        raise InvalidRequest(text, param=field)


class TokenOutputBudget:
    """Byte budget for the token outputs of all prompts of one body."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0

    def reserve(
        self, submit: SubmitRequest, fields: TokenOutputFields, *, hidden_size: int
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
        field = str(msgspec.structs.asdict(fields)[max(columns, key=lambda name: columns[name])])
        raise InvalidRequest.at(
            field,
            f"token outputs may take {self._bytes} bytes ({sum(columns.values())} per token for "
            f"{tokens} tokens); the limit is {self._bytes_max} bytes (gateway.details_bytes_max). "
            "Request fewer choices, fewer tokens or fewer outputs",
        )


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
