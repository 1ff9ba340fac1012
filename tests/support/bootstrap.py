"""Set up a checkout: `.venv` with a CPU build of torch, compiled kernels, and nats-server.

`make setup` runs it with the system's Python, before anything is installed. So it uses the standard
library only, in syntax that Python 3.6 can parse, to reject old versions with a message. It is
idempotent and does only what is missing.
"""

import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
STAMP = VENV / "ready"
KERNELS_STAMP = VENV / "kernels"
PIP = VENV / "bin" / "pip"
KERNELS = "kernels/antiphon/kernels/cpu"
# Tests of packages, and hundreds of models of which a run imports few: a third of all bytecode.
RARELY_IMPORTED = "site-packages/(.*/)?(tests|transformers/models)/"
PYTHON_MIN = (3, 11)
TORCH = "torch==2.13.0"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
NATS_PLACES = ("/usr/sbin", "/usr/local/sbin", "/usr/local/bin")
TEST_TOOLS = "--test-tools"
PROMETHEUS = VENV / "prometheus"
NATS_DOWNLOADS = "https://github.com/nats-io/nats-server/releases"


class CannotSetUp(Exception):
    """A problem that this script cannot fix. The message says how to fix it."""


def main() -> int:
    try:
        check_platform()
        if not is_ready():
            make_venv()
            install_torch()
            with ThreadPoolExecutor(1) as beside:  # compiling them needs nothing else
                kernels = beside.submit(build_kernels)
                install_packages()
                compile_packages()
                kernels.result()
            STAMP.write_text(wanted(), encoding="utf-8")
        build_kernels()
        find_nats()
        if TEST_TOOLS in sys.argv[1:]:
            find_prometheus()
    except CannotSetUp as error:
        print(f"antiphon setup: {error}", file=sys.stderr)
        return 1
    return 0


def check_platform() -> None:
    if sys.version_info < PYTHON_MIN:
        needed = ".".join(map(str, PYTHON_MIN))
        raise CannotSetUp(
            f"Python {needed} or newer is needed; this is {platform.python_version()}. "
            f"Try: make setup PYTHON=python{needed}"
        )
    if platform.system() != "Linux":
        raise CannotSetUp(
            f"manual setup required on {platform.system()}: this script supports Debian and "
            "Ubuntu only. Create .venv, then pip install -e '.[dev]' in it, and put nats-server "
            f"({NATS_DOWNLOADS}) on the PATH."
        )


def wanted() -> str:
    """A digest of the requirements, to detect changes."""
    files = ("pyproject.toml", "constraints.txt", "tests/support/bootstrap.py")
    content = b"".join((ROOT / name).read_bytes() for name in files)
    return hashlib.sha256(content + sys.version.encode()).hexdigest()


def is_ready() -> bool:
    return STAMP.exists() and STAMP.read_text(encoding="utf-8") == wanted()


def make_venv() -> None:
    if PIP.exists():
        return
    if not succeeds([sys.executable, "-m", "venv", str(VENV)]):
        shutil.rmtree(str(VENV), ignore_errors=True)
        raise CannotSetUp(
            "this Python cannot make a virtual environment. On Debian and Ubuntu: "
            "apt install python3-venv"
        )


def constraints() -> "list[str]":
    return ["-c", str(ROOT / "constraints.txt")]


def install_torch() -> None:
    """Install a CPU build of torch; its index lacks our versions of torch's dependencies."""
    pip_install([*torch_source(), *constraints(), "--no-deps", TORCH])
    pip_install([*constraints(), "--no-deps", "numpy", "typing_extensions"])  # what it imports


def install_packages() -> None:
    pip_install([*constraints(), "-e", f"{ROOT}[dev]"])


def compile_packages() -> None:
    """Compile what has been installed, by all cores; pip would use one."""
    compiling = ["-m", "compileall", "-qq", "-j0", "-x", RARELY_IMPORTED, str(VENV / "lib")]
    succeeds([str(VENV / "bin" / "python"), *compiling])


