"""Failures in the batching loop: whose they are, and which of them end the process."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from antiphon.service.dropped_messages import SharedStateBroken

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from antiphon.model_worker.batching.request import Request

log = logging.getLogger(__name__)

SHARED = frozenset(
    f"antiphon.model_worker.cache.{module}"
    for module in ("pages", "states", "table", "radix", "tree", "eviction", "index", "events")
)
"""Modules of what all requests share: the page pools with the tables that hold their pages, and the
tree of cached prefixes. What has no state counts where one of these calls it: the hash of a prompt
that cannot be made before that is the fault of its request, which would else end every worker."""


class RequestFault(Exception):
    """Planning failed on account of one request. The cause is chained."""

    def __init__(self, request: Request) -> None:
        super().__init__(f"request {request.state.request_id}, choice {request.state.choice}")
        self.request = request


def raise_if_shared(error: Exception) -> None:
    """Raise if pages or the prefix tree are broken, which no request can be ended for.

    Raises:
        SharedStateBroken: The error was raised there.
    """
    while isinstance(error, RequestFault) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if isinstance(error, SharedStateBroken):
        raise error
    if _passed_shared(error):
        text = "the pages or the prefix tree of this worker are broken"
        log.critical(text, exc_info=error)
        raise SharedStateBroken(text) from error


def _passed_shared(error: BaseException) -> bool:
    """Whether a shared module was left by the error, or by one that led to it.

    However deep it was raised: a change that was begun there is not finished.
    """
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if not SHARED.isdisjoint(_modules(cause.__traceback__)):
            return True
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return False


def _modules(traceback: TracebackType | None) -> Iterator[str]:
    """The modules of all frames."""
    while traceback is not None:
        yield traceback.tb_frame.f_globals.get("__name__", "")
        traceback = traceback.tb_next
