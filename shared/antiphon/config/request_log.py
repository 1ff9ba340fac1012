"""Settings of the gateway's request log, metrics file and crash dump."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from msgspec import Meta

from antiphon.config.schema import Bytes, Config

STDOUT = "stdout"
TARGETS_MAX = 8

LogLevel = Annotated[int, Meta(ge=0, le=3)]
LogFormat = Literal["text", "json"]


class RequestLogConfig(Config):
    """Request log, request metrics export and crash dumps of a gateway."""

    enabled: bool = False
    """Whether requests and their outputs are logged."""
    level: LogLevel = 2
    """Level of detail: 0 logs metadata, 1 also sampling parameters, 2 also input and output,
    truncated at 2048 characters, 3 everything."""
    format: LogFormat = "text"
    """Format of the request log: text, or one JSON object per line."""
    target: str = STDOUT
    """Targets of the request log: stdout, folders or both, separated by spaces or commas. Folders
    get one file per hour."""
    export_metrics: bool = False
    """Whether a JSON record of each finished request is written to export_folder."""
    export_folder: str = ""
    """Folder for the records of finished requests, one file per hour."""
    crash_dump_folder: str = ""
    """Folder for crash dumps: a gateway that crashes or receives SIGQUIT writes its unfinished
    requests and those of the last 300 s there, as JSON lines; empty: none."""
    queue_bytes_max: Bytes = 16 * 1024 * 1024
    """Maximum size of records waiting to be written, in bytes; further records are dropped."""
    held_bytes_max: Bytes = 64 * 1024 * 1024
    """Maximum size of inputs and outputs kept for logs and crash dumps, in bytes; beyond it the
    oldest finished requests are dropped first, then texts are truncated. It also limits the size of
    a crash dump."""

    def __post_init__(self) -> None:
        targets(self.target)
        if self.export_metrics and not self.export_folder:
            raise ValueError(
                "export_metrics requires export_folder; set --export-metrics-to-file-dir"
            )


def targets(text: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(word for word in re.split(r"[\s,]+", text) if word))
    if not found:
        raise ValueError("target is empty; expected stdout, folders or both")
    if len(found) > TARGETS_MAX:
        raise ValueError(f"target has {len(found)} entries; the limit is {TARGETS_MAX}")
    return found
