"""The page of limits names every queue that has no bound of its own."""

from __future__ import annotations

import ast
import re

from tests.tidy.test_layout import CODE, ROOT

BOUNDS = {
    **dict.fromkeys(("Queue", "LifoQueue", "PriorityQueue"), "maxsize"),
    "deque": "maxlen",
    "SimpleQueue": "",
}
"""Kinds of queues, and the argument that bounds each; the second one of `deque`."""


def unbounded_queues(tree: ast.AST) -> list[str]:
    """The kinds of the queues that code makes without a bound."""
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func.value if isinstance(node.func, ast.Subscript) else node.func
            name = ast.unparse(called).rpartition(".")[2]
            factory = [each.value for each in node.keywords if each.arg == "default_factory"]
            if any(re.match(r"deque\b", ast.unparse(each)) for each in factory):
                found.append("deque")
            if name in BOUNDS and not _is_bounded(node, name):
                found.append(name)
    return found


def _is_bounded(call: ast.Call, name: str) -> bool:
    bounds = [each.value for each in call.keywords if each.arg == BOUNDS[name]]
    bounds += call.args[name == "deque" :]
    return any(ast.unparse(each) not in ("0", "None") for each in bounds)


def test_queues_without_a_bound_are_found() -> None:
    bounded = "Queue(3); Queue(maxsize=most); deque(x, 3); deque(maxlen=3)"
    assert unbounded_queues(ast.parse(bounded)) == []
    code = "Queue(); Queue(0); PriorityQueue(); deque(x); deque(maxlen=None); asyncio.Queue[int]()"
    found = ["Queue", "Queue", "PriorityQueue", "deque", "deque", "Queue"]
    assert unbounded_queues(ast.parse(code)) == found


def test_the_page_of_limits_names_what_bounds_each_queue() -> None:
    _, _, inside = (ROOT / "docs/limits.md").read_text().partition("## Inside a process")
    named = re.findall(r"^\| `([\w/.]+)` \|", inside, re.MULTILINE)
    unbounded = [
        str(path.relative_to(ROOT))
        for path in CODE
        if re.search(r"Queue|deque", text := path.read_text()) and unbounded_queues(ast.parse(text))
    ]
    assert named == sorted(unbounded)


def test_the_page_of_limits_names_settings_that_exist() -> None:
    page = (ROOT / "docs/limits.md").read_text()
    settings = (ROOT / "docs/reference/configuration.md").read_text()
    paths = re.findall(r"`([a-z_]+\.[a-z_]+)`", page)
    assert paths
    assert [path for path in paths if f"| `{path}` |" not in settings] == []
