"""The documentation site: mkdocs.yml names this file as its hook.

The pages in docs/ link to files elsewhere in the repository, with relative paths that also work in
a checkout. On the site such a file is served below `repository/`, at its path in the repository,
and the links of all pages are rewritten to match. A link to a file that does not exist is left as
it is, and `mkdocs build --strict` fails on it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS = "docs/"
REPOSITORY = "repository/"
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")
"""The relative target of a Markdown link, without its anchor."""


def on_config(config: MkDocsConfig) -> None:
    """Replace each folder in the navigation by its pages, in the order of their names."""
    config.nav = [_with_pages(entry) for entry in config.nav or []]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the files outside docs/ that the navigation names, and those that pages link to."""
    named = [name for name in _names(config.nav) if name.startswith(REPOSITORY)]
    linked = [target for file in files.documentation_pages() for target in _outside(file.src_uri)]
    waiting = [*named, *linked]
    while waiting:
        name = waiting.pop()
        path = ROOT / _in_repository(name)
        if name in files.src_uris or not path.is_file():
            continue
        files.append(File.generated(config, name, abs_src_path=str(path)))
        if path.suffix == ".md":
            waiting.extend(_outside(name))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page from paths in the repository to paths on the site."""
    del config
    folder = posixpath.dirname(page.file.src_uri)

    def rewritten(link: re.Match[str]) -> str:
        target = _on_site(page.file.src_uri, link[1])
        return posixpath.relpath(target, folder or ".") if target in files.src_uris else link[1]

    return LINK.sub(rewritten, markdown)


def _with_pages(entry: Any) -> Any:
    if not isinstance(entry, dict):
        return entry
    ((title, value),) = entry.items()
    if isinstance(value, list):
        return {title: [_with_pages(one) for one in value]}
    if not value.endswith("/"):
        return entry
    return {title: [f"{value}{page.name}" for page in sorted((ROOT / DOCS / value).glob("*.md"))]}


def _names(nav: Any) -> Iterator[str]:
    """Every page that the navigation names."""
    if isinstance(nav, str):
        yield nav
        return
    for one in nav.values() if isinstance(nav, dict) else nav:
        yield from _names(one)


def _outside(page: str) -> list[str]:
    """The targets of a page's links that are served below `repository/`."""
    text = (ROOT / _in_repository(page)).read_text()
    targets = [_on_site(page, link[1]) for link in LINK.finditer(text)]
    return [target for target in targets if target.startswith(REPOSITORY)]


def _in_repository(name: str) -> str:
    return name.removeprefix(REPOSITORY) if name.startswith(REPOSITORY) else DOCS + name


def _on_site(page: str, link: str) -> str:
    """Where the target of a page's link is on the site."""
    folder = posixpath.dirname(_in_repository(page))
    path = posixpath.normpath(posixpath.join(folder, link))
    return path.removeprefix(DOCS) if path.startswith(DOCS) else REPOSITORY + path
