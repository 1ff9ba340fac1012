"""`python -m antiphon.gateway`."""

from __future__ import annotations

from antiphon.gateway.service import GatewayService
from antiphon.service.main import run

if __name__ == "__main__":
    run(GatewayService)
