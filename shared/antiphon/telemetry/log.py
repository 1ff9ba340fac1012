"""Logging: a constant event and its fields, one line per record, as text or JSON, on stderr.

    log = logging.getLogger(__name__)
    log.info("request admitted", extra={"request_id": request.id, "prompt_tokens": n})

The ids of the current request and trace are added automatically.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import TextIO

import msgspec

from antiphon.telemetry.tracing import request_id_var, trace_id

CANNOT_START = "cannot start"
"""Event of a failed startup, with its `reason`, which `antiphon serve` shows."""
# All other attributes of a record were passed in `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def set_up(*, level: str, form: str, instance: str, stream: TextIO | None = None) -> None:
    """Send all records of `level` and above, including those of libraries, to `stream` or stderr.

    Called once by `main`; another call replaces the configuration. `form` is `json` or `text`.
    """
    formatter = JsonFormatter(instance) if form == "json" else TextFormatter(instance)
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(capture=True)


class TextFormatter(logging.Formatter):
    """`2026-11-20T15:46:01.123Z INFO gateway-0 antiphon.gateway: request ended tokens=12`."""

    def __init__(self, instance: str) -> None:
        super().__init__()
        self._instance = instance

    def format(self, record: logging.LogRecord) -> str:
        head = (_time(record), record.levelname, self._instance, f"{record.name}:")
        event = record.getMessage().split()
        fields = (f"{name}={_shown(value)}" for name, value in _fields(record, self).items())
        return " ".join((*head, " ".join(event), *fields))


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, instance, logger, event, then the fields."""

    def __init__(self, instance: str) -> None:
        super().__init__()
        self._instance = instance

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "instance": self._instance,
            "logger": record.name,
            "event": record.getMessage(),
        }
        # The standard keys take precedence: a field named `level` must not hide the level.
        return msgspec.json.encode(_fields(record, self) | line, enc_hook=str).decode()


def _fields(record: logging.LogRecord, formatter: logging.Formatter) -> dict[str, object]:
    found: dict[str, object] = {}
    if (request_id := request_id_var.get()) is not None:
        found["request_id"] = request_id
    if (trace := trace_id()) is not None:
        found["trace_id"] = trace
    found |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
    if record.exc_info and record.exc_info[0] is not None:
        found["exception"] = formatter.formatException(record.exc_info)
    return found


def _time(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def _shown(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    if text and text.isprintable() and " " not in text and '"' not in text:
        return text
    return msgspec.json.encode(text).decode()
