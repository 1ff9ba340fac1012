"""The shape of the import graph; imports for types and inside functions count like all others."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter

from tests.tidy.test_layout import CODE, name_of

ONE_IMPORTER_MAX = 110
BATCHING_LEVELS_MAX = 9
SAMPLING_FILES_MAX = 6


@cache
def graph() -> dict[str, set[str]]:
    """The production modules that each production module imports."""
    modules = {name_of(path): ast.parse(path.read_text()) for path in CODE}
    return {
        module: {
            name
            for node in ast.walk(tree)
            for name in imported(node)
            if name in modules and name != module
        }
        for module, tree in modules.items()
    }


def imported(node: ast.AST) -> list[str]:
    match node:
        case ast.Import(names):
            return [alias.name for alias in names]
        case ast.ImportFrom(str(module), names):
            return [module, *(f"{module}.{alias.name}" for alias in names)]
        case _:
            return []


def levels(package: str) -> int:
    """The length of the longest chain of imports inside a package."""
    inside = {
        module: {name for name in names if name.startswith(package)}
        for module, names in graph().items()
        if module.startswith(package)
    }
    depth: dict[str, int] = {}
    for module in TopologicalSorter(inside).static_order():
        depth[module] = 1 + max((depth[name] for name in inside[module]), default=0)
    return max(depth.values())


def test_no_modules_import_each_other() -> None:
    TopologicalSorter(graph()).prepare()  # raises CycleError, which names the circle


def test_few_files_have_one_importer() -> None:
    importers = Counter(name for names in graph().values() for name in names)
    assert sum(count == 1 for count in importers.values()) < ONE_IMPORTER_MAX


def test_batching_has_few_levels() -> None:
    assert levels("antiphon.model_worker.batching.") <= BATCHING_LEVELS_MAX


def test_sampling_fields_are_spelled_in_few_files() -> None:
    spelling = [path for path in CODE if re.search(r"\bmin_p\b", path.read_text())]
    assert len(spelling) <= SAMPLING_FILES_MAX, spelling
