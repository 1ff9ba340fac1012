"""A wheel brings its kernels: it serves with them where there is no compiler."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from tests.system.stack import read, serving

from antiphon.bus import server
from antiphon.kernels.cpu.extension import unavailable_reason

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(600),
    pytest.mark.skipif(unavailable_reason() is not None, reason="there are no CPU kernels here"),
]
ROOT = Path(__file__).parents[2]
KERNELS = re.compile(
    r'^antiphon_worker_cpu_seconds_total\{.*part="kernels".*\} (\S+)$', re.MULTILINE
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that has the wheel, and of this one only what the wheel depends on."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--quiet")
    build = ("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT))
    subprocess.run([*pip, *build], check=True, timeout=300)
    (wheel,) = folder.glob("antiphon-*.whl")
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert wheel.name.split("-")[2:4] == [tag, tag]

    environment = folder / "environment"
    venv.create(environment)
    python = environment / "bin" / "python"
    (packages,) = environment.glob("lib/*/site-packages")
    # A .pth file in a folder that is named here is not read: this checkout stays out.
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    install = ("--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    subprocess.run([*pip, *install], check=True, timeout=300)
    return python


def test_a_wheel_serves_with_its_kernels_where_there_is_no_compiler(
    installed: Path, tmp_path: Path
) -> None:
    (tmp_path / "nats-server").symlink_to(server.find())
    environment = {
        "PATH": f"{installed.parent}:{tmp_path}",
        "HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    assert shutil.which("g++", path=environment["PATH"]) is None
    with serving(python=str(installed), environment=environment) as stack:
        where = subprocess.run(
            [installed, "-c", "from antiphon.kernels.cpu import build; print(build.library())"],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        ).stdout.strip()
        assert Path(where).is_relative_to(installed.parents[1])
        assert Path(where).parent.name == "cpu"
        body = {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0}
        answer = stack.post("/v1/chat/completions", body)
        assert "42" in answer["choices"][0]["message"]["content"]
        ports = json.loads(stack.get("/server_info"))["metrics_ports"]
        page = read(f"http://127.0.0.1:{ports['worker-0']}/metrics")
        assert float(KERNELS.findall(page)[0]) > 0
