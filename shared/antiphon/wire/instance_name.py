"""A starting process asks for its name; the process that lives under it answers."""

from __future__ import annotations

from antiphon.wire.base import Message, Process


class ClaimName(Message):
    """A process asks, before its first heartbeat, whether another one has its name.

    Without a listener the broker says so at once, and the name is free. A holder that is frozen
    does not answer, and loses the name when it counts as dead.

    Attributes:
        held: The sender answers for the name by now. A holder that receives this asks anew: of two
            that found the name free at the same time, one is to leave.
    """

    process: Process
    held: bool = False


class NameTaken(Message):
    """A live process has the name."""

    process: Process
