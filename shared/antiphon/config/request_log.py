"""What a gateway records of requests: a log, a file of metrics, and what a crash leaves behind."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from msgspec import Meta

from antiphon.config.schema import Bytes, Config, Help

STDOUT = "stdout"
TARGETS_MAX = 8

LogLevel = Annotated[int, Meta(ge=0, le=3)]
LogFormat = Literal["text", "json"]


class RequestLogConfig(Config):
    """Request log: what a gateway writes of requests and their outputs."""

    enabled: Annotated[bool, Help("Whether requests and their outputs are logged.")] = False
    level: Annotated[
        LogLevel,
        Help(
            "How much of a request is logged: 0 metadata, 1 sampling parameters too, 2 input and "
            "output too, cut at 2048 characters, 3 everything."
        ),
    ] = 2
    format: Annotated[
        LogFormat, Help("Format of the request log: text, or one JSON object a line.")
    ] = "text"
    target: Annotated[
        str,
        Help(
            "Where requests are logged: stdout, folders or both, separated by blanks or commas. A "
            "folder gets a file an hour."
        ),
    ] = STDOUT
    export_metrics: Annotated[
        bool, Help("Whether a JSON record of each finished request is written to export_folder.")
    ] = False
    export_folder: Annotated[
        str, Help("Folder of the records of finished requests; it gets a file an hour.")
    ] = ""
    crash_dump_folder: Annotated[
        str,
        Help(
            "Folder in which a gateway that crashes or gets SIGQUIT leaves its unfinished requests "
            "and those of the last 300 s, as JSON lines; empty: none."
        ),
    ] = ""
    queue_bytes_max: Annotated[
        Bytes, Help("Maximum size of the records that wait to be written; others are dropped.")
    ] = 16 * 1024 * 1024
    held_bytes_max: Annotated[
        Bytes,
        Help(
            "Maximum size of the inputs and outputs that are held until they are logged or dumped; "
            "the oldest finished requests go first, then texts are cut. It bounds a crash dump too."
        ),
    ] = 64 * 1024 * 1024

    def __post_init__(self) -> None:
        targets(self.target)
        if self.export_metrics and not self.export_folder:
            raise ValueError(
                "export_metrics needs a folder: name it by --export-metrics-to-file-dir"
            )


def targets(text: str) -> tuple[str, ...]:
    """Read `target`.

    Raises:
        ValueError: It names no place, or too many.
    """
    found = tuple(dict.fromkeys(word for word in re.split(r"[\s,]+", text) if word))
    if not found:
        raise ValueError("target names no place: stdout, a folder or both")
    if len(found) > TARGETS_MAX:
        raise ValueError(f"target: {len(found)} places are more than {TARGETS_MAX}")
    return found
