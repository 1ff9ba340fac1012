"""The pages for contributors name files, folders and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.support.package_tests import ELSEWHERE, packages, paths_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/index.md",
    "docs/glossary.md",
    *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs/tutorials").glob("*.md"))),
)
PATH = re.compile(r"`((?:services|shared|kernels|tests|docs|compose)/[\w./-]*)`")
"""A path of the repository in a code span."""


@pytest.mark.parametrize("page", PAGES)
def test_paths_named_in_prose_exist(page: str):
    text = (ROOT / page).read_text()
    named = {path for path in PATH.findall(text) if "NAME" not in path}
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_that_exist(page: str):
    folder = (ROOT / page).parent
    links = re.findall(r"\]\((?![a-z]+:|#)([^)#]+)", (ROOT / page).read_text())
    assert [link for link in links if not (folder / link).is_file()] == []


def test_the_index_links_to_every_page_of_docs():
    linked = re.findall(r"\]\(([^)#:]+\.md)", (ROOT / "docs/index.md").read_text())
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    decisions = {page for page in pages if page.startswith("decisions/")}
    assert pages - decisions - {"index.md"} <= set(linked)


def test_contributing_names_every_make_target_it_uses():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        text = (ROOT / page).read_text()
        assert set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE)) <= targets, page


@pytest.mark.parametrize("package", [name for name in packages() if name != "testing"])
def test_every_package_has_tests_of_its_own(package: str):
    assert paths_of(package), f"add the tests of {package} to ELSEWHERE"


def test_tests_listed_elsewhere_exist():
    assert set(ELSEWHERE) <= set(packages())
    for patterns in ELSEWHERE.values():
        for pattern in patterns:
            assert list(ROOT.glob(pattern)), pattern
