"""The server that ships with transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.bench.peers.peer import TORCH, Peer

if TYPE_CHECKING:
    from tests.bench.models import Model


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
