"""Writes the reference page of the settings."""

from __future__ import annotations

from itertools import groupby

from tests.support.markdown import DOCS, table

from antiphon.config.fields import Group, SettingField, groups
from antiphon.config.sglang_arguments import SglangArgument, rows

PAGE = DOCS / "reference/configuration.md"

HEAD = """# Configuration

<!-- Written by `make docs`; change the structs in antiphon.config. -->

Every setting has four names: its path, as in `batching.tokens_max`, which is also its place in a
YAML file; the flag `--batching-tokens-max`; and the variable `ANTIPHON_BATCHING__TOKENS_MAX`.
Later sources override earlier ones: defaults, YAML (`--config FILE`), environment, flags. Unknown
settings, wrong types and values out of bounds are rejected with an error that names the source and
the path. `null` unsets an optional setting. Secrets are read from the environment only.
`antiphon config` prints the settings in force and the source of each.

```yaml
batching:
  tokens_max: 4096
telemetry:
  log_level: debug
```
"""

SGLANG_HEAD = """## SGLang's flags

`antiphon serve` accepts SGLang's command lines, and its flat YAML files through `--config`. Each
argument works, works partly, or is refused with a reason. Refused arguments are accepted with the
values in the third column, which have no effect. `antiphon config arguments --json` lists the same
arguments with the test of each.
"""


def page() -> str:
    sections = [HEAD, *map(_group, groups()), SGLANG_HEAD + "\n" + _sglang()]
    return "\n".join(sections)


def _group(group: Group) -> str:
    lines = [f"## {group.name}", "", group.title, ""]
    lines += table(
        ("path", "flag and variable", "type", "default", "meaning"), map(_setting, group.fields)
    )
    return "\n".join(lines) + "\n"


def _setting(field: SettingField) -> tuple[str, ...]:
    names = f"`{field.variable}`" if field.secret else f"`{field.flag}` `{field.variable}`"
    return f"`{field.path}`", names, _type(field), _default(field), field.help


def _type(field: SettingField) -> str:
    words = " · ".join(f"`{choice}`" for choice in field.choices) or field.kind
    notes = [note for note in (field.unit, f"`{field.bounds}`" if field.bounds else "") if note]
    return ", ".join([words, *notes, *(["or null"] if field.optional else [])])


def _default(field: SettingField) -> str:
    if field.default is None:
        return "unset"
    return f"`{field.default}`" if field.default != "" else "empty"


def _sglang() -> str:
    sections: list[str] = []
    for concern, members in groupby(rows(), key=lambda row: row.group):
        lines = table(("flag", "status", "accepted", "here"), map(_alias, members))
        sections.append("\n".join([f"### {concern}", "", *lines]) + "\n")
    return "\n".join(sections)


def _alias(row: SglangArgument) -> tuple[str, ...]:
    flags = " ".join(f"`{flag}`" for flag in row.flags)
    if row.path is not None:
        accepted = "other values" if row.refused_values else "any"
        return flags, row.status, accepted, f"Sets `{row.path}`. {row.reason}".strip()
    if row.verdict == "settled":
        return flags, row.status, "any", row.reason
    neutral = " ".join(f"`{value}`" for value in row.neutral)
    return flags, row.status, neutral, row.reason
