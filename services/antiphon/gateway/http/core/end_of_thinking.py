"""Looks up the token that ends reasoning, for output constraints that start after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from antiphon.gateway.requests.generation_request import GenerationRequest
    from antiphon.gateway.requests.tokenizer_client import TokenizerClient


async def with_end_token(
    gen_request: GenerationRequest, tokenizers: TokenizerClient
) -> GenerationRequest:
    """Add the token to the reasoning parameters, if it is needed.

    Raises:
        EngineError: No tokenizer replied.
    """
    if gen_request.reasoning is None or gen_request.sampling.grammar is None:
        return gen_request
    end_id = await tokenizers.token_id_of(gen_request.reasoning.format.end)
    return msgspec.structs.replace(
        gen_request, reasoning=msgspec.structs.replace(gen_request.reasoning, end_id=end_id)
    )
