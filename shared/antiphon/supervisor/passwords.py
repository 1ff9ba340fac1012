"""Users of the supervisor's own nats-server: with keys, nobody else may speak as a service does."""

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
    """One a role, made anew at each start. Whoever shows none is a client, of any tenant."""

    def __init__(self, cluster: ClusterName) -> None:
        self._cluster = cluster
        self._passwords: Mapping[Party, str] = {
            party: f"p{secrets.token_hex(_PASSWORD_BYTES)}" for party in (*Role, OPERATOR)
        }

    def server_text(self) -> str:
        """What the server is told."""
        stranger = anonymous_user(self._cluster)
        users = [*(self._user(party) for party in self._passwords), stranger]
        return users_text(users) + f"no_auth_user: {stranger.name}\n"

    def environment(self, role: Role) -> Mapping[str, str]:
        """What a service is told."""
        return {
            "ANTIPHON_BUS__USER": str(role),
            "ANTIPHON_BUS__PASSWORD": self._passwords[role],
        }

    @property
    def operator(self) -> str:
        """The supervisor's own."""
        return self._passwords[OPERATOR]

    def _user(self, party: Party) -> NatsUser:
        return replace(user(self._cluster, party), password=f'"{self._passwords[party]}"')
