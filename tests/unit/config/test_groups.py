"""Each group of settings refuses what could never work."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.arguments import settings_of

from antiphon.config import gateway
from antiphon.config.errors import ConfigError
from antiphon.config.gateway import AccessConfig
from antiphon.config.load import load
from antiphon.config.model import TEMPLATES, ModelConfig
from antiphon.config.tenants import BYTES_MAX, TenantConfig, Tenants, read_tenants

if TYPE_CHECKING:
    from pathlib import Path


def test_origins_are_origins() -> None:
    one = AccessConfig(allowed_origins="https://a.example, http://localhost:8080,")
    assert one.origins == {"https://a.example", "http://localhost:8080"}
    assert AccessConfig().origins == frozenset()
    for bad in ("https://a.example/", "a.example", "https://a.example/x", "*.example"):
        with pytest.raises(ConfigError, match="not an origin"):
            load(environ={"ANTIPHON_ACCESS__ALLOWED_ORIGINS": bad})


def test_a_key_that_fits_no_header_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        load(environ={"ANTIPHON_ACCESS__API_KEY": "two words"})
    assert "two words" not in str(caught.value)


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


@pytest.mark.parametrize("said", ["", "form.json", *(template.name for template in TEMPLATES)])
def test_a_name_or_a_file_is_taken(said: str) -> None:
    assert ModelConfig(completion_template=said).completion_template == said


def test_another_name_is_refused_with_the_list() -> None:
    names = ", ".join(template.name for template in TEMPLATES)
    with pytest.raises(ValueError, match=f"'codellama': must be {names}"):
        ModelConfig(completion_template="codellama")


BYTES_MAX, KEYS_MAX = gateway.TEMPLATE_BYTES_MAX, gateway.TEMPLATE_KEYS_MAX
DEPTH_MAX = gateway.TEMPLATE_DEPTH_MAX
DEEP: object = 1
for _ in range(DEPTH_MAX + 1):
    DEEP = [DEEP]


def test_object_is_read() -> None:
    assert gateway.read_template_kwargs('{"a": {"b": [1]}}') == {"a": {"b": [1]}}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not valid JSON"),
        ("[1]", "expected a JSON object, such as {}, got a list"),
        ("null", "got null"),
        ("3", "got a number"),
        (json.dumps({"a": "x" * BYTES_MAX}), f"the limit is {BYTES_MAX} bytes"),
        (json.dumps({f"k{n}": 0 for n in range(KEYS_MAX + 1)}), f"the limit is {KEYS_MAX} keys"),
        (json.dumps({"a": DEEP}), f"'a' is nested deeper than {DEPTH_MAX} levels"),
        ("[" * 5000, "not valid JSON"),
        ('{"messages": []}', "'messages' comes from each request"),
        ('{"tools": []}', "'tools' comes from each request"),
        ('{"add_generation_prompt": true}', "'add_generation_prompt' comes from each request"),
    ],
)
def test_text_that_is_no_bounded_object_is_refused_at_start(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match="chat_template_kwargs") as caught:
        settings_of("--default-chat-template-kwargs", text)
    assert reason in str(caught.value)
