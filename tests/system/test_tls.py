"""A stack whose API is https, and the terminal that talks to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.system.stack import run_antiphon, serving
from tests.unit.arguments.certificates import make

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


def test_a_stack_with_a_certificate_is_talked_to_over_https(tmp_path: Path) -> None:
    made = make(tmp_path, "served")
    files = ("--ssl-certfile", str(made.certificate), "--ssl-keyfile", str(made.key))
    with serving(*files) as stack:
        assert stack.url.startswith("https://127.0.0.1:")
        asked = ("chat", "--message", "What is 17 + 25?", "--temperature", "0", "--url")
        answer = run_antiphon(*asked, f"{stack.url}/v1", "--ca-certs", str(made.certificate))
        assert (answer.returncode, "42" in answer.stdout) == (0, True), answer.stderr
        untrusted = run_antiphon(*asked, stack.url)
        assert untrusted.returncode == 1
        assert "is not trusted" in untrusted.stderr
        assert "--ca-certs" in untrusted.stderr
