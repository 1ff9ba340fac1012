"""What the images install is there: pip resolves each of their lines, and installs nothing."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import urllib.error
import urllib.request
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
GPU_IMAGE = "Dockerfile.gpu"
CUDA = "13.0"
"""That of the image for GPUs, and that which torch is built with."""
PYPI = "https://pypi.org/simple"
BUILDS_HERE = ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL")
"""Where a machine may have other builds."""
PLACES = {
    "/etc/antiphon/constraints.txt": str(ROOT / "constraints.txt"),
    "$(echo /wheels/antiphon-*.whl)": str(ROOT),
    "$(python -c 'import torch; print(torch.version.cuda)')": CUDA,
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


LINES = [(file, line) for file in ("Dockerfile", GPU_IMAGE) for line in install_lines(file)]


def test_the_image_for_gpus_begins_with_the_cuda_of_its_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As PyPI's build of the pinned torch requires it; other builds here come before that."""
    text = (ROOT / "compose" / GPU_IMAGE).read_text()
    assert re.findall(r"^FROM nvidia/cuda:(\d+\.\d+)\.", text, re.MULTILINE) == [CUDA]
    if (unreached := error_of(PYPI)) is not None:
        pytest.skip(f"{PYPI} is not reached: torch was not asked for its CUDA ({unreached})")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    for name in BUILDS_HERE:
        monkeypatch.delenv(name, raising=False)
    line = ("--no-deps", "--constraint", str(ROOT / "constraints.txt"), "torch")
    (torch,) = resolved(line, tmp_path)
    required = "\n".join(torch["requires_dist"])
    assert re.findall(r"^cuda-toolkit\[.*\]==(\d+\.\d+)\.", required, re.MULTILINE) == [CUDA]


def test_every_image_installs_something() -> None:
    whats = [(file, line[-1].removeprefix(str(ROOT))) for file, line in LINES]
    assert whats == [
        ("Dockerfile", "torch"),
        *(("Dockerfile", extra) for extra in ("", "[worker]", "[encoder]")),
        (GPU_IMAGE, "triton"),
        (GPU_IMAGE, f"nvidia-cuda-nvcc=={CUDA}.*"),
        (GPU_IMAGE, "[cuda,encoder]"),
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
    found = {each["name"].lower() for each in resolved(line, tmp_path)}
    asked = "antiphon" if line[-1].startswith(str(ROOT)) else line[-1].partition("==")[0]
    assert asked in found
    if file == GPU_IMAGE and asked != "nvidia-cuda-nvcc":
        assert {"torch", "triton", "flashinfer-python"} <= found
    if unreached is not None:
        pytest.skip(
            f"{index} is not reached: not checked that it has the {line[-1]} of {file}, of which "
            f"only pip's own index was asked ({unreached})"
        )


def resolved(line: Sequence[str], place: Path) -> list[dict[str, Any]]:
    """The metadata of what pip would install."""
    report = place / "report.json"
    dry = ("--dry-run", "--ignore-installed", "--no-build-isolation", "--quiet")
    ran = subprocess.run(
        [sys.executable, "-m", "pip", "install", *dry, "--report", str(report), *line],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return [each["metadata"] for each in json.loads(report.read_text())["install"]]


def error_of(index: str) -> str | None:
    """Why an index is not reached; None: it is, if only to say that it has no torch."""
    try:
        with urllib.request.urlopen(f"{index}/torch/", timeout=20):
            return None
    except urllib.error.HTTPError as error:
        return None if error.code == HTTPStatus.NOT_FOUND else str(error)
    except OSError as error:
        return str(error)
