"""The code and its help speak the field's language, and of the project alone."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from antiphon.config.fields import Group, SettingField, fields, groups

ROOT = Path(__file__).resolve().parents[2]
CODE = sorted(p for s in ("services", "shared", "kernels") for p in (ROOT / s).rglob("*.py"))
PRIVATE = re.compile(
    r"\b(told|tells?|telling|whoever|nobody|somebody|anybody|everybody|hears?|heard|speech|spoken)\b",
    re.IGNORECASE,
)
QUOTED = {
    ("services/antiphon/gateway/http/openai/responses/store.py", "told"),  # a stored key
    ("shared/antiphon/model_card/weight_headers.py", "tell"),  # of a file
}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_code_has_no_private_words() -> None:
    found = {
        (relative(path), match[0].lower())
        for path in CODE
        for match in PRIVATE.finditer(path.read_text())
    }
    assert found == QUOTED


def test_prefill_is_the_workers_word() -> None:
    worker = (path for path in CODE if "model_worker" in path.parts)
    assert sum(len(re.findall(r"\bprefill", path.read_text())) for path in worker) > 60


def test_batching_knows_no_device() -> None:
    batching = [path for path in CODE if "batching" in path.parts]
    assert len(batching) > 20
    named = re.compile("cuda|nccl|triton", re.IGNORECASE)
    assert [relative(path) for path in batching if named.search(path.read_text())] == []


def test_class_names_are_defined_once() -> None:
    counts = Counter(
        node.name
        for path in CODE
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, count in counts.items() if count > 1} == set()


QUALIFIERS = {"Maximum", "Minimum", "Whether", "Enable"}
NOUNS = set(
    """Address API Backend Branch Buckets Conservativeness Data Delay Device Duration Endpoint
    Eviction Factor File Folder Format Host HTTP Implementation Interval JSON Length Level List
    Load Mode Model Name Names Number Order Origins Parser Password Path PEM Policy Port
    Quantization Ratio Retention Salt Sampling Secret Seed SHA-256 Size Source Storage Targets Time
    Timeout TOML Type URL URLs User Value Version Weight
    """.split()  # noqa: SIM905  # a table of words is easier to extend as a text
)
"""Nouns, and first words of compound nouns, that a help text begins with; add what is missing."""
ADJECTIVES = {"Default", "First", "Mean"}
"""Adjectives that may stand before the noun."""
BANNED = re.compile(
    r"\b(told|tells?|telling|says?|said|hears?|heard|speaks?|speech|spoken|asks?|asked|who"
    r"|whoever|nobody|somebody|anybody|everybody|likewise|beginnings?)\b",
    re.IGNORECASE,
)
UNITS = {
    "s": "in seconds",
    "bytes": "in bytes",
    "pixels": "in pixels",
    "characters": "in characters",
    "tokens": "tokens",
    "steps": "steps",
}
"""Words for a unit of the type, as the help spells them."""


def faults(text: str, kind: str = "text", unit: str = "") -> list[str]:
    """What the rule has against a help text."""
    first = re.split(r"[\s,:;.]", text, maxsplit=1)[0]
    found = [f"says {match.group()!r}" for match in BANNED.finditer(text)]
    if first not in QUALIFIERS | NOUNS | ADJECTIVES:
        found.append(f"begins with {first!r}")
    if (kind == "boolean") != (first in ("Whether", "Enable")):
        found.append("Whether and Enable are for booleans, and booleans begin so")
    if UNITS.get(unit, "") not in text:
        found.append(f"lacks the unit: {UNITS[unit]!r}")
    if not text.endswith("."):
        found.append("has no full stop")
    return found


@pytest.mark.parametrize("field", fields().values(), ids=lambda field: field.path)
def test_help_of_a_setting_follows_the_style(field: SettingField) -> None:
    assert faults(field.help, field.kind, field.unit) == []


@pytest.mark.parametrize("group", groups(), ids=lambda group: group.name)
def test_title_of_a_group_uses_no_banned_word(group: Group) -> None:
    assert group.title.endswith(".")
    assert not BANNED.search(group.title)
    assert group.title.split()[0] not in ("How", "What", "Where", "Which", "Who", "When", "Why")


@pytest.mark.parametrize(
    ("text", "kind", "unit"),
    [
        ("Most tokens in one forward pass.", "integer", "tokens"),
        ("How long a response is kept.", "number", ""),
        ("What the weights are called.", "text", ""),
        ("Where the model runs.", "choice", ""),
        ("Whose layers run.", "choice", ""),
        ("A request that has run for longer ends with an error.", "number", ""),
        ("Keep what was computed.", "boolean", ""),
        ("Tell schedulers what is kept.", "boolean", ""),
        ("Host that they are told.", "text", ""),
        ("SHA-256 of the model's content, verified by whoever loads it.", "text", ""),
        ("Maximum time for a process to exit.", "number", "s"),
        ("Folder of the dumps", "text", ""),
        ("Number of streams.", "boolean", ""),
        ("Whether it is large.", "integer", ""),
    ],
)
def test_the_rule_rejects_other_beginnings_and_words(text: str, kind: str, unit: str) -> None:
    assert faults(text, kind, unit) != []


BINARY = {".safetensors", ".png", ".bin", ".hex", ".msgpack"}
TOO_LONG_TO_READ = {"tokenizer.json"}


def files() -> list[Path]:
    """Everything that is, or would be, committed."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    paths = [ROOT / name for name in listed]
    return [
        p
        for p in paths
        if p.is_file() and p.suffix not in BINARY and p.name not in TOO_LONG_TO_READ
    ]


# Spelled in pieces, so that this file does not contain them.
FORBIDDEN = ["TO" + "DO", "FIX" + "ME", "/wor" + "k/", "../sha" + "red", "/opt/py" + "pi"]


@pytest.mark.parametrize("word", FORBIDDEN)
def test_no_file_says(word: str):
    found = [
        str(path.relative_to(ROOT))
        for path in files()
        if path.name != "test_words.py" and word in path.read_text(errors="replace")
    ]
    assert found == []
