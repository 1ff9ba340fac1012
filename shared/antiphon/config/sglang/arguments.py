"""SGLang's arguments as rows: the setting that each one maps to, or why it is rejected.

The table is `sglang_flags.tsv`. A row's answer is a path (and the translation of its value),
`settled` (true with or without the argument) or `refused`, each with a reason in
`sglang_reasons.tsv`, which follows a sentence about what a rejected argument would do. A rejected
flag is accepted with values that have no effect. `sglang_values.tsv` has the rejected values of
supported arguments, and `argument_tests.tsv`, which is generated, the test of each argument.
"""

from __future__ import annotations

import functools
from importlib import resources
from typing import TYPE_CHECKING, Literal

import msgspec

from antiphon.config.fields import fields

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Status = Literal["works", "partly", "refused"]

PARTLY_HELD = frozenset({"remote_code"})
"""Reasons of settled arguments that are fulfilled only in part."""


class SglangArgument(msgspec.Struct, frozen=True):
    group: str
    """A config group of SGLang 0.5.23, or `Older names`."""
    flags: tuple[str, ...]
    """All its flags; the first is the name of the field, if there is one."""
    takes: str
    """Type and count of its values: `int`, `text+`, `switch` (none), ..."""
    neutral: tuple[str, ...]
    """Values with which a rejected flag has no effect."""
    verdict: str
    """The path of the setting that it sets, `settled` or `refused`."""
    detail: str = ""
    """The name of the value's translation, or of the reason."""
    would: str = ""
    """What a rejected argument would do, after "It would"."""

    @property
    def name(self) -> str:
        return self.flags[0].removeprefix("--").replace("-", "_")

    @property
    def path(self) -> str | None:
        return self.verdict if self.verdict in fields() else None

    @property
    def refused_values(self) -> Mapping[str, str]:
        return values().get(self.flags[0], {})

    @property
    def status(self) -> Status:
        if self.verdict == "refused":
            return "refused"
        if self.refused_values or self.detail in PARTLY_HELD:
            return "partly"
        return "works"

    @property
    def reason(self) -> str:
        """Why it is rejected or has no effect, or which values are rejected and why."""
        if self.verdict == "refused":
            return f"It would {self.would}. {reasons()['refused'][self.detail]}"
        if self.verdict == "settled":
            return reasons()["settled"][self.detail]
        by_reason: dict[str, list[str]] = {}
        for value, reason in self.refused_values.items():
            by_reason.setdefault(reason, []).append(value)
        return " ".join(
            f"{', '.join(refused)}: refused. {why}" for why, refused in by_reason.items()
        )


class ArgumentStatus(msgspec.Struct, frozen=True):
    """One SGLang argument in the output of `antiphon config arguments --json`."""

    name: str
    flags: tuple[str, ...]
    status: Status
    reason: str
    test: str
    """The test that covers it; empty for a rejected one."""


@functools.cache
def rows() -> tuple[SglangArgument, ...]:
    return tuple(_row(*line) for line in _table("sglang_flags.tsv"))


@functools.cache
def reasons() -> Mapping[str, Mapping[str, str]]:
    """Why arguments are `settled` or `refused`: sentences, one per topic, by its name."""
    by_verdict: dict[str, dict[str, str]] = {}
    for verdict, name, reason in _table("sglang_reasons.tsv"):
        by_verdict.setdefault(verdict, {})[name] = reason
    return by_verdict


@functools.cache
def values() -> Mapping[str, Mapping[str, str]]:
    """By main flag: the rejected values of supported arguments, with their reasons."""
    refused: dict[str, dict[str, str]] = {}
    for flag, listed, reason in _table("sglang_values.tsv"):
        names = [listed] if listed.startswith("<") else listed.split(",")
        refused.setdefault(flag, {}).update(dict.fromkeys(names, reason))
    return refused


def arguments() -> tuple[ArgumentStatus, ...]:
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
    text = resources.files("antiphon.config").joinpath(name).read_text("utf-8")
    for line in text.splitlines()[1:]:
        yield line.split("\t")


def _row(
    group: str, flags: str, takes: str, neutral: str, answer: str, would: str
) -> SglangArgument:
    verdict, _, detail = answer.partition(" ")
    accepted = tuple(neutral.split(",")) if neutral else ()
    return SglangArgument(group, tuple(flags.split()), takes, accepted, verdict, detail, would)
