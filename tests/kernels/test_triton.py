from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from antiphon.kernels.op import REGISTRY
from antiphon.kernels.ops import select  # registers all operations

FOLDER = Path(__file__).parent / "interpreted"
COSTLY = "mutants and (attention or expert or latent or page or recurrent or sampling or split)"


@pytest.mark.timeout(300)
def test_triton_kernels_equal_their_references() -> None:
    """In one process with what they rely on: importing torch and Triton takes seconds."""
    run_interpreted("instruments.py", "parity.py", "stages.py", "-k", f"not ({COSTLY})")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_costly_mutants_are_found() -> None:
    run_interpreted("parity.py", "-k", COSTLY)


@pytest.mark.timeout(300)
def test_models_generate_the_same_on_triton_kernels() -> None:
    run_interpreted("models.py", "ranks.py", "tapes.py", "streams.py", "invariance.py")


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_workers_run_with_many_seeds_of_streams() -> None:
    run_interpreted("-m", "long", "streams.py")


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_what_takes_longer_runs_on_the_interpreter() -> None:
    run_interpreted("-m", "long", "invariance.py", "models.py", "ranks.py", "stages.py")


def test_every_triton_row_has_a_case() -> None:
    """The cases of the interpreter are those of a GPU, too: what they leave out, nothing runs."""
    assert select, "all operations are registered"
    targets = {
        tuple(target.removeprefix("antiphon.kernels.triton.").split(":"))
        for name, op in REGISTRY.items()
        if not name.startswith("test.")
        for backend in op.backends
        if backend.name == "triton"
        for target in filter(None, (backend.target, backend.fixed))
    }
    functions = functions_of(FOLDER / "checks.py")
    called = {
        (kernels, function)
        for check, place, kernels in checks_of(FOLDER / "parity.py")
        for function in functions.get((check, place), ())
    }
    assert len(targets) > 20
    assert targets <= called


def functions_of(path: Path) -> dict[tuple[str, int], set[str]]:
    """What each check reads of each of its parameters that is a module, by its place."""
    found: dict[tuple[str, int], set[str]] = {}
    for check in ast.parse(path.read_text()).body:
        if not isinstance(check, ast.FunctionDef):
            continue
        for place, parameter in enumerate(check.args.args):
            kind = parameter.annotation
            if isinstance(kind, ast.Name) and kind.id == "Module":
                found[check.name, place] = {
                    node.attr
                    for node in ast.walk(check)
                    if isinstance(node, ast.Attribute)
                    if isinstance(node.value, ast.Name) and node.value.id == parameter.arg
                }
    return found


def checks_of(path: Path) -> set[tuple[str, int, str]]:
    """The checks that tests call, and the module of kernels in each place."""
    return {
        (call.func.attr, place, given.id)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
        if isinstance(call.func.value, ast.Name) and call.func.value.id == "checks"
        for place, given in enumerate(call.args)
        if isinstance(given, ast.Name)
    }


def run_interpreted(*words: str) -> None:
    """Run the tests of files, the words that end in .py.

    In a process of its own: Triton interprets kernels from its first import on, or never.
    """
    words = tuple(str(FOLDER / word) if word.endswith(".py") else word for word in words)
    words = ("-q", "-p", "no:cacheprovider", "--timeout", "300", "--durations", "8", *words)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        capture_output=True,
        check=False,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout
