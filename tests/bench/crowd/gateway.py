"""A gateway that is watched at its work: from SIGUSR1 to SIGUSR2, which writes what was found.

The file is beside its settings: `python -m tests.bench.crowd.gateway --config FILE ...`.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from tests.bench.crowd.sampler import Sampler, write

from antiphon.gateway.service import GatewayService
from antiphon.service.main import run

FILE = "samples.json"


def main() -> None:
    """Be a gateway."""
    file = Path(sys.argv[sys.argv.index("--config") + 1]).parent / FILE
    sampler = Sampler()
    signal.signal(signal.SIGUSR1, lambda *_: sampler.start())
    signal.signal(signal.SIGUSR2, lambda *_: write(sampler.stop(), file))
    run(GatewayService)


if __name__ == "__main__":
    main()
