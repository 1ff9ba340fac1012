"""The request log of a whole stack, and what a gateway leaves behind that gets SIGQUIT."""

from __future__ import annotations

import json
import os
import signal
import threading
from typing import TYPE_CHECKING

import httpx
import pytest
from openai import APIError, OpenAI
from tests.system.stack import Stack, serving, wait_until

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]


def count(stack: Stack, started: threading.Event) -> None:
    client = OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)
    body = {"ignore_eos": True}
    try:
        for chunk in client.completions.create(
            model=stack.model, prompt="Count", max_tokens=900, stream=True, extra_body=body
        ):
            if chunk.choices[0].text:
                started.set()
    except (APIError, httpx.HTTPError):
        return  # the gateway died


def test_sigquit_leaves_unfinished_and_finished_requests(tmp_path: Path) -> None:
    dumps, records = tmp_path / "dumps", tmp_path / "records"
    arguments = ("--crash-dump-folder", str(dumps), "--export-metrics-to-file")
    where = ("--export-metrics-to-file-dir", str(records), "--log-requests")
    with serving(*arguments, *where) as stack:
        client = OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)
        client.completions.create(model=stack.model, prompt="Hello", max_tokens=5)
        wait_until(lambda: " request.finished rid=" in stack.log("gateway-0"), 10.0, "log")
        exported = "request_metrics_gateway-0_*.jsonl"
        wait_until(lambda: len(list(records.glob(exported))) == 1, 10.0, "metrics")
        started = threading.Event()
        reader = threading.Thread(target=count, args=(stack, started))
        reader.start()
        assert started.wait(30.0)
        before = stack.pid("gateway-0")
        assert before is not None
        os.kill(before, signal.SIGQUIT)
        reader.join(30.0)
        wait_until(lambda: stack.pid("gateway-0") not in (None, before), 30.0, "restart")
    (file,) = dumps.rglob("crash_dump_*.jsonl")
    head, *lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert (head["reason"], head["unfinished"], head["finished"]) == ("SIGQUIT", 1, 1)
    assert [line["event"] for line in lines] == ["request.unfinished", "request.finished"]
    assert lines[0]["output"] != [""]
    assert lines[1]["input"]["text"] == "Hello"
