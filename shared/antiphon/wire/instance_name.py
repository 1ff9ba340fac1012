"""A starting process claims its instance name; a live process with that name replies."""

from __future__ import annotations

from antiphon.wire.base import Message, Process


class ClaimName(Message):
    """Sent before a process's first heartbeat, to find out whether its name is taken.

    With no responders, which the broker reports at once, the name is free. A frozen holder does not
    reply, and loses the name when it counts as dead.

    Attributes:
        held: The sender already holds the name. A holder that receives this claims again: if two
            processes found the name free at the same time, one of them must exit.
    """

    process: Process
    held: bool = False


class NameTaken(Message):
    """A live process has the name."""

    process: Process
