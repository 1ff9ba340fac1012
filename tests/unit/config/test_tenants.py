"""The keys file: what it may say, and how what it may not say is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from antiphon.config.errors import ConfigError
from antiphon.config.tenants import BYTES_MAX, TenantConfig, Tenants, read_tenants

if TYPE_CHECKING:
    from pathlib import Path

A, B = "a" * 64, "b" * 64
TOML = f"""
[tenants.acme]
keys = ["{A}", "{B}"]
requests_per_minute = 60
tokens_per_minute = 1_000
concurrency = 4
priority = 1
priority_max = 2
models = ["small"]

[tenants.default]
concurrency = 2
"""
JSON = f"""{{"tenants": {{"acme": {{"keys": ["{A}", "{B}"], "requests_per_minute": 60,
 "tokens_per_minute": 1000, "concurrency": 4, "priority": 1, "priority_max": 2,
 "models": ["small"]}}, "default": {{"concurrency": 2}}}}}}"""
WANTED = Tenants(
    tenants={
        "acme": TenantConfig(
            keys=(A, B),
            requests_per_minute=60,
            tokens_per_minute=1000,
            concurrency=4,
            priority=1,
            priority_max=2,
            models=("small",),
        ),
        "default": TenantConfig(concurrency=2),
    }
)
KEYED = f"[tenants.a]\nkeys = ['{A}']\n"


@pytest.mark.parametrize(("name", "text"), [("keys.toml", TOML), ("keys.json", JSON)])
def test_both_forms_say_the_same(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    assert read_tenants(str(file)) == WANTED


def test_no_file_has_no_tenants() -> None:
    assert read_tenants("") == Tenants()


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("keys.yaml", "", "must end in .toml or .json"),
        ("keys.toml", "[tenants", "not valid TOML"),
        ("keys.toml", "a = " + "[" * 5000, "not valid TOML"),
        ("keys.json", "{", "not valid JSON"),
        ("keys.json", "\udcff", "not valid JSON"),
        ("keys.toml", "tenant = 1", "unknown field"),
        ("keys.toml", "[tenants.a]\nkeys = ['sk-plain']", r"matching regex.*\$.tenants"),
        ("keys.toml", "[tenants.a]\nkeys = []", "tenant a has no key"),
        ("keys.toml", "[tenants.'a.b']\nkeys = []", "matching regex"),
        ("keys.toml", KEYED + "rpm = 1", "unknown field `rpm`"),
        ("keys.toml", KEYED + "concurrency = 0", ">= 1"),
        ("keys.toml", KEYED + "tokens_burst = 1", "requires tokens_per"),
        ("keys.toml", KEYED + "requests_burst = 1", "requires requests_"),
        ("keys.toml", KEYED + "priority = 1\npriority_max = 0", "must not exceed priority_max"),
        ("keys.toml", KEYED + KEYED.replace("a]", "b]"), "a and b have the same key"),
        ("keys.toml", "#" * (BYTES_MAX + 1), "larger than"),
    ],
)
def test_a_bad_file_is_told_in_one_line_without_its_keys(
    tmp_path: Path, name: str, text: str, reason: str
) -> None:
    file = tmp_path / name
    file.write_text(text, errors="surrogateescape")
    with pytest.raises(ConfigError, match=reason) as caught:
        read_tenants(str(file))
    said = str(caught.value)
    assert said.startswith(f"access.keys_file: {file}: ")
    assert "\n" not in said
    assert "sk-plain" not in said


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: No such file"):
        read_tenants(str(tmp_path / "none.toml"))
