"""Tracing: one span per request, from its first token to its end in this detokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.telemetry.tracing import Span, span
from antiphon.wire.tokens import TokenStep

if TYPE_CHECKING:
    from collections.abc import Mapping

    from antiphon.detokenizer.request import DetokenizerRequest
    from antiphon.wire.ids import RequestId
    from antiphon.wire.tokens import TokenNews


class TextSpans:
    """The open spans."""

    def __init__(self) -> None:
        self._open: dict[RequestId, Span] = {}

    def begin(self, news: TokenNews) -> None:
        """Begin a span for each request whose first row this is, if it is traced."""
        if isinstance(news, TokenStep):
            return
        for row in news.rows:
            stream = row.stream
            if stream is None or stream.traceparent is None or row.request_id in self._open:
                continue
            opened = span("detokenizer.text", stream.traceparent, request_id=row.request_id)
            self._open[row.request_id] = opened.start()

    def end(self, requests: Mapping[RequestId, DetokenizerRequest]) -> None:
        """End the spans of requests that have ended, or are not held any more."""
        if not self._open:
            return
        for request_id in list(self._open):
            request = requests.get(request_id)
            if request is None or request.ended:
                self._open.pop(request_id).end()
