"""`antiphon replay`: run what a worker recorded again, and print where it goes another way."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Replay in a process of its own, since only a worker loads models."""
    command = [sys.executable, "-m", "antiphon.model_worker.observability.replay", *argv]
    return subprocess.call(command)  # noqa: S603  # our own module, with the operator's arguments
