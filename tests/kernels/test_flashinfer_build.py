"""FlashInfer's modules are compiled ahead of time: those that a worker asks for, each once."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import torch

from antiphon.kernels.attention import paged_attention
from antiphon.kernels.flashinfer import backend, build
from antiphon.kernels.op import AttentionFeatures, DeviceCapability

ROOT = Path(__file__).parents[2]
STAND_IN = Path(__file__).parent / "stand_in"


@pytest.fixture(name="asked")
def _asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer lacks modules for heads of 64 and 80 numbers and for latents."""
    monkeypatch.syspath_prepend(STAND_IN)
    monkeypatch.delenv(backend.DISABLE_JIT, raising=False)
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    missing = {(kernels, size) for kernels in ("fa2", "fa3") for size in (64, 80)}
    monkeypatch.setattr(importlib.import_module("flashinfer.prefill"), "MISSING", missing)
    jit = importlib.import_module("flashinfer.jit")
    monkeypatch.setattr(jit, "MISSING_LATENTS", {("fa2", 512, 64), ("fa3", 512, 64)})
    monkeypatch.setattr(jit.JitSpec, "folder", tmp_path)


@pytest.mark.usefixtures("asked")
def test_what_a_worker_would_load_is_compiled_once_and_put_where_it_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--capabilities", "9.0a", "10.0a", "--head-sizes", "64", "128"]
    monkeypatch.setattr(sys, "argv", ["build", *arguments, "--cache-dtypes", "bfloat16"])
    assert build.main() == 0
    made = sorted(tmp_path.glob("aot/*/*.so"))
    bf16 = "_".join([*["torch.bfloat16"] * 3, "torch.int32"])
    assert [file.stem for file in made] == sorted(
        [
            # Those of 10.0 are among those of 9.0.
            *(
                f"{kernels}_{bf16}_64_64_0_{window}_{softcap}_False_False"
                for kernels in ("fa2", "fa3")
                for window in (False, True)
                for softcap in (False, True)
            ),
            *(f"mla_{kernels}_{bf16}_512_64_False" for kernels in ("fa2", "fa3")),
        ]
    )
    assert {file.read_text() for file in made} == {"9.0a 10.0a"}
    assert sorted(capsys.readouterr().out.split()) == [str(file) for file in made]
    assert os.getenv(backend.DISABLE_JIT) is None


@pytest.mark.usefixtures("asked")
def test_a_module_that_the_compiler_refuses_ends_the_build_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("Ninja build failed")

    jit = importlib.import_module("flashinfer.jit")
    monkeypatch.setattr(jit.JitSpec, "build", refuse)
    monkeypatch.setattr(sys, "argv", ["build", "--capabilities", "8.0", "--head-sizes", "80"])
    assert build.main() == 1
    said = capsys.readouterr().err
    assert said.startswith("FlashInfer's modules are not built: fa2_")
    assert said.endswith(": Ninja build failed\n")


@pytest.mark.usefixtures("asked")
def test_nothing_is_built_for_no_capability(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As FlashInfer reads it, an empty list is malformed."""
    monkeypatch.setattr(sys, "argv", ["build", "--capabilities"])
    monkeypatch.setattr(build, "missing", None)
    assert build.main() == 0
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("capability", ["90", "9.0,10.0a", "sm_90", ""])
def test_a_capability_of_another_form_is_refused_by_name(
    capability: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["build", "--capabilities", capability])
    with pytest.raises(SystemExit):
        build.main()
    assert f"{capability!r} is no compute capability" in capsys.readouterr().err


def test_without_a_compiler_of_cuda_the_build_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(build.CannotCompile, match="pip install nvidia-cuda-nvcc"):
        build.lay_out_toolkit(tmp_path)


def test_a_toolkit_of_wheels_has_the_links_that_a_linker_looks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = tmp_path / "site" / "nvidia" / "cu13"
    for file in ("bin/nvcc", "include/cuda.h", "nvvm/bin/cicc", "lib/libcudart.so.13"):
        (wheels / file).parent.mkdir(parents=True, exist_ok=True)
        (wheels / file).touch()
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    home = tmp_path / "cuda"
    home.mkdir()
    assert build.lay_out_toolkit(home) == home
    assert (home / "bin" / "nvcc").exists()
    assert (home / "lib64" / "libcudart.so").resolve() == wheels / "lib" / "libcudart.so.13"
    said = subprocess.run(
        ["readelf", "-d", str(home / "lib64" / "libcuda.so")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "libcuda.so.1" in said.stdout


def test_modules_of_the_package_itself_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are after the build, without the package of all modules."""
    package = tmp_path / "flashinfer"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("flashinfer", "flashinfer.prefill", "flashinfer.jit"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(backend.importlib.metadata, "version", lambda package: f"{package} 1")
    gpu = DeviceCapability("cuda", torch.bfloat16, 90, None, (AttentionFeatures(128),))
    refused = dict(paged_attention.select(gpu).refused)
    assert refused["flashinfer"] == "its modules are not built ahead of time"
    assert backend.modules_version() == "flashinfer-jit-cache 1"
    module = package / "data" / "aot" / "some" / "some.so"
    module.parent.mkdir(parents=True)
    module.touch()
    assert backend.modules_version() == "flashinfer-python 1"
    refused = dict(paged_attention.select(gpu).refused)
    assert refused["flashinfer"].startswith("it cannot be imported")


PACKAGES = (
    "flashinfer-python>=0.7.4,<0.8",
    *("apache-tvm-ffi>=0.1.12,<0.2", "einops", "ninja", "nvidia-ml-py", "tabulate"),
    *("cuda-python", "cuda-bindings", "cuda-pathfinder"),
    *("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-cuda-runtime", "nvidia-nvvm"),
    *("nvidia-cuda-cccl", "nvidia-curand"),
)
"""What the build takes beside torch, which comes with the last two where it is the CUDA one."""
ONE_MODULE = """
import torch
from antiphon.kernels.attention import paged_attention
from antiphon.kernels.flashinfer import build
from antiphon.kernels.op import AttentionFeatures, DeviceCapability

device = DeviceCapability("cuda", torch.bfloat16, 100, None, (AttentionFeatures(64),))
build.devices = lambda *_: [device]
status = build.main()
print(paged_attention.select(device).backend)
raise SystemExit(status)
"""


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_a_module_is_compiled_without_a_gpu(tmp_path: Path) -> None:
    """As in the image, and loaded; one of heads of 64 numbers. It takes minutes of a core."""
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "torch.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps"]
    subprocess.run([*pip, *PACKAGES], check=True)
    paths = [str(ROOT / part) for part in ("services", "shared", "kernels")]
    ran = subprocess.run(
        [str(python), "-c", ONE_MODULE],
        env={
            "PATH": f"{environment / 'bin'}:{os.defpath}",
            "PYTHONPATH": ":".join(paths),
            "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    built, chosen = ran.stdout.split()
    assert chosen == "flashinfer"
    module = Path(built)
    assert module.is_relative_to(site / "flashinfer" / "data" / "aot")
    triton = importlib.import_module("triton")
    tools = Path(str(triton.__file__)).parent / "backends" / "nvidia" / "bin"
    listed = subprocess.run(
        [str(tools / "cuobjdump"), "--list-elf", str(module)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert {"sm_90a", "sm_100a"} <= set(re.findall(r"sm_\w+", listed.stdout))
