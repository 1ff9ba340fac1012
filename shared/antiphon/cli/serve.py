"""`antiphon serve`: run NATS and all services as processes on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.cli.arguments import load_arguments
from antiphon.supervisor.main import serve

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Serve until interrupted."""
    summary = "Start NATS and every service on this machine. SGLang's arguments are accepted too."
    return serve(load_arguments("antiphon serve", summary, argv).settings)
