"""A JSON list of calls, or one call, as the whole output.

Used if calls are required and no grammar can produce the model's own format.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from antiphon.gateway.parsing.reader import AFTER_CALLS, TRIM_MAX, Steps, drop
from antiphon.gateway.parsing.tools import objects
from antiphon.gateway.parsing.tools.format import CallOutcome, ToolFormat

if TYPE_CHECKING:
    from antiphon.gateway.parsing.event_sink import EventSink
    from antiphon.gateway.parsing.reader import Reader

_WHITE = re.compile(r"[ \t\r\n]*")


def _read(reader: Reader, out: EventSink) -> Steps[None]:
    reader.keep()
    yield from reader.word(_WHITE, TRIM_MAX)
    outcome = yield from objects.likely_calls(reader, out)
    if out.settle(reader):
        yield from reader.rest(out.content)
    elif outcome is CallOutcome.BROKEN:
        yield from reader.rest(drop)
    else:
        yield from reader.until(AFTER_CALLS, out.content)


FORMAT = ToolFormat(
    names=("json",),
    example='[{"name": "f", "parameters": {"a": 1}}]',
    read=_read,
)
