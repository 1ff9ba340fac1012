"""The folder tree and the import graph are what the architecture says."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("services", "shared", "kernels")
TOP = {
    "services", "shared", "kernels", "compose", "tests", "docs",
    "Makefile", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE",
    "pyproject.toml", "constraints.txt", "mkdocs.yml",
}  # fmt: skip
SERVICES = sorted(p.name for p in (ROOT / "services/antiphon").iterdir() if p.is_dir())
CODE = sorted(p for s in SOURCES for p in (ROOT / s).rglob("*.py") if "__pycache__" not in p.parts)
ENTRY_POINTS = {"__main__", "wheel_hook"}
"""Modules that nothing imports: `python -m` runs them, or the build of a wheel."""


def name_of(path: Path) -> str:
    """`shared/antiphon/wire/ids.py` is `antiphon.wire.ids`."""
    parts = path.relative_to(ROOT).with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(node: ast.AST) -> list[str]:
    match node:
        case ast.Import(names):
            return [alias.name for alias in names]
        case ast.ImportFrom(str(module), names):
            return [module, *(f"{module}.{alias.name}" for alias in names)]
        case _:
            return []


@cache
def imports_of(path: Path) -> frozenset[str]:
    """What a file imports, wherever in it: modules, and names as `module.name`."""
    tree = ast.parse(path.read_text())
    return frozenset(name for node in ast.walk(tree) for name in imported(node))


def test_the_top_level_holds_what_the_architecture_names():
    visible = {p.name for p in ROOT.iterdir() if not p.name.startswith(".")}
    assert visible - {"build", "dist", "site", "compile_commands.json"} == TOP


def test_what_is_pinned_installs_on_the_python_that_debian_has():
    pinned = (ROOT / "constraints.txt").read_text()
    needs = dict[str, SpecifierSet]()
    for each in distributions():
        about, pin = each.metadata, f"{each.name}=={each.version}"
        if f"\n{pin}\n" in pinned and "Requires-Python" in about:
            needs[pin] = SpecifierSet(about["Requires-Python"])
    assert len(needs) > 100, "names of installed packages are those of constraints.txt"
    assert [pin for pin, need in needs.items() if not need.contains("3.11.2")] == []


@pytest.mark.parametrize("source", SOURCES)
def test_the_namespace_folder_is_no_package(source: str):
    assert not (ROOT / source / "antiphon/__init__.py").exists()
    packages = [p for p in (ROOT / source / "antiphon").iterdir() if p.is_dir()]
    assert [p for p in packages if not (p / "__init__.py").exists() and p.name[0] != "_"] == []


def test_the_import_contracts_name_every_package():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    packages = {
        f"antiphon.{p.name}"
        for s in SOURCES
        for p in (ROOT / s / "antiphon").iterdir()
        if p.is_dir() and p.name[0] != "_"
    }
    assert set(settings["root_packages"]) == packages


def test_production_code_imports_no_tests():
    imports = {(name_of(path), name) for path in CODE for name in imports_of(path)}
    assert {(module, name) for module, name in imports if name.split(".")[0] == "tests"} == set()


def imported_names() -> set[str]:
    """Every module that code or tests import, or name in a string as `module:Name`."""
    names: set[str] = set()
    for path in [*CODE, *(ROOT / "tests").rglob("*.py")]:
        names.update(imports_of(path))
        names.update(re.findall(r"\"(antiphon(?:\.\w+)+)[:\"]", path.read_text()))
    return names


def test_every_module_is_imported_or_run():
    makefile = (ROOT / "Makefile").read_text()
    imported = imported_names()
    unused = [
        name
        for path in CODE
        if path.stem not in ENTRY_POINTS | {"__init__"}
        and (name := name_of(path)) not in imported
        and name not in makefile
    ]
    assert unused == []


def test_every_string_that_names_code_resolves():
    """`"module:Name"` is invisible to the import linter, on purpose; here it is seen."""
    named = [
        (path, *found)
        for path in CODE
        for found in re.findall(r"\"(antiphon(?:\.\w+)+):(\w+)\"", path.read_text())
    ]
    assert named
    modules = {name_of(path): path for path in CODE}
    for path, module, name in named:
        assert module in modules, f"{path}: no module {module}"
        assert name in defined_in(modules[module]), f"{path}: no {name} in {module}"


@cache
def defined_in(path: Path) -> frozenset[str]:
    """The names that a file defines."""
    tree = ast.parse(path.read_text())
    defined = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    targets = [t for n in tree.body if isinstance(n, ast.Assign) for t in n.targets]
    targets += [n.target for n in tree.body if isinstance(n, ast.AnnAssign)]
    return frozenset(defined | {t.id for t in targets if isinstance(t, ast.Name)})


def test_only_the_makefile_s_own_verbs_are_in_its_help():
    text = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", text, re.MULTILINE))
    helped = set(re.findall(r"^([a-z-]+):.*## ", text, re.MULTILINE))
    assert targets == helped


OPENS = {"from_file", "from_buffer", "from_pretrained"}
"""What opens a tokenizer of somebody's file, with the padding and truncation that it asks for."""


def test_tokenizers_of_models_are_opened_in_one_place():
    texts = {path: path.read_text() for path in CODE}
    openers = {
        name_of(path)
        for path, text in texts.items()
        if any(name in text for name in OPENS)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and node.attr in OPENS
        if isinstance(node.value, ast.Name) and node.value.id == "Tokenizer"
    }
    assert openers == {"antiphon.model_card.tokenizer_file"}


def test_one_small_file_uses_the_private_members_of_nats_py():
    private = [
        p for p in CODE if "# ruff: noqa: SLF001" in (text := p.read_text()) and "nats" in text
    ]
    assert [path.relative_to(ROOT).as_posix() for path in private] == [
        "shared/antiphon/bus/connection.py"
    ]
    assert len(private[0].read_text().splitlines()) <= 150


ONE_IMPORTER_SHARE_MAX = 0.23
"""Of all modules: a file that one other imports may be a part of that."""
BATCHING_LEVELS_MAX = 9
SAMPLING_FILES_MAX = 6


@cache
def graph() -> dict[str, set[str]]:
    """The production modules that each production module imports."""
    modules = {name_of(path): path for path in CODE}
    return {
        module: {name for name in imports_of(path) if name in modules and name != module}
        for module, path in modules.items()
    }


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
    once = sum(count == 1 for count in importers.values())
    assert once <= ONE_IMPORTER_SHARE_MAX * len(graph())


def test_batching_has_few_levels() -> None:
    assert levels("antiphon.model_worker.batching.") <= BATCHING_LEVELS_MAX


def test_sampling_fields_are_spelled_in_few_files() -> None:
    spelling = [path for path in CODE if re.search(r"\bmin_p\b", path.read_text())]
    assert len(spelling) <= SAMPLING_FILES_MAX, spelling
