"""`python -m antiphon.model_worker`."""

from __future__ import annotations

from antiphon.model_worker.service import ModelWorker
from antiphon.service.main import run

if __name__ == "__main__":
    run(ModelWorker)
