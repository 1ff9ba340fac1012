"""A process that ends with the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from antiphon.service.sockets import CannotStart

_PR_SET_PDEATHSIG = 1


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends, even if that one is killed.

    Where there is no such call (not Linux), it does nothing.

    Raises:
        CannotStart: The parent has ended already.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise CannotStart(f"prctl: {os.strerror(ctypes.get_errno())}")
    # It may have ended before we asked.
    if os.getppid() != parent_pid:
        raise CannotStart(f"parent {parent_pid} has ended")
