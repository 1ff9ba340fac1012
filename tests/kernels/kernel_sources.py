"""What stands in the source of Triton kernels: who calls whom, and which mutants change a kernel.

Read, and not imported: Triton interprets kernels from its first import on, or never.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from antiphon.kernels.op import REGISTRY
from antiphon.kernels.ops import select  # registers all operations
from antiphon.kernels.triton.backend import SOURCES

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = "antiphon.kernels.triton"
SUFFIX = "_kernel"
"""Of the name of a function that is launched."""
PARITY = Path(__file__).parent / "interpreted" / "parity.py"
Mutant = tuple[str, str, str]
"""A module of kernels, a part of its source, and what is there instead."""


class Part(NamedTuple):
    """A function, class or constant of a module of kernels."""

    module: str
    name: str


def kernels() -> list[str]:
    """Of all kernels, `module.name`."""
    return sorted(map(_title, filter(_is_kernel, _calls())))


def operations_of(kernel: str) -> list[str]:
    """The operations whose Triton backend launches it."""
    assert select, "all operations are registered"
    found: set[str] = set()
    for name, op in REGISTRY.items():
        for backend in op.backends if not name.startswith("test.") else ():
            for target in filter(None, (backend.target, backend.fixed)):
                place, _, function = target.partition(":")
                part = Part(place.removeprefix(f"{PACKAGE}."), function)
                reached = map(_title, filter(_is_kernel, _reached(part)))
                if backend.name == "triton" and kernel in reached:
                    found.add(name)
    return sorted(found)


def mutants_of(kernel: str) -> list[Mutant]:
    """The mutants that must be found of it, of functions that it calls, and of its launches."""
    return [mutant for mutant in mutants() if kernel in changed_kernels(mutant)]


@cache
def changed_kernels(mutant: Mutant) -> frozenset[str]:
    """The kernels that a mutant changes, or that are launched by what it changes.

    What launches nothing itself counts for what its callers launch.
    """
    found: set[Part] = set()
    for part in changed_parts(mutant):
        callers = {each for each in _calls() if part in _reached(each)}
        launched = _calls()[part] if any(map(_is_kernel, _calls()[part])) else frozenset[Part]()
        found |= launched | callers
        if not any(map(_is_kernel, found)):
            found = found.union(*(_calls()[each] for each in callers))
    return frozenset(map(_title, filter(_is_kernel, found)))


@cache
def mutants() -> tuple[Mutant, ...]:
    """The registry of mutants of kernels."""
    for statement in ast.parse(PARITY.read_text()).body:
        if isinstance(statement, ast.AnnAssign) and ast.unparse(statement.target) == "MUTANTS":
            assert isinstance(statement.value, ast.List), "a list of tuples"
            rows = (row.elts[:3] for row in statement.value.elts if isinstance(row, ast.Tuple))
            module_old_new = (tuple(map(ast.literal_eval, row)) for row in rows)
            return tuple((module, old, new) for module, old, new in module_old_new)
    raise AssertionError(f"{PARITY} has no MUTANTS")


def changed_parts(mutant: Mutant) -> list[Part]:
    """The parts of a module that a mutant changes."""
    module, old, _ = mutant
    source = (SOURCES / f"{module}.py").read_text()
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    found: list[Part] = []
    for part, begin, end in _parts(module):
        at = source.find(old, lines[begin - 1], lines[end] + len(old) - 1)
        if 0 <= at < lines[end]:
            found.append(part)
    return found


def _title(part: Part) -> str:
    return f"{part.module}.{part.name.removesuffix(SUFFIX)}"


def _is_kernel(part: Part) -> bool:
    return part.name.endswith(SUFFIX)


@cache
def _reached(part: Part) -> set[Part]:
    """The part, and all that it names, and these name in turn."""
    found, pending = {part}, [part]
    while pending:
        for each in _calls().get(pending.pop(), ()):
            if each not in found:
                found.add(each)
                pending.append(each)
    return found


@cache
def _calls() -> dict[Part, frozenset[Part]]:
    """The parts that each part names."""
    bodies = {path.stem: _body(path.stem) for path in SOURCES.glob("*.py")}
    parts = {name: {part.name: part for part, *_ in _parts(name)} for name in bodies}
    found: dict[Part, frozenset[Part]] = {}
    for module, body in bodies.items():
        known = dict(parts[module])
        for statement in body:
            if not isinstance(statement, ast.ImportFrom):
                continue
            for each in statement.names:
                if statement.module == PACKAGE:
                    whole = parts[each.name]
                    known |= {f"{each.name}.{name}": part for name, part in whole.items()}
                place = str(statement.module).removeprefix(f"{PACKAGE}.")
                if each.name in parts.get(place, ()):
                    known[each.name] = parts[place][each.name]
        for statement in body:
            named = {known[name] for name in _names(statement) if name in known}
            for name in _bound(statement):
                found[parts[module][name]] = frozenset(named)
    return found


def _names(statement: ast.stmt) -> set[str]:
    """What it names, and has not named itself: those of a module with the module's in front."""
    names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
    own = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    own |= {node.arg for node in ast.walk(statement) if isinstance(node, ast.arg)}
    members = {
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(statement)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    return {node.id for node in names} - own | members


def _bound(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return [
        node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)
    ]


@cache
def _body(module: str) -> list[ast.stmt]:
    return ast.parse((SOURCES / f"{module}.py").read_text()).body


def _parts(module: str) -> Iterator[tuple[Part, int, int]]:
    """With their first and last lines."""
    for statement in _body(module):
        for name in _bound(statement):
            decorators = getattr(statement, "decorator_list", [])
            begin = min([statement.lineno, *(each.lineno for each in decorators)])
            assert statement.end_lineno is not None, "what was parsed has lines"
            yield Part(module, name), begin, statement.end_lineno
