"""Budgets of thinking: after so many tokens it is ended by its mark."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.wire.errors import InvalidRequest, Unsupported
from antiphon.wire.processors import ThinkingBudget

if TYPE_CHECKING:
    from antiphon.gateway.parsing.reasoning.format import ReasoningFormat
    from antiphon.gateway.requests.generation_request import GenerationRequest
    from antiphon.gateway.requests.tokenizer_client import TokenizerClient


async def with_thinking_budget(
    gen_request: GenerationRequest,
    tokens_max: int,
    marks: ReasoningFormat | None,
    tokenizers: TokenizerClient,
    *,
    param: str,
) -> GenerationRequest:
    """Let the thinking of an answer be ended.

    Args:
        gen_request: The request.
        tokens_max: Most tokens of thinking.
        marks: How it is marked, if that is known.
        tokenizers: Say which tokens the marks are.
        param: What the client called the budget.

    Raises:
        InvalidRequest: A logit processor is one already.
        Unsupported: The marks are not known, or are no single tokens.
        EngineError: No tokenizer says which they are.
    """
    if any(isinstance(each, ThinkingBudget) for each in gen_request.sampling.processors):
        text = "a thinking_budget is named beside it, and an answer has one"
        raise InvalidRequest(f"{param}: {text}", param=param)
    if marks is None:
        text = "it is not known how this model thinks: set gateway.reasoning_parser"
        raise Unsupported(f"{param}: {text}", param=param)
    begin_id = await tokenizers.token_id_of(marks.begin)
    end_id = await tokenizers.token_id_of(marks.end)
    if begin_id is None or end_id is None:
        text = "the marks of this model's thinking are no single tokens, so no budget can end it"
        raise Unsupported(f"{param}: {text}", param=param)
    budget = ThinkingBudget(tokens_max=tokens_max, begin_id=begin_id, closing_ids=(end_id,))
    sampling = msgspec.structs.replace(
        gen_request.sampling, processors=(*gen_request.sampling.processors, budget)
    )
    return msgspec.structs.replace(gen_request, sampling=sampling)
