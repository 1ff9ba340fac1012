"""The repository speaks of the project alone, and promises nothing for later."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BINARY = {".safetensors", ".png", ".bin", ".hex", ".msgpack"}
TOO_LONG_TO_READ = {"tokenizer.json"}


def files() -> list[Path]:
    """Everything that is, or would be, committed."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    paths = [ROOT / name for name in listed]
    return [
        p
        for p in paths
        if p.is_file() and p.suffix not in BINARY and p.name not in TOO_LONG_TO_READ
    ]


# Spelled in pieces, so that this file does not contain them.
FORBIDDEN = ["TO" + "DO", "FIX" + "ME", "/wor" + "k/", "../sha" + "red", "/opt/py" + "pi"]


@pytest.mark.parametrize("word", FORBIDDEN)
def test_no_file_says(word: str):
    found = [
        str(path.relative_to(ROOT))
        for path in files()
        if path.name != "test_words.py" and word in path.read_text(errors="replace")
    ]
    assert found == []
