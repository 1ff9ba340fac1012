"""What a batching loop reports, read choice by choice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.model_worker.batching.state import AnyProgress, ChoiceKey, Progress, SampledTokens
from antiphon.wire.token_outputs import TokenOutputs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def new_ids(progress: Progress) -> list[int]:
    """The ids that a choice has got."""
    if progress.outputs is None or progress.start == progress.end:
        return []
    return progress.outputs.read(progress.start, progress.end).tolist()


class ProgressReader:
    """Reads the progress of each choice, whichever way its tokens are reported.

    A token in columns becomes a `Progress`, which has what the last one of its choice said of the
    choice.
    """

    def __init__(self) -> None:
        self._last: dict[ChoiceKey, Progress] = {}

    def read(self, progress: Sequence[AnyProgress]) -> tuple[Progress, ...]:
        """What one report or one `EngineCore.take_progress` says, in its order."""
        found: list[Progress] = []
        for news in progress:
            if isinstance(news, Progress):
                self._last[news.key] = news
                found.append(news)
            else:
                found += self._tokens(news)
        return tuple(found)

    def _tokens(self, sampled: SampledTokens) -> Iterator[Progress]:
        columns = sampled.slots, sampled.keys, sampled.offsets, sampled.ids
        for slot, key, offset, token in zip(*(c.tolist() for c in columns), strict=True):
            last = self._last[ChoiceKey(key)]
            expected = slot, offset, None
            assert (last.slot, last.end, last.finish) == expected, "a token of another place"
            news = msgspec.structs.replace(
                last, start=offset, end=offset + 1, details=TokenOutputs()
            )
            assert new_ids(news) == [token], "the token store has another token"
            self._last[news.key] = news
            yield news