def torch_source() -> "list[str]":
    """Choose the index for torch: PIP_ARGS, else the default one if it has a CPU build.

    A CUDA build is detected by its nvidia dependencies: gigabytes that are useless on a CPU.
    """
    if os.environ.get("PIP_ARGS"):
        return []
    ask = [str(PIP), "install", "--dry-run", "--no-deps", "--ignore-installed", "--quiet"]
    report = subprocess.run(
        [*ask, "--report", "-", TORCH],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    if report.returncode == 0:
        needs = json.loads(report.stdout)["install"][0]["metadata"].get("requires_dist", [])
        if not any("nvidia" in need or "cuda" in need for need in needs):
            return []
    return ["--index-url", TORCH_CPU_INDEX]


def pip_install(arguments: "list[str]") -> None:
    extra = shlex.split(os.environ.get("PIP_ARGS", ""))
    pip = [str(PIP), "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    if not succeeds([*pip, *extra, *arguments]):
        raise CannotSetUp("pip failed, see above. Pass options to pip with PIP_ARGS.")


def build_kernels() -> None:
    """Compile the CPU kernels if needed; if that fails, the builder says why and torch is used."""
    if KERNELS_STAMP.exists() and KERNELS_STAMP.read_text(encoding="utf-8") == kernels_wanted():
        return
    print("antiphon setup: compiling the CPU kernels, about a minute", flush=True)
    building = [str(VENV / "bin" / "python"), "-m", "antiphon.kernels.cpu.build"]
    succeeds(building, quiet=True, folder=ROOT / "kernels")  # found there before it is installed
    KERNELS_STAMP.write_text(kernels_wanted(), encoding="utf-8")


def kernels_wanted() -> str:
    """A digest of the kernel sources and the compiler, to detect changes."""
    sources = sorted(
        file for file in (ROOT / KERNELS).rglob("*") if file.suffix in {".py", ".cpp", ".h", ".inc"}
    )
    content = b"".join(file.read_bytes() for file in sources)
    about = wanted() + str(shutil.which("g++"))
    return hashlib.sha256(content + about.encode()).hexdigest()


def find_nats() -> None:
    if shutil.which("nats-server") or any(Path(p, "nats-server").exists() for p in NATS_PLACES):
        return
    if os.environ.get("ANTIPHON_NATS_SERVER") or apt_installs("nats-server"):
        return
    raise CannotSetUp(
        "nats-server is missing and could not be installed. On Debian and Ubuntu: "
        f"apt install nats-server. Elsewhere: {NATS_DOWNLOADS}, then put it on the PATH or name it "
        "in ANTIPHON_NATS_SERVER."
    )


def find_prometheus() -> None:
    """For the tests; Debian's package is unpacked, since its installation starts a server."""
    tools = ("prometheus", "promtool")
    if all(shutil.which(tool) for tool in tools) or (PROMETHEUS / "usr/bin/promtool").exists():
        return
    folder = VENV / "downloads"
    folder.mkdir(exist_ok=True)
    download = ["apt-get", "-qq", "download", "prometheus"]
    if shutil.which("apt-get") and not succeeds(download, quiet=True, folder=folder):
        succeeds([*admin(), "apt-get", "-qq", "update"], quiet=True)
        succeeds(download, quiet=True, folder=folder)
    for package in folder.glob("prometheus_*.deb"):
        if succeeds(["dpkg-deb", "-x", str(package), str(PROMETHEUS)], quiet=True):
            return
    raise CannotSetUp(
        "prometheus and promtool are missing, which the tests need, and could not be downloaded. "
        "On Debian and Ubuntu: apt install prometheus; elsewhere put both on the PATH."
    )


def admin() -> "list[str]":
    return [] if os.geteuid() == 0 else ["sudo", "-n"]


def apt_installs(package: str) -> bool:
    """Whether apt exists, works without a password, and has installed the package."""
    if not shutil.which("apt-get") or (admin() and not shutil.which("sudo")):
        return False
    apt = [*admin(), "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq"]
    succeeds([*apt, "update"], quiet=True)
    return succeeds([*apt, "install", "-y", package], quiet=True)


def succeeds(command: "list[str]", quiet: bool = False, folder: "Path | None" = None) -> bool:
    output = subprocess.DEVNULL if quiet else None
    return subprocess.run(command, stdout=output, cwd=folder, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
