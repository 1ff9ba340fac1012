"""Which of several processes has a key, without a table: the one whose hash with it is highest.

Source: Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates" (1998). Of n
processes one that leaves or joins changes the place of one key in n.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from antiphon.wire.ids import InstanceId


def rendezvous(instance: InstanceId, key: bytes) -> bytes:
    """Return what to order processes by, for this key."""
    return hashlib.sha256(instance.encode() + b"\0" + key).digest()
