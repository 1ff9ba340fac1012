"""`python -m antiphon.encoder`."""

from __future__ import annotations

from antiphon.encoder.service import EncoderService
from antiphon.service.main import run

if __name__ == "__main__":
    run(EncoderService)
