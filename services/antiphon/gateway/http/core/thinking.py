"""Looks up the token that ends reasoning, for output constraints that start after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.wire.errors import InvalidRequest, Unsupported
from antiphon.wire.processors import ThinkingBudget

if TYPE_CHECKING:
    from antiphon.gateway.parsing.reasoning.format import ReasoningFormat
    from antiphon.gateway.requests.generation_request import GenerationRequest
    from antiphon.gateway.requests.tokenizer_client import TokenizerClient

FORMAT_UNKNOWN = (
    "the reasoning format of this model is unknown; set gateway.reasoning_parser "
    "(--reasoning-parser)"
)


async def with_end_token(
    gen_request: GenerationRequest, tokenizers: TokenizerClient
) -> GenerationRequest:
    """Add the token that ends reasoning to the reasoning parameters, if a constraint needs it."""
    if gen_request.reasoning is None or gen_request.sampling.grammar is None:
        return gen_request
    end_id = await tokenizers.token_id_of(gen_request.reasoning.format.end)
    return msgspec.structs.replace(
        gen_request, reasoning=msgspec.structs.replace(gen_request.reasoning, end_id=end_id)
    )


async def with_thinking_budget(
    gen_request: GenerationRequest,
    tokens_max: int,
    marks: ReasoningFormat | None,
    tokenizers: TokenizerClient,
    *,
    param: str,
) -> GenerationRequest:
    """Add a reasoning budget to a request; `param` is the API's name of the budget field.

    Raises:
        InvalidRequest: A thinking_budget processor is set too.
        Unsupported: The delimiters are unknown, or not single tokens.
    """
    if any(isinstance(each, ThinkingBudget) for each in gen_request.sampling.processors):
        text = "cannot be combined with the thinking_budget logits processor"
        raise InvalidRequest.at(param, text)
    if marks is None:
        raise Unsupported.at(param, FORMAT_UNKNOWN)
    begin_id = await tokenizers.token_id_of(marks.begin)
    end_id = await tokenizers.token_id_of(marks.end)
    if begin_id is None or end_id is None:
        text = "not supported by this model: its reasoning delimiters are not single tokens"
        raise Unsupported.at(param, text)
    budget = ThinkingBudget(tokens_max=tokens_max, begin_id=begin_id, closing_ids=(end_id,))
    sampling = msgspec.structs.replace(
        gen_request.sampling, processors=(*gen_request.sampling.processors, budget)
    )
    return msgspec.structs.replace(gen_request, sampling=sampling)
