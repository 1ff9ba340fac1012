"""Where settings come from, which source wins, and what a mistake is told as."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from antiphon.config.cluster import differing, digest
from antiphon.config.errors import ConfigError
from antiphon.config.fields import fields
from antiphon.config.flags import Parser, add_settings
from antiphon.config.load import child_environment, load, load_process, write_yaml
from antiphon.config.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

    from antiphon.config.sourced_value import Layer


def flags(line: str) -> Layer:
    parser = Parser()
    add_settings(parser)
    return parser.parse(line.split()).settings


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "settings.yaml"


def test_without_any_source_every_setting_is_its_default() -> None:
    assert load(environ={}).settings == Settings()


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
    assert settings.model.threads is None
    assert settings.model.context_tokens is None
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
        ("bus: {url: 'nats://a:b@c:1'}", "bus: url must not contain a user; set bus.user"),
        ("bus: {url: 'nats://a:1, wss://b:2'}", "bus: url: WebSocket is not supported"),
        (
            "bus: {password: x}",
            "bus.password: secrets are not read from files; set ANTIPHON_BUS__PASSWORD",
        ),
        ("gateway: {port: 1", "expected"),
    ],
)
def test_a_bad_file_is_refused_with_its_name_path_value_and_bound(
    file: Path, text: str, message: str
) -> None:
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
            "ANTIPHON_CACHE__MEMORY_RATIO: cache.memory_ratio = '1.5': must be a number > 0, <= 1",
        ),
    ],
)
def test_a_bad_variable_is_refused_with_its_name(variable: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(environ={variable: text})
    assert str(caught.value) == message


def test_variables_of_others_are_left_alone() -> None:
    others = {
        "ANTIPHON_GATEWAY_PORT": "tcp://10.0.0.1:30000",  # what Kubernetes sets beside a service
        "ANTIPHON_NATS_SERVER": "/usr/sbin/nats-server",
        "GATEWAY__PORT": "1",
    }
    assert load(environ=others).settings == Settings()


def test_a_check_across_fields_names_every_source_that_had_a_part() -> None:
    environ = {"ANTIPHON_BATCHING__TOKENS_MAX": "64"}
    with pytest.raises(ConfigError) as caught:
        load(flags=flags("--batching-chunk-tokens 65"), environ=environ)
    sources = "--batching-chunk-tokens, ANTIPHON_BATCHING__TOKENS_MAX: batching: chunk_tokens"
    assert str(caught.value).startswith(sources)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file"):
        load(tmp_path / "none.yaml", environ={})


def test_a_secret_comes_by_environment_and_is_never_shown_or_written(file: Path) -> None:
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


def test_a_child_gets_secrets_and_no_variable_that_would_overrule_its_file(
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


def test_a_service_reads_its_file_its_name_and_its_supervisor(file: Path) -> None:
    file.write_text("tokenizer: {threads: 2}")
    line = f"--config {file} --instance t-1 --parent-pid 77 --tokenizer-batch-max 5"
    arguments = load_process(line.split())
    assert (arguments.instance, arguments.parent_pid) == ("t-1", 77)
    tokenizer = arguments.settings.tokenizer
    assert (tokenizer.threads, tokenizer.batch_max) == (2, 5)


def test_a_service_without_a_name_has_one_of_its_own() -> None:
    arguments = load_process([])
    assert re.fullmatch(r".+-\d+", arguments.instance)
    assert arguments.parent_pid is None


@pytest.mark.parametrize("pid", ["0", "-1", "x", "1.5"])
def test_a_supervisor_is_a_process_id(pid: str) -> None:
    with pytest.raises(ConfigError, match="--parent-pid"):
        load_process([f"--parent-pid={pid}"])


def test_clusters_agree_exactly_when_their_digests_do() -> None:
    same = load(flags=flags("--gateway-port 1"), environ={}).settings
    other = load(flags=flags("--cluster-page-tokens 8"), environ={}).settings
    assert digest(same.cluster) == digest(Settings().cluster)
    assert digest(other.cluster) != digest(Settings().cluster)
    assert differing(digest(other.cluster), digest(same.cluster)) == ("page_tokens",)
