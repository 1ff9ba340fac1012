"""Edits of source that a test must find."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator


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
