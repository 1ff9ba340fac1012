"""What the README prints works as it is printed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from antiphon.config.gateway import GatewayConfig
from antiphon.supervisor.broker import PORT as NATS_PORT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.system.stack import Stack

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
MAKE = ("make", "--no-print-directory")
"""Quiet about folders, of which a make that is run by `make test` would speak."""
ASKS_MAX = 5
HTTP = f"http://127.0.0.1:{GatewayConfig().port}"
NATS = f"nats://127.0.0.1:{NATS_PORT}"


def block(language: str, containing: str) -> str:
    (found,) = [text for name, text in BLOCKS if name == language and containing in text]
    return found


def run(command: Sequence[str | Path]) -> str:
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def assert_readable(text: str) -> None:
    assert re.search(r"\w", text)
    assert text.replace("\n", "").isprintable()
    assert "\N{REPLACEMENT CHARACTER}" not in text


def test_the_commands_come_first():
    name, text = BLOCKS[0]
    assert name == "sh"
    assert [line.partition("#")[0].strip() for line in text.splitlines()] == [
        "make run",
        "make test",
        "make run ARGS='--model-path smollm2'",
    ]


def test_the_two_commands_are_there_and_run_passes_its_arguments():
    planned = run([*MAKE, "-n", "run", "ARGS=--port 31000"]).splitlines()
    assert planned[-1] == ".venv/bin/antiphon serve --port 31000"
    assert "bootstrap.py" in planned[0]
    planned = run([*MAKE, "-n", "test"])
    for tool in ("ruff check", "ruff format --check", "pyright", "lint-imports", "pytest"):
        assert tool in planned


def test_make_alone_prints_every_verb():
    shown = run(MAKE)
    verbs = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert verbs == set(re.findall(r"^  make ([a-z-]+) +\S", shown, re.MULTILINE))


def test_every_link_leads_somewhere():
    targets = re.findall(r"\]\(([^)]+)\)", README)
    missing = [t for t in targets if not urlsplit(t).scheme and not (ROOT / t).exists()]
    assert missing == []


@pytest.mark.system
@pytest.mark.timeout(180)
def test_the_curl_streams_readable_text(stack: Stack):
    if shutil.which("curl") is None:
        pytest.skip("no curl on this machine")
    command = block("sh", "curl")
    assert HTTP in command
    most = 0
    for _ in range(ASKS_MAX):  # a short answer may all be there when it is first looked at
        lines = run(["bash", "-c", command.replace(HTTP, stack.url)]).splitlines()
        events = [line.removeprefix("data: ") for line in lines if line]
        assert events[-1] == "[DONE]"
        deltas = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
        pieces = [delta["content"] for delta in deltas if delta.get("content")]
        assert_readable("".join(pieces))
        most = max(most, len(pieces))
        if most > 1:
            break
    assert most > 1


@pytest.mark.system
@pytest.mark.timeout(180)
@pytest.mark.parametrize("client", ["openai", "antiphon.client"])
def test_a_python_client_prints_readable_text(client: str, stack: Stack, tmp_path: Path):
    program = block("python", f"from {client} import")
    assert (HTTP in program) != (NATS in program)
    file = tmp_path / "snippet.py"
    file.write_text(program.replace(HTTP, stack.url).replace(NATS, stack.nats_url))
    assert_readable(run([sys.executable, "-W", "error", file]))
