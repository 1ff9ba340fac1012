"""The changes that the tutorials print apply to this repository, and their tests pass."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from tests.support.tutorial import PAGES, blocks, commands, edited, follow, run

if TYPE_CHECKING:
    from pathlib import Path


FAMILY = "add-a-model-family"
"""Its tests depend on most code; those of the other tutorials are in the long run."""


@pytest.mark.system  # starts processes, and takes too long for `make check`
@pytest.mark.timeout(180)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_changes_of_a_tutorial_apply(page: Path, tmp_path: Path) -> None:
    changed = follow(page, tmp_path)
    run("ruff", "check", "--no-cache", *changed, folder=tmp_path)
    run("ruff", "format", "--no-cache", "--check", *changed, folder=tmp_path)


@pytest.mark.system
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=() if page.stem == FAMILY else pytest.mark.long) for page in PAGES],
    ids=lambda page: page.stem,
)
def test_tutorial_works_as_printed(page: Path, tmp_path: Path) -> None:
    follow(page, tmp_path)
    runs = [run("pytest", "-q", *arguments, folder=tmp_path) for arguments in commands(page)]
    assert runs
    for printed in runs:
        assert re.search(r"\d+ passed", printed), printed


def test_family_takes_fewer_than_sixty_lines() -> None:
    (page,) = [page for page in PAGES if page.stem == FAMILY]
    family = [line for b in blocks(page) if b.language == "python" for line in b.text.splitlines()]
    edits = [line for b in blocks(page) for line in b.text.splitlines() if line.startswith("+")]
    assert 0 < len(edits) < len(family) + len(edits) < 60


def test_edit_needs_its_context_once() -> None:
    assert edited("a\nb\nc\n", " a\n-b\n+d\n") == "a\nd\nc\n"
    with pytest.raises(AssertionError, match="2 times"):
        edited("a\na\n", " a\n+b\n")
