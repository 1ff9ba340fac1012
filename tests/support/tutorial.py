"""Follows a tutorial of docs/tutorials in a copy of the repository.

A code block with a title is a change to the file of that name: a `diff` block edits it, and any
other block is the whole of a new file. Lines of `sh` blocks that run pytest are run.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs/tutorials").glob("*.md"))
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
PYTEST = ".venv/bin/pytest "
COPIED = ("services", "shared", "tests")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "bench", "golden", "results", ".*")


class Block(NamedTuple):
    language: str
    file: str
    text: str


def blocks(page: Path) -> list[Block]:
    return [Block(*groups) for groups in BLOCK.findall(page.read_text())]


def follow(page: Path, folder: Path) -> list[Path]:
    """Copy the repository to a folder and make the page's changes; return the files changed."""
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, copy_function=os.symlink, ignore=LEFT_OUT)
    (folder / "kernels").symlink_to(ROOT / "kernels")
    shutil.copy(ROOT / "pyproject.toml", folder)
    changed: list[Path] = []
    for block in blocks(page):
        if block.file:
            file = folder / block.file
            text = block.text
            if block.language == "diff":
                text = edited(file.read_text(), text)
            else:
                assert not file.exists(), f"{block.file} exists"
            file.unlink(missing_ok=True)  # a link to the original
            file.write_text(text)
            changed.append(file)
    return changed


def edited(text: str, diff: str) -> str:
    """Apply a diff without line numbers: its context is in the text exactly once."""
    lines = diff.splitlines(keepends=True)
    old = "".join(line[1:] for line in lines if not line.startswith("+"))
    new = "".join(line[1:] for line in lines if not line.startswith("-"))
    assert text.count(old) == 1, f"the context is {text.count(old)} times in the file:\n{old}"
    return text.replace(old, new)


def commands(page: Path) -> Iterator[list[str]]:
    for block in blocks(page):
        for line in block.text.splitlines():
            if block.language == "sh" and line.startswith(PYTEST):
                yield shlex.split(line.removeprefix(PYTEST))


def run(module: str, *arguments: str | Path, folder: Path) -> str:
    sources = [folder / name for name in ("services", "shared", "kernels")]
    path = f"PYTHONPATH={os.pathsep.join(map(str, sources))}"
    result = subprocess.run(
        ["env", path, sys.executable, "-m", module, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    return result.stdout
