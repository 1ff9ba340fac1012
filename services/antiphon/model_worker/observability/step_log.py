"""Log lines of prefill and decode batches, in SGLang's format, which existing tools parse."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from antiphon.model_worker.batching.loop import StepReport

log = logging.getLogger(__name__)


class StepLog:
    """Logs each prefill batch, every `interval`-th decode batch, and retractions.

    Args:
        interval: Number of decode batches from one of their lines to the next.
        pages_total: Pages of the KV cache.
        page_tokens: Tokens of a page.
    """

    def __init__(self, interval: int, pages_total: int, page_tokens: int) -> None:
        self._interval = interval
        self._pages_total = pages_total
        self._page_tokens = page_tokens
        self._decodes = 0
        self._generated = 0
        self._decoded_at: float | None = None
        self._prefilled = 0
        self._prefilled_at: float | None = None
        self._retractions = self._retracted_tokens = 0
        self._ratio: float | None = None

    def step(self, report: StepReport, output_tokens: int, now: float) -> None:
        """Log a turn of the loop at `now`, which generated `output_tokens` tokens."""
        if report.retractions > self._retractions:
            self._retraction(report)
        self._ratio = report.new_token_ratio
        self._generated += output_tokens
        if not report.rows:
            return
        if report.prefill_rows:
            self._prefill(report, now)
            return
        self._decodes += 1
        if self._decodes % self._interval == 0:
            self._decode(report, now)

    def _prefill(self, report: StepReport, now: float) -> None:
        log.info(
            "Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: %d, token usage: %.2f, "
            "#running-req: %d, #queue-req: %d, #pending-token: %d, cuda graph: False, "
            "input throughput (token/s): %.2f",
            report.prefill_rows,
            report.prefill_tokens,
            report.cached_tokens,
            self._usage(report),
            max(0, report.running - report.prefill_rows),
            report.waiting,
            report.backlog.tokens,
            _rate(self._prefilled, self._prefilled_at, now),
        )
        self._prefilled, self._prefilled_at = report.prefill_tokens, now

    def _decode(self, report: StepReport, now: float) -> None:
        log.info(
            "Decode batch, #running-req: %d, #token: %d, token usage: %.2f, cuda graph: False, "
            "gen throughput (token/s): %.2f, #queue-req: %d",
            report.running,
            self._used(report) * self._page_tokens,
            self._usage(report),
            _rate(self._generated, self._decoded_at, now),
            report.waiting,
        )
        self._generated, self._decoded_at = 0, now

    def _retraction(self, report: StepReport) -> None:
        before = report.new_token_ratio if self._ratio is None else self._ratio
        log.warning(
            "KV cache pool is full. Retract requests. #retracted_reqs: %d, "
            "#new_tokens_gained: %d, #new_token_ratio: %.4f -> %.4f",
            report.retractions - self._retractions,
            report.retracted_tokens - self._retracted_tokens,
            before,
            report.new_token_ratio,
        )
        self._retractions = report.retractions
        self._retracted_tokens = report.retracted_tokens

    def _used(self, report: StepReport) -> int:
        """Pages that requests hold, by the capacity in the report."""
        return self._pages_total - report.credit.pages_free - report.credit.pages_evictable

    def _usage(self, report: StepReport) -> float:
        return self._used(report) / self._pages_total if self._pages_total else 0.0


def _rate(tokens: int, since: float | None, now: float) -> float:
    return 0.0 if since is None or now <= since else tokens / (now - since)
