"""`python -m antiphon.scheduler`."""

from __future__ import annotations

from antiphon.scheduler.service import SchedulerService
from antiphon.service.main import run

if __name__ == "__main__":
    run(SchedulerService)
