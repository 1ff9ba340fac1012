"""The committed bytes of every message, as text that a review can read.

    python -m tests.wire.golden        writes the files again: do it only for a deliberate change

An additive change alters the bytes of an example that uses it. Anything else breaks v1.
"""

from __future__ import annotations

from pathlib import Path

from tests.wire.examples import EVERY

from antiphon.wire.codec import encode

FOLDER = Path(__file__).parent / "golden"
COLUMNS = 16


def path_of(message: type) -> Path:
    return FOLDER / f"{message.__name__}.hex"


def dump(payload: bytes) -> str:
    """Write bytes in hexadecimal, with what is printable beside them."""
    rows = (payload[at : at + COLUMNS] for at in range(0, len(payload), COLUMNS))
    return "".join(f"{row.hex(' '):{COLUMNS * 3}}|{_printable(row)}|\n" for row in rows)


def load(text: str) -> bytes:
    """Read what `dump` wrote."""
    return b"".join(bytes.fromhex(line.split("|", 1)[0]) for line in text.splitlines())


def _printable(row: bytes) -> str:
    return "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in row)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.hex"):
        old.unlink()
    for example in EVERY:
        path_of(type(example)).write_text(dump(encode(example)))
