"""How much may be told of tokens beside their text: refused before anything runs, not midway."""

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
"""About a token's text and its bytes, with its id, in a message."""


def check_logprob_start(gen_request: GenerationRequest, prompt_tokens: int) -> None:
    """Check that the prompt reaches to where log-probabilities of it are to begin.

    Raises:
        InvalidRequest: It is shorter.
    """
    wanted = gen_request.sampling.details
    if wanted is not None and wanted.prompt_start > prompt_tokens:
        field = gen_request.detail_fields.start
        text = (
            f"{field} ({wanted.prompt_start}) is higher than the number of input tokens "
            f"({prompt_tokens})"
        )
        raise InvalidRequest(text, param=field)


class TokenOutputBudget:
    """Room for what is told of the tokens of all prompts of one body."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0

    def reserve(
        self, submit: SubmitRequest, fields: TokenOutputFields, *, hidden_size: int
    ) -> None:
        """Count what a request may be told, if it comes to its longest.

        Args:
            submit: The request.
            fields: What its client calls the things that are told.
            hidden_size: Numbers of a hidden state.

        Raises:
            InvalidRequest: With what was counted before it is too much; names the field that wants
                the most.
        """
        columns = _bytes_per_token(submit, hidden_size)
        tokens = _reported_tokens(submit)
        self._bytes += sum(columns.values()) * tokens
        if self._bytes <= self._bytes_max:
            return
        field = str(msgspec.structs.asdict(fields)[max(columns, key=lambda name: columns[name])])
        text = (
            f"{field}: what is told of the tokens may take {self._bytes} bytes, "
            f"{sum(columns.values())} for each of {tokens}; at most {self._bytes_max} "
            "(gateway.details_bytes_max). Ask for fewer answers, or shorter ones, or for less"
        )
        raise InvalidRequest(text, param=field)


def _reported_tokens(submit: SubmitRequest) -> int:
    """Of how many tokens is told; a request of no new tokens is told what would come next."""
    first = submit.sampling.details_from(id_count(submit.prompt_ids)) or 0
    return submit.choices * (max(1, submit.sampling.max_new_tokens) - first)


def _bytes_per_token(submit: SubmitRequest, hidden_size: int) -> Mapping[str, int]:
    """Bytes of one token, by what is told."""
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
