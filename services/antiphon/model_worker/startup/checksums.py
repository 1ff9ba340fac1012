"""A model's files are compared with published checksums, and with the cluster's digest."""

from __future__ import annotations

import hashlib
import logging
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from antiphon.config.errors import ConfigError
from antiphon.model_card.files import ModelFiles, ModelLocation, files_at
from antiphon.model_card.hub import PublishedFile, list_published_files
from antiphon.model_card.pooling import module_files
from antiphon.service.startup import CannotStart

if TYPE_CHECKING:
    from collections.abc import Mapping

    from antiphon.config.model import LoadConfig

log = logging.getLogger(__name__)

HUB = "hub"
"""Value of `load.checksum` for the model of `model.path` itself."""
NO_CONTENT = ("README*", "LICENSE*", "NOTICE*", ".*", "*.lock")
"""Files that may be added or changed freely, because they are not part of the model."""
READERS = 2
"""Hashing takes a core for each file, and more files at once only wait for the disk."""


def verify(files: ModelFiles, load: LoadConfig, model_path: str) -> None:
    """Compare the files of a model with `load.checksum`. Reads all of them.

    Every file that a JSON file (SGLang's form) lists must exist. The hub lists more files than are
    usually downloaded: every local file that the hub lists must match, weights and config among
    them.
    """
    source = model_path if load.checksum == HUB else load.checksum
    if not source:
        return
    if Path(source).is_file():
        expected = _listed(Path(source))
    else:
        expected = _of_hub(list_published_files(source, load), files, source)
    with ThreadPoolExecutor(READERS, thread_name_prefix="checksum") as readers:
        found = list(readers.map(partial(_compare, files.folder), expected.items()))
    if errors := list(filter(None, found)):
        raise ConfigError(f"load.checksum = {load.checksum}: {'; '.join(errors)}")
    log.info("checksums match", extra={"files": len(expected), "source": source})


class _ChecksumEntry(msgspec.Struct):
    sha256: str


class _List(msgspec.Struct):
    """`checksums` is the older form."""

    files: dict[str, _ChecksumEntry] = {}
    checksums: dict[str, str] = {}


def _listed(file: Path) -> dict[str, PublishedFile]:
    try:
        listed = msgspec.json.decode(file.read_bytes(), type=_List)
    except msgspec.DecodeError as error:
        raise ConfigError(f"load.checksum: {file}: {error}") from error
    sums = {name: entry.sha256 for name, entry in listed.files.items()} | listed.checksums
    if not sums:
        raise ConfigError(f"load.checksum: {file} lists no files")
    return {name: PublishedFile(0, digest, "") for name, digest in sums.items()}


def _of_hub(
    known: Mapping[str, PublishedFile], files: ModelFiles, source: str
) -> Mapping[str, PublishedFile]:
    needed = {"config.json", *(file.name for file in files.weights)}
    if unknown := sorted(needed - known.keys()):
        raise ConfigError(f"load.checksum: {source} on the hub has no {', '.join(unknown)}")
    local = {file.name for file in files.folder.iterdir() if file.is_file()}
    return {
        name: entry
        for name, entry in known.items()
        if name in local and not any(fnmatch(name, pattern) for pattern in NO_CONTENT)
    }


def _compare(folder: Path, item: tuple[str, PublishedFile]) -> str | None:
    """The difference of a file from its checksum; None if there is none."""
    name, expected = item
    digest = expected.sha256 or expected.git_id
    try:
        actual = _actual(folder / name, expected)
    except OSError as error:
        return f"{name}: {error.strerror}"
    return None if actual == digest else f"{name} is {actual[:16]}…, not {digest[:16]}…"


def _actual(file: Path, expected: PublishedFile) -> str:
    with file.open("rb") as stream:
        if expected.sha256 is not None:
            return hashlib.file_digest(stream, "sha256").hexdigest()
        head = f"blob {file.stat().st_size}\0".encode()
        content = hashlib.sha1(head, usedforsecurity=False)
        return hashlib.file_digest(stream, lambda: content).hexdigest()


def verify_digest(place: ModelLocation, digest: str) -> None:
    """Compare the model with the digest of the cluster, if there is one."""
    if digest and (actual := content_digest(place)) != digest:
        folder = files_at(place).folder
        raise CannotStart(f"{folder}: digest {actual} differs from cluster.model_digest = {digest}")


def content_digest(place: ModelLocation) -> str:
    """SHA-256 over names and bytes of the config and the weights, in order of their names.

    Another config is another model, so overrides of config.json are included. So is another
    pooling: the files of sentence-transformers follow, if there are any.
    """
    files = files_at(place)
    content = hashlib.sha256(files.config() if files.overridden else b"")
    listed = [(file.name, file) for file in sorted([files.folder / "config.json", *files.weights])]
    modules = sorted(module_files(files.folder))
    listed += [(file.relative_to(files.folder).as_posix(), file) for file in modules]
    for name, file in listed:
        with file.open("rb") as stream:
            inner = hashlib.file_digest(stream, "sha256").hexdigest()
        content.update(f"{name}\0{inner}\n".encode())
    return content.hexdigest()
