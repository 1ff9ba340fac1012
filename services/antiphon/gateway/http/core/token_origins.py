"""What is told of where the tokens of a prompt and of its answer come from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.wire.text import Origin


class CachedTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Where the cached tokens of a prompt were: the cache has one tier."""

    device: int
    host: int = 0


class WeightSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of an answer that weights of one name have drawn: from `start` to before `end`."""

    version: str
    start: int
    end: int


def weight_spans(origins: Sequence[Origin], tokens: int) -> list[WeightSpan]:
    """Which weights drew which of so many tokens; nothing unless several have.

    A stop may have cut off all that the last ones drew.
    """
    spans: list[WeightSpan] = []
    for number, origin in enumerate(origins):
        after = origins[number + 1].start if number + 1 < len(origins) else tokens
        end = min(after, tokens)
        if end <= origin.start:
            continue
        if spans and spans[-1].version == origin.weights:
            spans[-1] = msgspec.structs.replace(spans[-1], end=end)
        else:
            spans.append(WeightSpan(version=origin.weights, start=origin.start, end=end))
    return spans if len(spans) > 1 else []
