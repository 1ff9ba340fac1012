"""Where tokens come from: cache tiers of prompt tokens, weight versions of output tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.wire.text import Origin


class CachedTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Number of cached prompt tokens by cache tier. There is one tier."""

    device: int
    host: int = 0


class WeightSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Output tokens sampled by one weight version: from `start` up to, but not including, `end`."""

    version: str
    start: int
    end: int


def weight_spans(origins: Sequence[Origin], tokens: int) -> list[WeightSpan]:
    """Spans of output tokens by weight version. Empty unless more than one version was used.

    A stop sequence may have removed all tokens of the last version.
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
