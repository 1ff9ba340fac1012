"""`antiphon replay`: replay step plans that a worker recorded, and print where results differ."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Run the replay in a child process, since only workers load models."""
    command = [sys.executable, "-m", "antiphon.model_worker.observability.replay", *argv]
    return subprocess.call(command)  # noqa: S603  # our own module, with the operator's arguments
