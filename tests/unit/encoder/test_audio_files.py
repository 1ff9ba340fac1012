"""Audio files between their parts: how many are kept, and for how long."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.wait import until

from antiphon.encoder import cache
from antiphon.encoder.cache import AudioFiles

if TYPE_CHECKING:
    import pytest


async def test_a_file_is_kept_until_it_is_taken() -> None:
    files = AudioFiles(100)
    files.keep(b"a", bytes(10))
    files.keep(b"a", bytes(20))
    assert files.bytes_held == 20
    assert files.take(b"a") == bytes(20)
    assert (files.take(b"a"), files.bytes_held) == (None, 0)


async def test_files_that_were_kept_first_leave_first() -> None:
    files = AudioFiles(25)
    for name in (b"a", b"b"):
        files.keep(name, bytes(10))
    files.keep(b"a", bytes(10))
    files.keep(b"c", bytes(10))
    assert files.take(b"b") is None
    assert files.take(b"a") is not None
    files.keep(b"d", bytes(26))
    assert (files.take(b"d"), files.bytes_held) == (None, 0)


async def test_a_file_that_no_part_is_wanted_of_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "IDLE_S", 0.01)
    files = AudioFiles(100)
    files.keep(b"a", bytes(10))
    await until(lambda: not files.bytes_held)
