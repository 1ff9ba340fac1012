"""A stack whose API is https, and the terminal that talks to it."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.system.stack import serving
from tests.unit.arguments.certificates import make

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


def chat(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "antiphon.cli.main", "chat", "--url", url, *arguments)
    return subprocess.run(
        [*command, "--message", "What is 17 + 25?", "--temperature", "0"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_stack_with_a_certificate_is_talked_to_over_https(tmp_path: Path) -> None:
    made = make(tmp_path, "served")
    files = ("--ssl-certfile", str(made.certificate), "--ssl-keyfile", str(made.key))
    with serving(*files) as stack:
        assert stack.url.startswith("https://127.0.0.1:")
        answer = chat(f"{stack.url}/v1", "--ca-certs", str(made.certificate))
        assert (answer.returncode, "42" in answer.stdout) == (0, True), answer.stderr
        untrusted = chat(stack.url)
        assert untrusted.returncode == 1
        assert "is not trusted" in untrusted.stderr
        assert "--ca-certs" in untrusted.stderr
