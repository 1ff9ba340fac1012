"""One line a record, with its fields and the request at hand."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import pytest

from antiphon.telemetry import log as logs
from antiphon.telemetry.tracing import request_context, span

if TYPE_CHECKING:
    from collections.abc import Generator

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"

log = logging.getLogger("antiphon.test")

Form = Literal["text", "json"]
Written = Callable[[Form], io.StringIO]


@pytest.fixture
def written() -> Generator[Written]:
    root = logging.getLogger()
    before = root.handlers[:], root.level

    def set_up(form: Form) -> io.StringIO:
        stream = io.StringIO()
        logs.set_up(level="info", form=form, instance="gateway-0", stream=stream)
        return stream

    yield set_up
    root.handlers[:], root.level = before
    logging.captureWarnings(capture=False)


def test_json_has_the_event_its_fields_the_request_and_the_trace(written: Written) -> None:
    stream = written("json")
    with request_context("r-1"), span("gateway.submit", PARENT):
        log.info("request admitted", extra={"prompt_tokens": 12, "level": "hidden"})
    line = json.loads(stream.getvalue())
    assert line["event"] == "request admitted"
    assert line["level"] == "info"
    assert line["prompt_tokens"] == 12
    assert line["request_id"] == "r-1"
    assert line["trace_id"] == TRACE
    assert line["instance"] == "gateway-0"


def test_what_json_does_not_know_is_written_as_text(written: Written) -> None:
    stream = written("json")
    log.info("odd", extra={"where": io, "bytes": b"\xff", "number": float("nan")})
    assert json.loads(stream.getvalue())["where"] == str(io)


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_traceback_and_a_line_break_stay_in_one_line(written: Written, form: Form) -> None:
    stream = written(form)
    try:
        int("two\nlines")
    except ValueError:
        log.exception("handler failed", extra={"prompt": "a\nb c", "route": "x"})
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert "ValueError" in text
    if form == "text":
        assert ' prompt="a\\nb c"' in text
        assert " route=x" in text


def test_the_level_holds_and_outside_of_a_request_there_is_no_request(written: Written) -> None:
    stream = written("text")
    log.debug("not written")
    log.info("bus joined")
    assert stream.getvalue().endswith(" INFO gateway-0 antiphon.test: bus joined\n")
