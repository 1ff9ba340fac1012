"""`python -m antiphon.gateway`."""

from __future__ import annotations

import sys

from antiphon.gateway.service import GatewayService
from antiphon.service.main import run
from antiphon.wire.base import Role

if __name__ == "__main__":
    sys.exit(run(Role.GATEWAY, GatewayService))
