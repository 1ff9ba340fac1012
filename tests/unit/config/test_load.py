"""Where settings come from, which source wins, and which values each group refuses."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.arguments import settings_of

from antiphon.config import gateway
from antiphon.config.cluster import differing, digest
from antiphon.config.errors import ConfigError
from antiphon.config.fields import SettingField, fields, groups, value_at
from antiphon.config.flags import Parser, add_settings
from antiphon.config.gateway import AccessConfig
from antiphon.config.load import child_environment, load, load_process, write_yaml
from antiphon.config.model import TEMPLATES, ModelConfig
from antiphon.config.settings import Settings
from antiphon.config.sourced_value import SourcedValue, Value
from antiphon.config.tenants import BYTES_MAX, TenantConfig, Tenants, read_tenants

if TYPE_CHECKING:
    from pathlib import Path

    from hypothesis.strategies import SearchStrategy

    from antiphon.config.sourced_value import Layer


def flags(line: str) -> Layer:
    parser = Parser()
    add_settings(parser)
    return parser.parse(line.split()).settings


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "settings.yaml"


def test_flags_win_over_environment_over_yaml_over_what_is_implied(file: Path) -> None:
    file.write_text("scheduler: {queue_max: 1, look_ahead: 1, dead_beats: 11}")
    environ = {"ANTIPHON_SCHEDULER__QUEUE_MAX": "2", "ANTIPHON_SCHEDULER__LOOK_AHEAD": "2"}
    implied = flags("--scheduler-dead-beats 4 --scheduler-suspect-beats 4")
    loaded = load(file, flags("--scheduler-queue-max 3"), implied=implied, environ=environ)
    scheduler = loaded.settings.scheduler
    assert (scheduler.queue_max, scheduler.look_ahead) == (3, 2)
    assert (scheduler.dead_beats, scheduler.suspect_beats) == (11, 4)
    assert loaded.given["scheduler.queue_max"].source == "--scheduler-queue-max"
    assert loaded.given["scheduler.look_ahead"].source == "ANTIPHON_SCHEDULER__LOOK_AHEAD"
    assert loaded.given["scheduler.dead_beats"].source == str(file)


def test_null_unsets_in_every_source(file: Path) -> None:
    file.write_text("model: {threads: 3, context_tokens: 7}\ncache: {tokens_max: null}")
    environ = {"ANTIPHON_MODEL__THREADS": "null"}
    settings = load(file, flags("--model-context-tokens null"), environ=environ).settings
    assert (settings.model.threads, settings.model.context_tokens) == (None, None)
    assert settings.cache.tokens_max is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gatway: {port: 1}", "gatway: no such group or argument; did you mean gateway?"),
        ("gateway: {prot: 1}", "gateway.prot: no such setting; did you mean gateway.port?"),
        ("gateway: 7", "gateway: must be a mapping of names to values"),
        ("[1]", "must be a mapping of names to values"),
        ("gateway: {port: 70000}", "gateway.port = 70000: must be an integer >= 0, <= 65535"),
        ("gateway: {port: '80'}", "gateway.port = '80': must be an integer >= 0, <= 65535"),
        ("gateway: {port: [80]}", "gateway.port = [80]: must be an integer >= 0, <= 65535"),
        ("gateway: {port: null}", "gateway.port = None: must be an integer >= 0, <= 65535"),
        ("model: {context_tokens: 0}", "must be an integer >= 1 (tokens), or null"),
        ("model: {dtype: int8}", "must be one of auto, float32, bfloat16, float16"),
        ("service: {heartbeat_s: .inf}", "service.heartbeat_s = inf: must be a number > 0 (s)"),
        ("service: {heartbeat_s: .nan}", "service.heartbeat_s = nan: must be a number > 0 (s)"),
        (
            "batching: {chunk_tokens: 4096}",
            "batching: chunk_tokens = 4096 exceeds tokens_max = 2048",
        ),
        (
            "speculation: {ngram_window_min: 13}",
            "speculation: ngram_window_min = 13 exceeds the longest match of 12 tokens",
        ),
        (
            "speculation: {ngram_window_min: 4, ngram_depth: 4}",
            "speculation: ngram_window_min = 4 exceeds the longest match of 3 tokens",
        ),
        (
            "speculation: {ngram_breadth_max: 2, ngram_breadth_min: 3}",
            "speculation: ngram_breadth_min = 3 exceeds ngram_breadth_max = 2",
        ),
        (
            "speculation: {verify_tokens: 4, corpus_draft_tokens: 4}",
            "speculation: corpus_draft_tokens = 4 exceeds the longest draft, verify_tokens - 1 = 3",
        ),
        (
            "speculation: {algorithm: standalone}",
            "speculation: algorithm = standalone drafts with a model: set draft_model",
        ),
        (
            "speculation: {draft_model: small}",
            "speculation: draft_model (--speculative-draft-model-path) is not used by algorithm = "
            "none: set algorithm = standalone",
        ),
        (
            "speculation: {algorithm: ngram, draft_model: small}",
            "is not used by algorithm = ngram",
        ),
        ("bus: {url: 'nats://a:b@c:1'}", "bus: url must not contain a user; set bus.user"),
        ("bus: {url: 'nats://a:1, wss://b:2'}", "bus: url: WebSocket is not supported"),
        (
            "bus: {password: x}",
            "bus.password: secrets are not read from files; set ANTIPHON_BUS__PASSWORD",
        ),
        ("gateway: {port: 1", "expected"),
    ],
)
def test_bad_file_is_refused_with_path_value_and_bound(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load(file, environ={})
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        (
            "ANTIPHON_GATEWAY__PROT",
            "1",
            "ANTIPHON_GATEWAY__PROT: no such setting; did you mean ANTIPHON_GATEWAY__PORT?",
        ),
        (
            "ANTIPHON_GATEWAY__PORT",
            "http",
            "ANTIPHON_GATEWAY__PORT: gateway.port = 'http': must be an integer >= 0, <= 65535",
        ),
        (
            "ANTIPHON_CACHE__MEMORY_RATIO",
            "1.5",
            "ANTIPHON_CACHE__MEMORY_RATIO: cache.memory_ratio = '1.5': must be a number > 0, <= 1, "
            "or null",
        ),
    ],
)
def test_bad_variable_is_refused_with_its_name(variable: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(environ={variable: text})
    assert str(caught.value) == message


def test_without_a_source_of_ours_every_setting_is_its_default() -> None:
    others = {
        "ANTIPHON_GATEWAY_PORT": "tcp://10.0.0.1:30000",  # what Kubernetes sets beside a service
        "ANTIPHON_NATS_SERVER": "/usr/sbin/nats-server",
        "GATEWAY__PORT": "1",
    }
    assert load(environ=others).settings == Settings()
    assert load(environ={}).settings == Settings()


def test_check_across_fields_names_every_source_that_had_a_part() -> None:
    environ = {"ANTIPHON_BATCHING__TOKENS_MAX": "64"}
    with pytest.raises(ConfigError) as caught:
        load(flags=flags("--batching-chunk-tokens 65"), environ=environ)
    sources = "--batching-chunk-tokens, ANTIPHON_BATCHING__TOKENS_MAX: batching: chunk_tokens"
    assert str(caught.value).startswith(sources)


def test_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file"):
        load(tmp_path / "none.yaml", environ={})


def test_secret_comes_by_environment_and_is_never_shown_or_written(file: Path) -> None:
    settings = load(environ={"ANTIPHON_BUS__PASSWORD": "swordfish"}).settings
    assert settings.bus.password == "swordfish"
    write_yaml(settings, file)
    assert "swordfish" not in file.read_text()
    with pytest.raises(ConfigError, match="--bus-password"):
        flags("--bus-password swordfish")
    secrets = [field for field in fields().values() if "password" in field.name]
    assert secrets
    assert all(field.secret for field in secrets)


def test_written_settings_are_private_and_read_back_the_same(file: Path) -> None:
    line = "--gateway-port 8 --model-threads 3 --telemetry-log-level debug --cluster-name a-b"
    settings = load(flags=flags(line), environ={}).settings
    file.write_text("was here")
    file.chmod(0o644)
    write_yaml(settings, file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert load(file, environ={}).settings == settings


def test_settings_that_are_written_anew_are_whole_for_whoever_reads_them(
    monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    settings = load(flags=flags("--gateway-port 8"), environ={}).settings
    write_yaml(settings, file)
    before = file.read_text()
    with file.open() as reader:
        half = reader.read(len(before) // 2)
        write_yaml(load(flags=flags("--gateway-port 9"), environ={}).settings, file)
        assert half + reader.read() == before

    def fail(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("yaml.safe_dump", fail)
    with pytest.raises(OSError, match="no space"):
        write_yaml(settings, file)
    assert load(file, environ={}).settings.gateway.port == 9
    assert [found.name for found in file.parent.iterdir()] == [file.name]


def test_child_gets_secrets_and_no_variable_that_would_overrule_its_file(
    monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    monkeypatch.setenv("ANTIPHON_GATEWAY__PORT", "1")
    monkeypatch.setenv("ANTIPHON_BUS__PASSWORD", "swordfish")
    monkeypatch.setenv("ANTIPHON_NATS_SERVER", "/somewhere")
    settings = load(flags=flags("--gateway-port 2")).settings
    write_yaml(settings, file)
    environ = child_environment(settings)
    assert load(file, environ=environ).settings == settings
    assert settings.gateway.port == 2
    assert environ["ANTIPHON_NATS_SERVER"] == "/somewhere"


def test_service_reads_its_file_its_name_and_its_supervisor(file: Path) -> None:
    file.write_text("tokenizer: {threads: 2}")
    line = f"--config {file} --instance t-1 --parent-pid 77 --tokenizer-batch-max 5"
    arguments = load_process(line.split())
    assert (arguments.instance, arguments.parent_pid) == ("t-1", 77)
    tokenizer = arguments.settings.tokenizer
    assert (tokenizer.threads, tokenizer.batch_max) == (2, 5)
    arguments = load_process([])
    assert re.fullmatch(r".+-\d+", arguments.instance)
    assert arguments.parent_pid is None


@pytest.mark.parametrize("pid", ["0", "-1", "x", "1.5"])
def test_supervisor_is_a_process_id(pid: str) -> None:
    with pytest.raises(ConfigError, match="--parent-pid"):
        load_process([f"--parent-pid={pid}"])


def test_clusters_agree_exactly_when_their_digests_do() -> None:
    same = load(flags=flags("--gateway-port 1"), environ={}).settings
    other = load(flags=flags("--cluster-page-tokens 8"), environ={}).settings
    assert digest(same.cluster) == digest(Settings().cluster)
    assert digest(other.cluster) != digest(Settings().cluster)
    assert differing(digest(other.cluster), digest(same.cluster)) == ("page_tokens",)
    # Version 0.4 has pages of 16 by default.
    before = load(flags=flags("--cluster-page-tokens 16"), environ={}).settings
    assert digest(before.cluster) == digest(same.cluster)


def test_origins_are_origins() -> None:
    one = AccessConfig(allowed_origins="https://a.example, http://localhost:8080,")
    assert one.origins == {"https://a.example", "http://localhost:8080"}
    assert AccessConfig().origins == frozenset()
    for bad in ("https://a.example/", "a.example", "https://a.example/x", "*.example"):
        with pytest.raises(ConfigError, match="not an origin"):
            load(environ={"ANTIPHON_ACCESS__ALLOWED_ORIGINS": bad})


def test_key_that_fits_no_header_is_refused_and_not_shown() -> None:
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


def test_no_tenants_file_has_no_tenants_and_a_missing_one_is_named(tmp_path: Path) -> None:
    assert read_tenants("") == Tenants()
    with pytest.raises(ConfigError, match=r"none\.toml: No such file"):
        read_tenants(str(tmp_path / "none.toml"))


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
def test_bad_keys_file_is_one_line_error(tmp_path: Path, name: str, text: str, reason: str) -> None:
    file = tmp_path / name
    file.write_text(text, errors="surrogateescape")
    with pytest.raises(ConfigError, match=reason) as caught:
        read_tenants(str(file))
    said = str(caught.value)
    assert said.startswith(f"access.keys_file: {file}: ")
    assert "\n" not in said
    assert "sk-plain" not in said


@pytest.mark.parametrize("said", ["", "form.json", *(template.name for template in TEMPLATES)])
def test_name_or_a_file_is_taken(said: str) -> None:
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


PARSER = Parser()
add_settings(PARSER)

TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20)
PORTS = (
    "gateway.port",
    "health.port",
    "encoder.port",
    "media.port",
    "kv_storage.port",
    "cache.port",
    "supervisor.metrics_port_base",
    "supervisor.nats_port",
)
NARROW: dict[str, SearchStrategy[Value]] = {
    "cluster.name": st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True),
    "telemetry.otlp_endpoint": st.sampled_from(["[::1]:4317", "http://collector:4318"]),
    "batching.graph_sizes": st.sampled_from(["", "1 4 8"]),
    "batching.prefill_graph_sizes": st.sampled_from(["", "256 64"]),
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
    "encoder.decode_processes": st.integers(1, 256),
    "media.fetches_max": st.integers(1, 1024),
    "encoder.video_frames_max": st.integers(1, 2**31 - 1),
    "media.images_max": st.integers(1, 256),
    "media.videos_max": st.integers(0, 256),
    "media.audios_max": st.integers(0, 256),
    "media.pixels_min": st.integers(0, 1000),
    "media.pixels_max": st.integers(1000, 2**31 - 1),
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
    "speculation.algorithm": st.sampled_from(["none", "ngram"]),  # standalone needs a draft model
    "speculation.verify_tokens": st.integers(2, 64),
    "speculation.corpus_draft_tokens": st.integers(0, 1),
    "speculation.ngram_window_min": st.integers(1, 12),
    "speculation.ngram_window_max": st.integers(12, 24),
    "speculation.ngram_breadth_min": st.integers(1, 10),
    "speculation.ngram_breadth_max": st.integers(10, 20),
    "speculation.ngram_depth": st.integers(13, 64),
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


def needed(given: dict[str, Value]) -> dict[str, str]:
    """Variables without which these values are refused: only standalone has a draft model."""
    if not given.get("speculation.draft_model"):
        return {}
    return {fields()["speculation.algorithm"].variable: "standalone"}


OPEN_FIELDS = [field for field in fields().values() if not field.secret]


@pytest.mark.parametrize("field", OPEN_FIELDS, ids=lambda field: field.path)
@settings(max_examples=10)
@given(data=st.data())
def test_flag_and_variable_set_what_they_say(field: SettingField, data: st.DataObject) -> None:
    value = data.draw(values(field))
    environ = needed({field.path: value})
    typed = PARSER.parse([typed_flag(field, value)])
    by_flag = load(flags=typed.settings, environ=environ).settings
    by_variable = load(environ={**environ, field.variable: text(value)}).settings
    assert (value_at(by_flag, field), by_flag) == (value, by_variable)


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(drawn=st.fixed_dictionaries({field.path: values(field) for field in OPEN_FIELDS}))
def test_any_settings_survive_a_file(tmp_path: Path, drawn: dict[str, Value]) -> None:
    drawn["batching.tokens_max"] = 4096  # no less than any chunk that is drawn
    environ = {fields()[path].variable: text(value) for path, value in drawn.items()}
    environ |= needed(drawn)
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
def test_boolean_is_a_flag_and_its_negation(flag: str, said: bool) -> None:
    assert PARSER.parse([flag]).settings == {"load.mmap": SourcedValue(said, flag)}


def test_typed_flags_are_sources_and_abbreviations_are_spelled_out() -> None:
    typed = PARSER.parse([])
    assert (typed.settings, typed.implied, typed.plain) == ({}, {}, {})
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
