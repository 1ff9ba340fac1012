"""Runs a service whose wall clock is so many seconds ahead, as on a host that is not synchronized.

    python -m tests.support.skewed_clock 4.5 antiphon.model_worker --instance worker-1 --config FILE

The services read it in one function, which is replaced here: production code has no switch for it.
"""

from __future__ import annotations

import runpy
import sys
import time

from antiphon.service.clock import SystemClock


def main() -> None:
    _, ahead_s, module, *arguments = sys.argv
    ahead_ns = round(float(ahead_s) * 1e9)

    def unix_ms(self: SystemClock) -> int:
        return (time.time_ns() + ahead_ns) // 1_000_000

    SystemClock.unix_ms = unix_ms
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
