"""SGLang's arguments as rows: what each one sets here, or why it is refused.

The table is `sglang_flags.tsv`. A row's answer is a path (and how its value is written here),
`settled` (it holds already, typed or not) or `refused`, each with a reason of `REASONS`. A refused
flag is accepted with the values that change nothing.
"""

from __future__ import annotations

import functools
from importlib import resources

import msgspec

from antiphon.config.fields import fields
from antiphon.config.reasons import REASONS


class Row(msgspec.Struct, frozen=True):
    """One SGLang argument.

    Attributes:
        group: The heading it stands under in SGLang's help.
        flags: All its spellings; the first is the main one.
        takes: Type and count of its values: `int`, `text+`, `switch` (none), ...
        neutral: Values with which a refused flag changes nothing.
        answer: `<path> [spelling]`, `settled <reason>` or `refused <reason>`.
    """

    group: str
    flags: tuple[str, ...]
    takes: str
    neutral: tuple[str, ...]
    answer: str

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
    def reason(self) -> str:
        """Why it is settled or refused."""
        return REASONS[self.detail]


@functools.cache
def rows() -> tuple[Row, ...]:
    """Every SGLang argument, in the order of its help."""
    table = resources.files("antiphon.config").joinpath("sglang_flags.tsv").read_text("utf-8")
    return tuple(_row(*line.split("\t")) for line in table.splitlines()[1:])


def _row(group: str, flags: str, takes: str, neutral: str, answer: str) -> Row:
    return Row(
        group=group,
        flags=tuple(flags.split()),
        takes=takes,
        neutral=tuple(neutral.split(",")) if neutral else (),
        answer=answer,
    )
