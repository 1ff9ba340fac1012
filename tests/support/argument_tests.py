"""Writes which test shows which SGLang argument: `python -m tests.support.argument_tests`.

A test carries `@pytest.mark.argument("--flag")`, or a parameter made by `shows("--flag", ...)` of
`tests.arguments`. The table is committed, since an installed package has no tests to look in.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from antiphon.config.sglang_arguments import rows

if TYPE_CHECKING:
    from collections.abc import Iterator

TESTS = Path("tests")
TABLE = Path("shared/antiphon/config/argument_tests.tsv")
MARKS = ("argument", "shows")


class Shown(msgspec.Struct, frozen=True):
    """A test and an argument that it covers."""

    flag: str
    test: str
    calls: frozenset[str]
    """The functions that the test calls."""


def shown(tests: Path = TESTS) -> tuple[Shown, ...]:
    return tuple(found for file in sorted(tests.rglob("test_*.py")) for found in _in_file(file))


def table(tests: Path = TESTS) -> str:
    flags = {flag: row.flags[0] for row in rows() for flag in row.flags}
    first: dict[str, str] = {}
    for found in shown(tests):
        first.setdefault(flags[found.flag], found.test)
    return "".join(f"{flag}\t{test}\n" for flag, test in (("flag", "test"), *sorted(first.items())))


def _in_file(file: Path) -> Iterator[Shown]:
    text = file.read_text("utf-8")
    if not any(f"{mark}(" in text for mark in MARKS):
        return
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            calls = frozenset(
                name
                for statement in node.body
                for call in ast.walk(statement)
                if isinstance(call, ast.Call) and (name := _name(call.func))
            )
            for decorator in node.decorator_list:
                for flag in _flags(decorator):
                    yield Shown(flag, f"{file.as_posix()}::{node.name}", calls)


def _flags(decorator: ast.expr) -> Iterator[str]:
    for call in ast.walk(decorator):
        if isinstance(call, ast.Call) and _name(call.func) in MARKS and call.args:
            first = call.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value


def _name(expression: ast.expr) -> str:
    if isinstance(expression, ast.Attribute):
        return expression.attr
    return expression.id if isinstance(expression, ast.Name) else ""


def main() -> None:
    TABLE.write_text(table(), encoding="utf-8")


if __name__ == "__main__":
    main()
