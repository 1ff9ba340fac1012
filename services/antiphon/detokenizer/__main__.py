"""`python -m antiphon.detokenizer`."""

from __future__ import annotations

from antiphon.detokenizer.service import DetokenizerService
from antiphon.service.main import run
from antiphon.wire.base import Role

if __name__ == "__main__":
    run(Role.DETOKENIZER, DetokenizerService)
