"""The watch that the clients' tests rely on: another machine's address fails a test."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from tests.clients.programs import run_on_loopback, running_on_loopback

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.system

ELSEWHERE = "192.0.2.1"
"""Kept for documents: no machine has it. Connecting a datagram socket sends nothing."""
CONNECT = """
import socket, subprocess, sys
def connect(address):
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect((address, 9))
connect("127.0.0.1")
if sys.argv[1] == "itself":
    connect("192.0.2.1")
if sys.argv[1] == "child":
    subprocess.run([sys.executable, "-c", sys.argv[2], "itself"], check=True)
"""


def connecting(how: str) -> list[str]:
    """Return a client that connects to this machine, and elsewhere itself, by a child, or not."""
    return [sys.executable, "-c", CONNECT, how, CONNECT]


def test_client_that_stays_on_this_machine_passes(tmp_path: Path) -> None:
    assert run_on_loopback(connecting("not"), folder=tmp_path, environment={}).code == 0


@pytest.mark.parametrize("how", ["itself", "child"])
def test_client_that_connects_elsewhere_fails_its_test(tmp_path: Path, how: str) -> None:
    with pytest.raises(AssertionError, match=ELSEWHERE):
        run_on_loopback(connecting(how), folder=tmp_path, environment={})


def test_client_that_is_ended_has_been_watched_too(tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match=ELSEWHERE),
        running_on_loopback(connecting("child"), folder=tmp_path, environment={}) as client,
    ):
        assert client.wait(timeout=60) == 0


def test_client_that_connects_to_nothing_was_not_watched(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="connected to nothing at all"):
        run_on_loopback([sys.executable, "-c", ""], folder=tmp_path, environment={})
