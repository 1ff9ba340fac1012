"""How a test shows an SGLang argument: a start with it beside one without."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import pytest

from antiphon.config.errors import ConfigError
from antiphon.config.load import Loaded, load
from antiphon.config.sglang_arguments import serve_parser

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from antiphon.config.settings import Settings

T = TypeVar("T")


def shows(flag: str, *values: object):
    """Return a parameter of a test that shows `flag`, which is its first value."""
    return pytest.param(flag, *values, marks=pytest.mark.argument(flag), id=flag)


PARSER = serve_parser("antiphon serve", "")


def loaded(*arguments: str) -> Loaded:
    """Read settings as `antiphon serve` does, from arguments alone."""
    typed = PARSER.parse(arguments)
    return load(typed.config_file, typed.settings, implied=typed.implied, environ={})


def settings_of(*arguments: str) -> Settings:
    return loaded(*arguments).settings


def refusal(*arguments: str) -> str:
    """Return what is said against the arguments, which are refused."""
    with pytest.raises(ConfigError) as caught:
        settings_of(*arguments)
    return str(caught.value)


def compare(
    *arguments: str | None, observe: Callable[[Settings], T], base: Sequence[str] = ()
) -> tuple[T, T]:
    """Observe a start with the arguments and one without; they must differ.

    Args:
        arguments: What is shown; None is the value of a switch.
        observe: What the settings do to production code.
        base: Arguments of both starts.
    """
    typed = [argument for argument in arguments if argument is not None]
    given, without = observe(settings_of(*base, *typed)), observe(settings_of(*base))
    assert given != without, f"{' '.join(typed)} changes nothing: {given}"
    return given, without


async def compare_async(
    *arguments: str, observe: Callable[[Settings], Awaitable[T]], base: Sequence[str] = ()
) -> tuple[T, T]:
    """Do what `compare` does with a coroutine."""
    given = await observe(settings_of(*base, *arguments))
    without = await observe(settings_of(*base))
    assert given != without, f"{' '.join(arguments)} changes nothing: {given}"
    return given, without


def compare_equal(*arguments: str, observe: Callable[[Settings], T], base: Sequence[str] = ()) -> T:
    """Observe what holds with the arguments and without them."""
    given, without = observe(settings_of(*base, *arguments)), observe(settings_of(*base))
    assert given == without, f"{' '.join(arguments)} changes {without} to {given}"
    return given


async def compare_equal_async(
    *arguments: str, observe: Callable[[Settings], Awaitable[T]], base: Sequence[str] = ()
) -> T:
    """Do what `compare_equal` does with a coroutine."""
    given = await observe(settings_of(*base, *arguments))
    without = await observe(settings_of(*base))
    assert given == without, f"{' '.join(arguments)} changes {without} to {given}"
    return given
