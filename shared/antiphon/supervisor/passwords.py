"""Users of the supervisor's own nats-server, for when API keys are configured.

Without them, a client on the broker could publish as a service.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

from antiphon.bus.discovery import OPERATOR
from antiphon.bus.permissions import anonymous_user, user, users_text
from antiphon.wire.base import Role

if TYPE_CHECKING:
    from collections.abc import Mapping

    from antiphon.bus.permissions import NatsUser
    from antiphon.wire.ids import ClusterName
    from antiphon.wire.routes import Party

_PASSWORD_BYTES = 24


class Passwords:
    """One password per role, new at each start. Connections without one are clients."""

    def __init__(self, cluster: ClusterName) -> None:
        self._cluster = cluster
        self._passwords: Mapping[Party, str] = {
            party: f"p{secrets.token_hex(_PASSWORD_BYTES)}" for party in (*Role, OPERATOR)
        }

    def server_text(self) -> str:
        """Return the users section of the server's config."""
        anonymous = anonymous_user(self._cluster)
        users = [*(self._user(party) for party in self._passwords), anonymous]
        return users_text(users) + f"no_auth_user: {anonymous.name}\n"

    def environment(self, role: Role) -> Mapping[str, str]:
        """Return the environment variables with a service's user and password."""
        return {
            "ANTIPHON_BUS__USER": str(role),
            "ANTIPHON_BUS__PASSWORD": self._passwords[role],
        }

    @property
    def operator(self) -> str:
        """The supervisor's own password."""
        return self._passwords[OPERATOR]

    def _user(self, party: Party) -> NatsUser:
        return replace(user(self._cluster, party), password=f'"{self._passwords[party]}"')
