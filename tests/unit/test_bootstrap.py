"""The setup of a checkout, from what is there and what is not."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support import bootstrap

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    for name in ("pyproject.toml", "constraints.txt", "tests/support/bootstrap.py"):
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
    assert {str(name).partition(".")[0] for name in names} <= set(sys.stdlib_module_names)


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
    _, torch, needed, *others = programs.commands
    assert torch[-2:] == ["--no-deps", bootstrap.TORCH]
    assert needed[-1] == "typing_extensions"
    last = [command[-1] for command in others]
    last.remove("antiphon.kernels.cpu.build")  # at any time beside the others
    assert last == [f"{checkout}[dev]", str(bootstrap.VENV / "lib")]


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


@pytest.mark.parametrize(
    ("file", "is_compiled"),
    [
        ("torch/nn/functional.py", True),
        ("transformers/modeling_utils.py", True),
        ("transformers/models/bart/modeling_bart.py", False),
        ("sympy/core/tests/test_args.py", False),
        ("torch/testing/_internal/common_utils.py", True),
    ],
)
def test_bytecode_is_made_of_what_is_imported(
    file: str, is_compiled: bool, programs: FakePrograms
) -> None:
    bootstrap.compile_packages()
    (command,) = programs.commands
    excluded = command[command.index("-x") + 1]
    path = f"/home/tests/antiphon/.venv/lib/python3.11/site-packages/{file}"
    assert (re.search(excluded, path) is None) == is_compiled


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
