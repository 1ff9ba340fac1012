"""Every SGLang argument that works is read by production code and shown by a test."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest
from tests.support import argument_tests

from antiphon.config.sglang_arguments import SglangArgument, arguments, rows
from antiphon.resolve.resolved_config import ResolvedConfig

ROOT = Path(__file__).resolve().parents[2]
COMPARES = {"compare", "compare_async", "compare_equal", "compare_equal_async"}
"""The functions of `tests.arguments` that start with an argument and without it."""
DECIDES = {
    "batching.mixed": "mixed",
    "batching.tokens_max": "step_tokens",
    "cache.prefix": "prefix",
    "cache.states_max": "cache_states",
    "cache.states_ratio": "cache_states",
    "cache.static_ratio": "cache_pages",
    "cache.tokens_max": "cache_pages",
    "grammar.backend": "grammar",
    "model.implementation": "implementation",
}
"""Settings that only the resolver reads, and the entry of the plan that each decides."""
WORKING = [row for row in rows() if row.status != "refused"]


def test_the_table_of_tests_is_current() -> None:
    assert (ROOT / argument_tests.TABLE).read_text() == argument_tests.table(Path("tests")), (
        "run python -m tests.support.argument_tests"
    )


def test_every_argument_has_one_status_a_reason_or_a_test() -> None:
    for argument in arguments():
        assert argument.status in ("works", "partly", "refused")
        assert argument.reason or argument.status == "works", argument.name
        assert argument.flags, argument.name
    names = [argument.name for argument in arguments()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("row", WORKING, ids=lambda row: row.flags[0])
def test_a_working_argument_is_shown_by_a_comparison(row: SglangArgument) -> None:
    found = [shown for shown in _shown() if shown.flag in row.flags]
    assert found, f"no test carries the mark argument({row.flags[0]!r})"
    for shown in found:
        assert shown.calls & COMPARES, f"{shown.test} compares no start with one without"


@pytest.mark.parametrize(
    "row", [row for row in WORKING if row.path is not None], ids=lambda row: row.flags[0]
)
def test_the_field_of_a_working_argument_is_read_outside_config(row: SglangArgument) -> None:
    path = row.path
    assert path is not None
    name = DECIDES.get(path, path.partition(".")[2])
    assert path not in DECIDES or name in ResolvedConfig.__struct_fields__
    assert name in _read_outside_config(), path


@functools.cache
def _shown() -> tuple[argument_tests.Shown, ...]:
    return argument_tests.shown(Path("tests"))


@functools.cache
def _read_outside_config() -> frozenset[str]:
    """The attributes that production code outside of config reads."""
    files = [
        file
        for folder in ("services", "shared")
        for file in (ROOT / folder).rglob("*.py")
        if "config" not in file.relative_to(ROOT).parts
    ]
    return frozenset(
        node.attr
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    )
