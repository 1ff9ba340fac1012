"""Where others reach what listens here."""

from __future__ import annotations

import socket

import pytest

from antiphon.service.sockets import address_for_others, bind


@pytest.mark.parametrize(
    ("host", "advertise_host", "told"),
    [
        ("127.0.0.1", "", "127.0.0.1"),
        ("0.0.0.0", "", socket.gethostname()),
        ("0.0.0.0", "node-3.cluster", "node-3.cluster"),
        ("127.0.0.1", "node-3.cluster", "node-3.cluster"),
    ],
)
def test_others_are_told_an_address_that_they_can_reach(
    host: str, advertise_host: str, told: str
) -> None:
    with bind(host, 0) as listening:
        port = listening.getsockname()[1]
        assert address_for_others(listening, host, advertise_host) == f"{told}:{port}"
