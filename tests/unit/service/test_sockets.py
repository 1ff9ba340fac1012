"""Where others reach what listens here."""

from __future__ import annotations

import socket

import pytest

from antiphon.service.startup import address_for_others, bind


@pytest.mark.parametrize(
    ("host", "advertise_host", "expected"),
    [
        ("127.0.0.1", "", "127.0.0.1"),
        ("0.0.0.0", "", socket.gethostname()),
        ("0.0.0.0", "node-3.cluster", "node-3.cluster"),
        ("127.0.0.1", "node-3.cluster", "node-3.cluster"),
    ],
)
def test_address_for_others_is_reachable(host: str, advertise_host: str, expected: str) -> None:
    with bind(host, 0) as listening:
        port = listening.getsockname()[1]
        assert address_for_others(listening, host, advertise_host) == f"{expected}:{port}"
