"""Which token ends a model's thinking, for answers whose form begins behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from antiphon.gateway.ask import Ask
    from antiphon.gateway.encode import TokenizerCalls


async def marked(ask: Ask, tokenizers: TokenizerCalls) -> Ask:
    """Add the token to what is said of the thinking, where it is needed.

    Raises:
        EngineError: No tokenizer says which it is.
    """
    if ask.thinking is None or ask.sampling.grammar is None:
        return ask
    end_id = await tokenizers.mark_id(ask.thinking.format.end)
    return msgspec.structs.replace(
        ask, thinking=msgspec.structs.replace(ask.thinking, end_id=end_id)
    )
