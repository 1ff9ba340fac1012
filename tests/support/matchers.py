"""Grammar matchers that advance in the thread of the batching loop, so that a run repeats."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.model_worker.grammar.executor import MatcherExecutor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.model_worker.batching.engine_core import EngineCore
    from antiphon.model_worker.grammar.executor import MatcherTask


class InlineMatcherExecutor(MatcherExecutor):
    """Runs each task when it is submitted, however long it takes."""

    def submit(self, tasks: Sequence[MatcherTask]) -> None:
        for task in tasks:
            task.run()


def advance_inline(core: EngineCore, executor: MatcherExecutor | None = None) -> EngineCore:
    """Let a core advance its matchers inline, or by another executor."""
    core._pending_grammar.executor = executor or InlineMatcherExecutor()
    return core
