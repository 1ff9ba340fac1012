"""OpenVINO GenAI: its continuous batching pipeline, behind a small server of our own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from tests.bench.peers.peer import TORCH, Peer

if TYPE_CHECKING:
    from tests.bench.models import Model

OPENVINO = "2026.4.1"
SERVER = ("openvino-genai==2026.4.1.0", "aiohttp>=3.10", "tokenizers>=0.21")
EXPORT = ("optimum-intel==2.2.0", f"openvino=={OPENVINO}", "openvino-tokenizers==2026.4.1.0")


class OpenVino(Peer):
    """Exported in a second environment: the exporter wants another transformers than the rest."""

    name = "openvino"
    package = "openvino-genai"
    arithmetic = "fp16 weights computed in bf16, u8 KV (its defaults)"

    def install(self) -> None:
        self.environment("venv", SERVER)
        self.without_cuda(self.environment("export", (TORCH, "numpy"), (TORCH, *EXPORT)))

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
