"""Every field can be said in every form, and means the same in each."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from antiphon.config.fields import SettingField, fields, groups, value_at
from antiphon.config.flags import Parser, add_settings
from antiphon.config.load import load, load_process, write_yaml
from antiphon.config.settings import Settings
from antiphon.config.sourced_value import SourcedValue, Value

if TYPE_CHECKING:
    from pathlib import Path

    from hypothesis.strategies import SearchStrategy


PARSER = Parser()
add_settings(PARSER)

TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20)
PORTS = (
    "gateway.port",
    "health.port",
    "encoder.port",
    "kv_storage.port",
    "supervisor.metrics_port_base",
    "supervisor.nats_port",
)
NARROW: dict[str, SearchStrategy[Value]] = {
    "cluster.name": st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True),
    "telemetry.otlp_endpoint": st.sampled_from(["[::1]:4317", "http://collector:4318"]),
    "metrics.time_to_first_token_buckets": st.sampled_from(["", "0.1, 0.5 2"]),
    "metrics.inter_token_latency_buckets": st.sampled_from(["", "0.01,0.1"]),
    "metrics.e2e_request_latency_buckets": st.sampled_from(["", "1 2 3"]),
    "metrics.prompt_tokens_buckets": st.sampled_from(["default", "tse 1000 2 8", "custom 1 2"]),
    "metrics.generation_tokens_buckets": st.sampled_from(["default", "custom 5"]),
    "metrics.custom_labels_header": st.sampled_from(["x-custom-labels", "X-Team"]),
    "metrics.custom_labels": st.sampled_from(["", "team,user"]),
    "metrics.extra_labels": st.sampled_from(["", '{"site": "a"}']),
    "bus.url": st.sampled_from(["nats://a:1", "nats://a:1,tls://b:2"]),
    "access.allowed_origins": st.sampled_from(["", "*", "https://a.example,http://[::1]:80"]),
    # Any other would be refused beside a file.
    "model.chat_template_name": st.just(""),
    "model.completion_template": st.sampled_from(["", "qwen_coder", "gaps.json"]),
    "grammar.whitespace_max": st.integers(1, 256),
    "responses.replicas": st.integers(1, 5),
    "sessions.replicas": st.integers(1, 5),
    "batching.chunk_tokens": st.none() | st.integers(1, 2048),
    "cluster.model": st.sampled_from(["", "small", "small,gpt-4o"]),
    "gateway.chat_template_kwargs": st.sampled_from(["{}", '{"enable_thinking": false}']),
    "gateway.root_path": st.sampled_from(["", "/llm", "/llm/a/"]),
    "gateway.preferred_sampling": st.sampled_from(["{}", '{"top_p": 0.5}']),
    "request_log.level": st.integers(0, 3),
    "request_log.target": st.sampled_from(["stdout", "/var/log/antiphon stdout"]),
    "request_log.export_metrics": st.just(value=False),  # else it needs a folder
    "load.config_overrides": st.sampled_from(["{}", '{"rope_theta": 1e6}']),
    **{path: st.integers(0, 65535) for path in PORTS},
}
"""Fields with bounds of their own."""


def values(field: SettingField) -> SearchStrategy[Value]:
    """Good values of a field, as YAML writes them."""
    if field.path in NARROW:
        return NARROW[field.path]
    if field.choices:
        return st.sampled_from(field.choices)
    kinds: dict[str, SearchStrategy[Value]] = {
        "integer": st.integers(1, 2**50),
        "number": st.floats(1e-6, 1.0),
        "text": TEXT,
        "boolean": st.booleans(),
    }
    return st.none() | kinds[field.kind] if field.optional else kinds[field.kind]


def text(value: Value) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def typed_flag(field: SettingField, value: Value) -> str:
    """How a value is said on the command line: a boolean is a flag or its negation."""
    if field.kind == "boolean":
        return field.flag if value else f"--no-{field.flag[2:]}"
    return f"{field.flag}={text(value)}"


OPEN_FIELDS = [field for field in fields().values() if not field.secret]


@pytest.mark.parametrize("field", OPEN_FIELDS, ids=lambda field: field.path)
@settings(max_examples=10)
@given(data=st.data())
def test_flag_and_variable_set_what_they_say(field: SettingField, data: st.DataObject) -> None:
    value = data.draw(values(field))
    typed = PARSER.parse([typed_flag(field, value)])
    by_flag = load(flags=typed.settings, environ={}).settings
    by_variable = load(environ={field.variable: text(value)}).settings
    assert value_at(by_flag, field) == value
    assert by_flag == by_variable


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(drawn=st.fixed_dictionaries({field.path: values(field) for field in OPEN_FIELDS}))
def test_any_settings_survive_a_file(tmp_path: Path, drawn: dict[str, Value]) -> None:
    drawn["batching.tokens_max"] = 4096  # no less than any chunk that is drawn
    environ = {fields()[path].variable: text(value) for path, value in drawn.items()}
    said = load(environ=environ).settings
    write_yaml(said, tmp_path / "settings.yaml")
    assert load(tmp_path / "settings.yaml", environ={}).settings == said


def test_every_field_has_help_and_a_default_that_is_in_bounds() -> None:
    given_defaults = {
        field.variable: text(field.default) for field in OPEN_FIELDS if field.default is not None
    }
    assert load(environ=given_defaults).settings == Settings()
    assert all(field.help.endswith(".") for field in fields().values())


def test_names_are_unique_in_every_form() -> None:
    everything = list(fields().values())
    assert len({field.flag for field in everything}) == len(everything)
    assert len({field.variable for field in everything}) == len(everything)


@pytest.mark.parametrize(("flag", "said"), [("--load-mmap", True), ("--no-load-mmap", False)])
def test_a_boolean_is_a_flag_and_its_negation(flag: str, said: bool) -> None:
    assert PARSER.parse([flag]).settings == {"load.mmap": SourcedValue(said, flag)}


def test_nothing_typed_is_nothing_given() -> None:
    typed = PARSER.parse([])
    assert (typed.settings, typed.implied, typed.plain) == ({}, {}, {})


def test_an_abbreviation_is_spelled_out_in_the_source() -> None:
    layer = PARSER.parse(["--scheduler-q", "5"]).settings
    assert layer["scheduler.queue_max"].source == "--scheduler-queue-max"


def test_help_tells_of_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        load_process(["--help"])
    assert left.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for group in groups():
        assert group.title in shown
    for field in fields().values():
        assert (field.flag in shown) is not field.secret
    assert "Port of the HTTP API; startup fails if it is in use. [>= 0, <= 65535;" in shown
