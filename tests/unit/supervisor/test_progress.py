"""What a terminal shows while the services start."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from antiphon.supervisor.stack import StartProgress, loading
from antiphon.telemetry import log as telemetry


@pytest.fixture(params=["text", "json"])
def lines(request: pytest.FixtureRequest):
    """The worker's log in both forms, as its own formatters write it."""
    stream = io.StringIO()
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    telemetry.set_up(level="info", form=request.param, instance="worker-0", stream=stream)
    yield stream
    root.handlers[:] = before
    root.setLevel(level)
    logging.captureWarnings(capture=False)


def log_progress(done: int) -> None:
    fields = {"done_bytes": done, "total_bytes": 4_000_000_000, "seconds_left": 2.4}
    logging.getLogger("antiphon.worker").info("loading weights", extra=fields)


def test_the_last_line_of_the_log_says_how_far_the_weights_are(lines: io.StringIO) -> None:
    log_progress(1_000_000_000)
    log_progress(3_000_000_000)
    logging.getLogger("other").info("something else")
    assert loading(lines.getvalue()) == "weights 3.00 of 4.00 GB, 2 s left"
    fields = {"bytes": 4_000_000_000, "seconds": 3.0, "megabytes_per_s": 1333}
    logging.getLogger("antiphon.worker").info("weights loaded", extra=fields)
    assert loading(lines.getvalue()) == ""
    assert loading("") == ""


def test_a_terminal_shows_it_beside_the_services_that_are_missing(lines: io.StringIO) -> None:
    log_progress(3_000_000_000)
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=200)
    with StartProgress(console, ["worker-0", "gateway-0"], lines.getvalue) as progress:
        progress.ready("gateway-0")
    assert "weights 3.00 of 4.00 GB, 2 s left" in screen.getvalue()


def test_elsewhere_there_is_a_line_a_service(lines: io.StringIO) -> None:
    screen = io.StringIO()
    with StartProgress(Console(file=screen), ["gateway-0"], lines.getvalue) as progress:
        progress.ready("gateway-0")
    assert screen.getvalue() == "gateway-0 is ready\n"


@pytest.mark.parametrize("log", ["", "loading weights done_bytes=1 total_bytes=140e9"])
def test_progress_fits_in_80_columns(log: str) -> None:
    names = [f"{name}-0" for name in ("worker", "scheduler", "tokenizer", "detokenizer", "encoder")]
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80, color_system=None)
    with StartProgress(console, names, lambda: log):
        pass
    assert "waiting for worker-0 and 4 more" in screen.getvalue()
    assert "\N{HORIZONTAL ELLIPSIS}" not in screen.getvalue()
