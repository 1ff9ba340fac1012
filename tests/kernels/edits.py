"""Edits of source that a test must find."""

from __future__ import annotations

import inspect
import sys
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    import pytest


class Edit(NamedTuple):
    """A part of a module's source, and what is there instead."""

    name: str
    module: ModuleType
    old: str
    new: str

    @contextmanager
    def applied(self) -> Generator[None]:
        """The functions that have it run the other code, wherever they were imported."""
        assert self.module.__file__ is not None
        path = Path(self.module.__file__)
        source = path.read_text()
        assert source.count(self.old) == 1, f"{self.name}: the mutant no longer applies"
        mutant = ModuleType(self.module.__name__)
        exec(compile(source.replace(self.old, self.new), path, "exec"), vars(mutant))
        right = dict(_functions_of(self.module))
        codes = {name: function.__code__ for name, function in right.items()}
        try:
            for name, function in _functions_of(mutant):
                right[name].__code__ = function.__code__
            yield
        finally:
            for name, function in right.items():
                function.__code__ = codes[name]


def edited(old: str, new: str, *modules: ModuleType, patch: pytest.MonkeyPatch) -> ModuleType:
    """Copies of modules, each of which imports from those before it; one of them has other source.

    They are found in place of the modules while the patch holds. Returns the last one.
    """
    sources = {module.__name__: Path(str(module.__file__)).read_text() for module in modules}
    found = sum(source.count(old) for source in sources.values())
    assert found == 1, "the mutant no longer applies"
    copies: list[ModuleType] = []
    for name, source in sources.items():
        copies.append(ModuleType(name))
        patch.setitem(sys.modules, name, copies[-1])  # where an import looks, and a dataclass
        exec(compile(source.replace(old, new), name, "exec"), vars(copies[-1]))
    return copies[-1]


def _functions_of(module: ModuleType) -> Iterator[tuple[str, FunctionType]]:
    """Those that it defines, alone and in its classes, beneath decorators."""
    for name, value in vars(module).items():
        members = {name: value}
        if isinstance(value, type):
            members = {f"{name}.{member}": each for member, each in vars(value).items()}
        for place, member in members.items():
            function = inspect.unwrap(member) if callable(member) else member
            if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                yield place, function
