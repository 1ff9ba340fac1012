"""`python -m antiphon.tokenizer`."""

from __future__ import annotations

from antiphon.service.main import run
from antiphon.tokenizer.service import TokenizerService

if __name__ == "__main__":
    run(TokenizerService)
