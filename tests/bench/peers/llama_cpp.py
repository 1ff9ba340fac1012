"""llama.cpp, built for this machine from the source that the Python package carries."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.bench.peers.peer import NotHere, Peer

if TYPE_CHECKING:
    from tests.bench.models import Model

SOURCE = "llama-cpp-python"
VERSION = "0.3.36"
NUMPY = "numpy==2.4.6"
SLOTS = 64
SLOT_TOKENS = 1280
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
)


class LlamaCpp(Peer):
    """llama-server with a slot a client; a slot keeps its last prompt, as another's prefix too."""

    name = "llama.cpp"
    arithmetic = "bf16 weights, f16 KV"

    @property
    def version(self) -> str:
        said = subprocess.run(
            [str(self._server), "--version"], capture_output=True, check=True, text=True
        )
        return f"{SOURCE} {VERSION}, {(said.stderr + said.stdout).strip().splitlines()[0]}"

    def install(self) -> None:
        for tool in ("cmake", "ninja", "g++"):
            if shutil.which(tool) is None:
                raise NotHere(f"{tool} is not installed, and it is built from source")
        if not self._server.exists():
            self._unpack()
            build = str(self.folder / "build")
            configure = ["cmake", "-S", str(self._source), "-B", build, "-G", "Ninja", *OPTIONS]
            self.run(configure, "configuring")
            self.run(["cmake", "--build", build, "--target", "llama-server"], "building")

    def prepare(self, model: Model) -> None:
        file = self._file(model)
        if not file.exists():
            convert = str(Path(__file__).parent / "llama_cpp_convert.py")
            part = file.with_suffix(".part")
            arguments = [str(model.folder), "--outtype", "bf16", "--outfile", str(part)]
            self.run([sys.executable, "-P", convert, str(self._source), *arguments], "converting")
            part.rename(file)

    def command(self, model: Model, port: int) -> list[str]:
        threads = str(self.cores)
        return [
            *(str(self._server), "-m", str(self._file(model)), "--alias", model.name),
            *("--host", "127.0.0.1", "--port", str(port), "-t", threads, "-tb", threads),
            *("-c", str(SLOTS * SLOT_TOKENS), "-np", str(SLOTS), "-b", "2048", "-ub", "512"),
            # Its fused attention was the slower one in a trial of 16 clients.
            *("-fa", "off"),
        ]

    def reader(self) -> list[str]:
        """Return the command line of `llama_cpp_reader`, in the environment that it needs.

        The same source is built once more, as the package that Python imports.

        Raises:
            NotHere: It cannot be installed, with the reason.
        """
        folder = self.environment("reader", (f"{SOURCE}=={VERSION}", NUMPY))
        script = Path(__file__).parent / "llama_cpp_reader.py"
        return [str(folder / "bin" / "python"), "-P", str(script)]

    def _unpack(self) -> None:
        # Downloading a source package runs its build backend, which pip fetches by itself.
        self.run(
            [
                *(sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", SOURCE),
                *(f"{SOURCE}=={VERSION}", "-d", str(self.folder)),
            ],
            "downloading",
        )
        archive = next(self.folder.glob("llama_cpp_python-*.tar.gz"))
        with tarfile.open(archive) as files:
            files.extractall(self.folder, filter="data")

    @property
    def _source(self) -> Path:
        return self.folder / f"llama_cpp_python-{VERSION}" / "vendor" / "llama.cpp"

    @property
    def _server(self) -> Path:
        return self.folder / "build" / "bin" / "llama-server"

    def _file(self, model: Model) -> Path:
        return self.folder / f"{model.name}-bf16.gguf"
