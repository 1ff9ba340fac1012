"""`python -m antiphon.scheduler`."""

from __future__ import annotations

import sys

from antiphon.scheduler.service import SchedulerService
from antiphon.service.main import run
from antiphon.wire.base import Role

if __name__ == "__main__":
    sys.exit(run(Role.SCHEDULER, SchedulerService))
