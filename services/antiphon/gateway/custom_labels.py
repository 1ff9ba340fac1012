"""Metric labels that clients set for their own requests, by a header."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

import msgspec

from antiphon.config.metrics import label_names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from antiphon.config.metrics import MetricsConfig

SETS_MAX = 100
"""Maximum number of label value sets with their own series; further ones share one."""
SETS_BYTES_MAX = 64 * 1024
"""Maximum total size of these sets, which appear in all request metrics."""
_VALUE_MAX = 128
_OTHER = "other"

custom_labels_var: ContextVar[tuple[str, ...] | None] = ContextVar("custom_labels", default=None)
"""Label values of the current request, in the order of the allowed labels."""


class CustomLabels:
    """Reads the header. Labels that are not allowed are ignored, as in SGLang."""

    def __init__(self, config: MetricsConfig) -> None:
        self.names = label_names(config.custom_labels)
        self._header = config.custom_labels_header
        self._seen: set[tuple[str, ...]] = set()
        self._seen_bytes = 0

    @property
    def none(self) -> tuple[str, ...]:
        """The values of a request without labels."""
        return ("",) * len(self.names)

    def read(self, headers: Mapping[str, str]) -> None:
        """Set the labels of the current task from a request's headers."""
        if self.names:
            # Set every time, since all requests of a connection are read in one task.
            text = headers.get(self._header)
            custom_labels_var.set(self._values(text) if text else None)

    def current(self) -> tuple[str, ...]:
        """The values of the current request."""
        return (custom_labels_var.get() or self.none) if self.names else ()

    def _values(self, text: str) -> tuple[str, ...]:
        try:
            given = msgspec.json.decode(text, type=dict[str, str | int | float | bool | None])
        except (msgspec.DecodeError, UnicodeError):
            return self.none
        values = tuple([_bounded(given.get(name)) for name in self.names])
        if values in self._seen or values == self.none:
            return values
        size = sum(len(value.encode()) for value in values)
        if len(self._seen) >= SETS_MAX or self._seen_bytes + size > SETS_BYTES_MAX:
            return (_OTHER,) * len(self.names)
        self._seen.add(values)
        self._seen_bytes += size
        return values


def _bounded(value: object) -> str:
    return "" if value is None else str(value)[:_VALUE_MAX]
