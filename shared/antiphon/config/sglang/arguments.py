"""SGLang's arguments as rows: what each one sets here, or why it is refused.

The table is `sglang_flags.tsv`. A row's answer is a path (and how its value is written here),
`settled` (it holds already, given or not) or `refused`, each with a reason of `reasons.py`; a
refused row also says what the argument would do. A refused flag is accepted with the values that
change nothing. `sglang_values.tsv` holds the refused values of arguments that work otherwise, and
`argument_tests.tsv`, which is generated, the test of each.
"""

from __future__ import annotations

import functools
from importlib import resources
from typing import TYPE_CHECKING, Literal

import msgspec

from antiphon.config.fields import fields
from antiphon.config.sglang.reasons import HOLDS, REFUSED

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Status = Literal["works", "partly", "refused"]

PARTLY_HELD = frozenset({"remote_code"})
"""Entries of `HOLDS` that keep a part of what the argument promises."""


class SglangArgument(msgspec.Struct, frozen=True):
    """One SGLang argument.

    Attributes:
        group: Its concern: a config group of SGLang 0.5.23, or `Older names`.
        flags: All its spellings; the first is the name of the field, where there is one.
        takes: Type and count of its values: `int`, `text+`, `switch` (none), ...
        neutral: Values with which a refused flag changes nothing.
        answer: `<path> [spelling]`, `settled <reason>` or `refused <reason>`.
        would: What a refused argument would do, after "It would".
    """

    group: str
    flags: tuple[str, ...]
    takes: str
    neutral: tuple[str, ...]
    answer: str
    would: str = ""

    @property
    def name(self) -> str:
        """The name of SGLang's field."""
        return self.flags[0].removeprefix("--").replace("-", "_")

    @property
    def verdict(self) -> str:
        """A path, `settled` or `refused`."""
        return self.answer.partition(" ")[0]

    @property
    def detail(self) -> str:
        """How the value is written here, or the key of the reason."""
        return self.answer.partition(" ")[2]

    @property
    def path(self) -> str | None:
        """The setting it sets, if it sets one."""
        return self.verdict if self.verdict in fields() else None

    @property
    def refused_values(self) -> Mapping[str, str]:
        """The reason of each value that is refused although the argument works."""
        return values().get(self.flags[0], {})

    @property
    def status(self) -> Status:
        """Whether production does what the argument says."""
        if self.verdict == "refused":
            return "refused"
        if self.refused_values or self.detail in PARTLY_HELD:
            return "partly"
        return "works"

    @property
    def reason(self) -> str:
        """Why it is refused or holds already, or which values are refused and why."""
        if self.verdict == "refused":
            return f"It would {self.would}. {REFUSED[self.detail]}"
        if self.verdict == "settled":
            return HOLDS[self.detail]
        by_reason: dict[str, list[str]] = {}
        for value, reason in self.refused_values.items():
            by_reason.setdefault(reason, []).append(value)
        return " ".join(
            f"{', '.join(refused)}: refused. {why}" for why, refused in by_reason.items()
        )


class ArgumentStatus(msgspec.Struct, frozen=True):
    """One SGLang argument as `antiphon config arguments --json` lists it."""

    name: str
    flags: tuple[str, ...]
    status: Status
    reason: str
    test: str
    """The test that shows it; empty for a refused one."""


@functools.cache
def rows() -> tuple[SglangArgument, ...]:
    """Every SGLang argument, by concern."""
    return tuple(_row(*line) for line in _table("sglang_flags.tsv"))


@functools.cache
def values() -> Mapping[str, Mapping[str, str]]:
    """By main flag: the refused values of arguments that work, each with its reason."""
    refused: dict[str, dict[str, str]] = {}
    for flag, listed, reason in _table("sglang_values.tsv"):
        names = [listed] if listed.startswith("<") else listed.split(",")
        refused.setdefault(flag, {}).update(dict.fromkeys(names, reason))
    return refused


def arguments() -> tuple[ArgumentStatus, ...]:
    """Every SGLang argument with its status and the test that shows it."""
    tests = dict(_table("argument_tests.tsv"))
    return tuple(
        ArgumentStatus(
            name=row.name,
            flags=row.flags,
            status=row.status,
            reason=row.reason,
            test="" if row.status == "refused" else tests.get(row.flags[0], ""),
        )
        for row in rows()
    )


def _table(name: str) -> Iterator[list[str]]:
    """The lines below the head of one of our tables."""
    text = resources.files("antiphon.config").joinpath(name).read_text("utf-8")
    for line in text.splitlines()[1:]:
        yield line.split("\t")


def _row(
    group: str, flags: str, takes: str, neutral: str, answer: str, would: str
) -> SglangArgument:
    return SglangArgument(
        group=group,
        flags=tuple(flags.split()),
        takes=takes,
        neutral=tuple(neutral.split(",")) if neutral else (),
        answer=answer,
        would=would,
    )
