"""`python -m antiphon.detokenizer`."""

from __future__ import annotations

from antiphon.detokenizer.service import DetokenizerService
from antiphon.service.main import run

if __name__ == "__main__":
    run(DetokenizerService)
