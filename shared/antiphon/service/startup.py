"""What may prevent a process from starting: ports, message sizes, and a parent that has ended."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys

OPEN_ENTRY_BYTES = 192
"""Estimated size of an open list's entry, rounded up."""
HELD_ENTRY_BYTES = 288
"""Estimated size of a running request in a worker's heartbeat, rounded up."""
_REST_BYTES = 16 * 1024
_BACKLOG = 1024
_PR_SET_PDEATHSIG = 1


class CannotStart(Exception):
    """An operating condition that prevents startup; the message is one line for an operator."""


def bind(host: str, port: int) -> socket.socket:
    """Bind a TCP socket; port 0: any free port. Raises `CannotStart`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise CannotStart(f"{host}: {error.strerror or error}") from error
    try:
        # Reuses a port in TIME_WAIT after a restart, but not one with a listener.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise CannotStart(f"port {host}:{port}: {os.strerror(error.errno or 0)}") from error
    listening.setblocking(False)  # noqa: FBT003
    return listening


def address_for_others(listening: socket.socket, host: str, advertise_host: str) -> str:
    """Return the `host:port` at which other machines reach a listening socket.

    The host is `advertise_host`, else the bound host. If that means all addresses, it is this
    machine's name, which other containers on the same network can resolve.
    """
    everywhere = host in {"0.0.0.0", "::"}  # noqa: S104  # compared, not bound
    name = advertise_host or (socket.gethostname() if everywhere else host)
    return f"{name}:{listening.getsockname()[1]}"


def fitting_entries(each_bytes: int, message_bytes_max: int) -> int:
    """How many entries of a list fit into a message."""
    return max(0, (message_bytes_max - _REST_BYTES) // each_bytes)


def check_message_fits(field: str, count: int, *, each_bytes: int, message_bytes_max: int) -> None:
    """Reject a bound whose lists would exceed the broker's message size, with `CannotStart`."""
    # Peers would consider a process dead whose heartbeats cannot be sent, and its requests ended.
    fits = fitting_entries(each_bytes, message_bytes_max)
    if count > fits:
        raise CannotStart(
            f"{field} = {count}: must be at most {fits}, so that a list of all requests fits into "
            f"one NATS message of {message_bytes_max} bytes"
        )


def die_with(parent_pid: int) -> None:
    """Make the kernel kill this process when its parent ends, even if the parent is killed."""
    # Does nothing on systems other than Linux. Raises `CannotStart` if the parent has ended
    # already.
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise CannotStart(f"prctl: {os.strerror(ctypes.get_errno())}")
    # The parent may have ended before the call.
    if os.getppid() != parent_pid:
        raise CannotStart(f"parent {parent_pid} has ended")
