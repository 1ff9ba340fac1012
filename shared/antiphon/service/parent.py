"""End a process together with its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from antiphon.service.sockets import CannotStart

_PR_SET_PDEATHSIG = 1


def die_with(parent_pid: int) -> None:
    """Make the kernel kill this process when its parent ends, even if the parent is killed."""
    # Does nothing on systems other than Linux. Raises `CannotStart` if the parent has ended
    # already.
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise CannotStart(f"prctl: {os.strerror(ctypes.get_errno())}")
    # The parent may have ended before the call.
    if os.getppid() != parent_pid:
        raise CannotStart(f"parent {parent_pid} has ended")
