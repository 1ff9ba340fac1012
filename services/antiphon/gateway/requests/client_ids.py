"""The ids that clients give to their requests, while these run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.wire.errors import DuplicateRequest

if TYPE_CHECKING:
    from antiphon.gateway.requests.generation_request import GenerationRequest
    from antiphon.wire.ids import ClientKey, TenantId

    ClientId = tuple[TenantId, ClientKey]


def client_id(gen_request: GenerationRequest) -> ClientId | None:
    """The id of a request among those of all tenants; None if its client gave none."""
    return None if gen_request.key is None else (gen_request.tenant, gen_request.key)


class ClientIds:
    """Ids of running requests: no two of a tenant have the same one."""

    def __init__(self) -> None:
        self._taken: set[ClientId] = set()

    def __bool__(self) -> bool:
        """Whether any are taken."""
        return bool(self._taken)

    def reserve(self, gen_request: GenerationRequest) -> ClientId | None:
        """Take the id of a request, if it has one.

        Raises:
            DuplicateRequest: A running request of the tenant has it.
        """
        name = client_id(gen_request)
        if not self.take(name):
            text = f"a request with the rid '{gen_request.key}' is running"
            raise DuplicateRequest(text, param="rid")
        return name

    def take(self, name: ClientId | None) -> bool:
        """Take an id, if it is one; False: a running request has it."""
        if name in self._taken:
            return False
        if name is not None:
            self._taken.add(name)
        return True

    def free(self, name: ClientId | None) -> None:
        """Give back an id, if it is one."""
        if name is not None:
            self._taken.discard(name)
