"""What the images install is there: pip resolves each of their lines, and installs nothing."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import urllib.error
import urllib.request
from http import HTTPStatus
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
    "$(python -c 'import torch; print(torch.version.cuda)')": "13.0",
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
        ("Dockerfile.gpu", "nvidia-cuda-nvcc==13.0.*"),
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
    """From the index that the image names where it is reached, or else from this machine's."""
    index = line[line.index("--index-url") + 1] if "--index-url" in line else None
    unreached = None if index is None else error_of(index)
    if unreached is not None:
        line = tuple(word for word in line if word not in ("--index-url", index))
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
    asked = "antiphon" if line[-1].startswith(str(ROOT)) else line[-1].partition("==")[0]
    assert asked in found
    if file == "Dockerfile.gpu" and asked != "nvidia-cuda-nvcc":
        assert {"torch", "triton", "flashinfer-python"} <= found
    if unreached is not None:
        pytest.skip(
            f"{index} is not reached: not checked that it has the {line[-1]} of {file}, of which "
            f"only pip's own index was asked ({unreached})"
        )


def error_of(index: str) -> str | None:
    """Why an index is not reached; None: it is, if only to say that it has no torch."""
    try:
        with urllib.request.urlopen(f"{index}/torch/", timeout=20):
            return None
    except urllib.error.HTTPError as error:
        return None if error.code == HTTPStatus.NOT_FOUND else str(error)
    except OSError as error:
        return str(error)
