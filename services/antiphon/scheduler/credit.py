"""How much more one worker may be given: counted from its load report and what it got since."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from antiphon.wire.codec import id_count
from antiphon.wire.ids import RequestId

if TYPE_CHECKING:
    from collections.abc import Iterable

    from antiphon.wire.heartbeat import WorkerLoad


@dataclass(slots=True)
class Account:
    """What one leader has put on one worker.

    Attributes:
        bound: Requests that are bound to it and not ended.
        strays: What it still ran in its last report though it should not.
        ended: What is bound to it, and had ended by then.
        pages_promised: By admits since that report.
    """

    bound: set[RequestId] = field(default_factory=set[RequestId])
    strays: set[RequestId] = field(default_factory=set[RequestId])
    ended: set[RequestId] = field(default_factory=set[RequestId])
    pages_promised: int = 0

    def report(self, held: Iterable[RequestId], ended: set[RequestId]) -> None:
        """Count anew from what a load report says that the worker holds."""
        self.strays = set(held) - self.bound - ended
        self.ended = self.bound & ended
        self.pages_promised = 0

    def promise(self, load: WorkerLoad, prompt_ids: bytes) -> None:
        """Count the pages of an admit that the last report cannot know of."""
        self.pages_promised += pages_needed(prompt_ids, load.page_tokens)

    @property
    def occupied(self) -> int:
        """Places taken."""
        return len(self.bound - self.ended) + len(self.strays)

    def places(self, load: WorkerLoad, look_ahead: int) -> int:
        """Count the requests that may still be bound to it."""
        return max(0, load.running_max + look_ahead - self.occupied)

    def takes(self, load: WorkerLoad, look_ahead: int, prompt_ids: bytes) -> bool:
        """Whether it has a place and pages for one more prompt.

        An idle worker takes any: what does not fit then never will, and it says so itself.
        """
        if self.places(load, look_ahead) == 0:
            return False
        pages = pages_needed(prompt_ids, load.page_tokens)
        return self.occupied == 0 or pages <= load.pages_free - self.pages_promised


def pages_needed(prompt_ids: bytes, page_tokens: int) -> int:
    """Count the pages of a prompt and the first token after it."""
    return id_count(prompt_ids) // page_tokens + 1
