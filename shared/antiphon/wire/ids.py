"""Identifiers on the bus: strings on the wire, distinct types in code.

Decoding checks their lengths: several are parts of subjects, which must not be empty and are
limited to 4 KiB by the broker.
"""

from __future__ import annotations

import uuid
from typing import Annotated, NewType

from msgspec import Meta

ClusterName = NewType("ClusterName", str)
ModelName = NewType("ModelName", str)
"""The served name of a model, as clients send it; never a path."""
InstanceId = NewType("InstanceId", str)
"""Stable name of a process, such as `worker-0`; survives restarts."""
Incarnation = NewType("Incarnation", str)
"""One run of a process; changes at each restart."""
RequestId = NewType("RequestId", str)
"""Created by the owner; unique in the cluster."""
TenantId = NewType("TenantId", str)
ClientKey = NewType("ClientKey", str)
"""The client's name of a request (`rid`); unique per tenant among live requests."""

LENGTHS_MAX = {
    ModelName: 256,
    InstanceId: 128,
    Incarnation: 64,
    RequestId: 128,
    TenantId: 256,
    ClientKey: 1024,
}
"""Maximum characters of each; none may be empty."""

for _name, _length in LENGTHS_MAX.items():
    # Type checkers accept only a class in `NewType`; msgspec reads `__supertype__` at run time.
    _bounded = Annotated[str, Meta(min_length=1, max_length=_length)]
    _name.__supertype__ = _bounded  # pyright: ignore[reportFunctionMemberAccess]

DEFAULT_TENANT = TenantId("default")


def new_incarnation() -> Incarnation:
    """Create the incarnation of this process."""
    return Incarnation(uuid.uuid4().hex[:16])


def new_request_id() -> RequestId:
    """Create a request id: 32 hexadecimal digits, as OpenAI clients see it in `id`."""
    return RequestId(uuid.uuid4().hex)
