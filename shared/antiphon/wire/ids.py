"""Names of things that cross the bus: strings on the wire, types of their own in code.

Decoding checks their lengths: several are parts of subjects, which may not be empty, and of which
the broker takes 4 KiB at most.
"""

from __future__ import annotations

import uuid
from typing import Annotated, NewType

from msgspec import Meta

ClusterName = NewType("ClusterName", str)
ModelName = NewType("ModelName", str)
"""The served name of a model, as clients say it; never a path."""
InstanceId = NewType("InstanceId", str)
"""Stable name of one process, as `worker-0`; survives a restart."""
Incarnation = NewType("Incarnation", str)
"""One life of a process; changes at each restart."""
RequestId = NewType("RequestId", str)
"""Minted by the owner; unique in the cluster."""
TenantId = NewType("TenantId", str)
ClientKey = NewType("ClientKey", str)
"""What a client calls its request (`rid`); unique a tenant among live requests."""

LENGTHS_MAX = {
    ModelName: 256,
    InstanceId: 128,
    Incarnation: 64,
    RequestId: 128,
    TenantId: 256,
    ClientKey: 1024,
}
"""Most characters of each; none may be empty."""

for _name, _length in LENGTHS_MAX.items():
    # Type checkers take nothing but a class here, and msgspec takes what stands here at run time.
    _bounded = Annotated[str, Meta(min_length=1, max_length=_length)]
    _name.__supertype__ = _bounded  # pyright: ignore[reportFunctionMemberAccess]

DEFAULT_TENANT = TenantId("default")


def new_incarnation() -> Incarnation:
    """Name this life of the process."""
    return Incarnation(uuid.uuid4().hex[:16])


def new_request_id() -> RequestId:
    """Mint a request id: 32 hexadecimal digits, as OpenAI clients see it in `id`."""
    return RequestId(uuid.uuid4().hex)
