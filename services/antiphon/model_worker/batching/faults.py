"""Failures in the batching loop: which request is at fault, and which failures end the process."""

from __future__ import annotations

import logging
import traceback
from typing import TYPE_CHECKING

from antiphon.service.inbox import SharedStateBroken

if TYPE_CHECKING:
    from antiphon.model_worker.batching.request import Request

log = logging.getLogger(__name__)

SHARED = frozenset(
    f"antiphon.model_worker.cache.{module}"
    for module in ("pages", "pool", "states", "radix", "tree", "eviction", "events")
)
"""Modules with state that all requests share: page pools, page tables and the radix tree. Stateless
modules count only where one of these calls them: a prompt that cannot be hashed before that is a
fault of its request, which would otherwise end one worker after the other."""


class RequestFault(Exception):
    """Planning failed because of one request. The cause is chained."""

    def __init__(self, request: Request) -> None:
        super().__init__(f"request {request.state.request_id}, choice {request.state.choice}")
        self.request = request


def raise_if_shared(error: Exception) -> None:
    """Raise `SharedStateBroken` if pages or the radix tree are: ending a request cannot help."""
    while isinstance(error, RequestFault) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if isinstance(error, SharedStateBroken):
        raise error
    if _passed_shared(error):
        text = "the pages or the prefix tree of this worker are broken"
        log.critical(text, exc_info=error)
        raise SharedStateBroken(text) from error


def _passed_shared(error: BaseException) -> bool:
    """Whether the error, or one of its causes, passed through a shared module.

    However deep it was raised: a change in progress there was not completed.
    """
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        frames = traceback.walk_tb(cause.__traceback__)
        if any(frame.f_globals.get("__name__") in SHARED for frame, _ in frames):
            return True
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return False
