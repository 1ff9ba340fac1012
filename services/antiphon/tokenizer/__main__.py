"""`python -m antiphon.tokenizer`."""

from __future__ import annotations

from antiphon.service.main import run
from antiphon.tokenizer.service import TokenizerService
from antiphon.wire.base import Role

if __name__ == "__main__":
    run(Role.TOKENIZER, TokenizerService)
