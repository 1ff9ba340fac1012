"""Real certificates, made by the openssl program."""

from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec


class Certificate(msgspec.Struct, frozen=True):
    """A certificate that is its own authority, and its key."""

    certificate: Path
    key: Path


def make(folder: Path, name: str, password: str = "") -> Certificate:
    """Make one for 127.0.0.1; with a password its key is encrypted."""
    made = Certificate(folder / f"{name}.pem", folder / f"{name}.key")
    secret = ["-passout", f"pass:{password}"] if password else ["-nodes"]
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-days", "30", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(made.key), "-out", str(made.certificate), *secret),
        ],
        check=True,
        capture_output=True,
    )
    return made
