"""Failures in the batching loop: whose they are, and which of them end the process."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from antiphon.service.refusals import SharedStateBroken

if TYPE_CHECKING:
    from types import TracebackType

    from antiphon.model_worker.batching.request import Request

log = logging.getLogger(__name__)

SHARED = (
    "antiphon.model_worker.cache.pages",
    "antiphon.model_worker.cache.radix",
    "antiphon.model_worker.cache.tree",
    "antiphon.model_worker.cache.eviction",
    "antiphon.model_worker.cache.index",
)
"""Modules of what all requests share: the page pools, and the tree of cached prefixes."""


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
    if _raised_in(error.__traceback__) in SHARED:
        text = "the pages or the prefix tree of this worker are broken"
        log.critical(text, exc_info=error)
        raise SharedStateBroken(text) from error


def _raised_in(traceback: TracebackType | None) -> str:
    """The module of the innermost frame."""
    module = ""
    while traceback is not None:
        module = traceback.tb_frame.f_globals.get("__name__", "")
        traceback = traceback.tb_next
    return module
