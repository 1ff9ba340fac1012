"""What the images install is there: pip resolves each of their lines, and installs nothing."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
PLACES = {
    "/etc/antiphon/constraints.txt": str(ROOT / "constraints.txt"),
    "$(echo /wheels/antiphon-*.whl)": str(ROOT),
}
"""Of what an image has there, here."""


def install_lines(dockerfile: str) -> Iterator[tuple[str, ...]]:
    """The arguments of `pip install`, once for each extra that an image may have."""
    text = (ROOT / "compose" / dockerfile).read_text().replace("\\\n", " ")
    extras = [extra.strip('"') for extra in re.findall(r"^ENV EXTRA=(\S*)", text, re.MULTILINE)]
    for there, here in PLACES.items():
        text = text.replace(there, here)
    for line in re.findall(r"pip install --no-cache-dir (.+)", text):
        for extra in extras if "$EXTRA" in line else [""]:
            yield tuple(shlex.split(line.replace("$EXTRA", extra)))


LINES = [(file, line) for file in ("Dockerfile", "Dockerfile.gpu") for line in install_lines(file)]


def test_every_image_installs_something() -> None:
    whats = [(file, line[-1].removeprefix(str(ROOT))) for file, line in LINES]
    assert whats == [
        ("Dockerfile", "torch"),
        *(("Dockerfile", extra) for extra in ("", "[worker]", "[encoder]")),
        ("Dockerfile.gpu", "triton"),
        ("Dockerfile.gpu", "[cuda,encoder]"),
    ]


@pytest.mark.parametrize(
    ("file", "line"),
    LINES,
    ids=[f"{file} {line[-1].removeprefix(str(ROOT))}" for file, line in LINES],
)
def test_pip_resolves_what_an_image_installs(
    file: str, line: tuple[str, ...], tmp_path: Path
) -> None:
    if "--index-url" in line:
        skip_unless_reached(line[line.index("--index-url") + 1])
    report = tmp_path / "report.json"
    dry = ("--dry-run", "--ignore-installed", "--no-build-isolation", "--quiet")
    ran = subprocess.run(
        [sys.executable, "-m", "pip", "install", *dry, "--report", str(report), *line],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found = {each["metadata"]["name"].lower() for each in json.loads(report.read_text())["install"]}
    asked = "torch" if "torch" in line else "antiphon"
    assert asked in found
    if file == "Dockerfile.gpu":
        assert {"torch", "triton"} <= found


def skip_unless_reached(index: str) -> None:
    try:
        with urllib.request.urlopen(f"{index}/torch/", timeout=20):
            pass
    except (urllib.error.URLError, OSError) as error:
        pytest.skip(f"{index} is not reached: {error}")
