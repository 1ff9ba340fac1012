"""Antiphon as an operator starts it: every service, a broker of its own."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import TYPE_CHECKING

from tests.bench.peers.peer import OURS, Peer

if TYPE_CHECKING:
    from pathlib import Path

    from tests.bench.models import Model


class Antiphon(Peer):
    """This repository's own, in its own environment.

    Args:
        settings: More arguments of `antiphon serve`.
    """

    name = OURS
    arithmetic = "bf16 weights and KV"

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
            *("--model-path", str(model.folder), "--served-model-name", model.name),
            *("--model-threads", str(self.cores), "--dtype", "bfloat16", *self._settings),
        ]
