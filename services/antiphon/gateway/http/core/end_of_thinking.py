"""Which token ends a model's thinking, for answers whose form begins behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from antiphon.gateway.requests.generation_request import GenerationRequest
    from antiphon.gateway.requests.tokenizer_client import TokenizerClient


async def with_end_token(
    gen_request: GenerationRequest, tokenizers: TokenizerClient
) -> GenerationRequest:
    """Add the token to what is said of the thinking, where it is needed.

    Raises:
        EngineError: No tokenizer says which it is.
    """
    if gen_request.thinking is None or gen_request.sampling.grammar is None:
        return gen_request
    end_id = await tokenizers.token_id_of(gen_request.thinking.format.end)
    return msgspec.structs.replace(
        gen_request, thinking=msgspec.structs.replace(gen_request.thinking, end_id=end_id)
    )
