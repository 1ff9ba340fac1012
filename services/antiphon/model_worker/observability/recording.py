"""Recordings: step plans in a file, for replay elsewhere."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from antiphon.model_worker.batching.plan_buffer import pack, unpack
from antiphon.model_worker.cache.groups import CacheGroup
from antiphon.model_worker.observability.flight_recorder import FlightRecorder, StepRecord
from antiphon.resolve.resolved_config import ResolvedConfig as Resolved
from antiphon.wire.errors import Internal, Unsupported
from antiphon.wire.routes import escape

if TYPE_CHECKING:
    from collections.abc import Iterable

    from antiphon.model_worker.startup.engine import Engine
    from antiphon.service.clock import Clock
    from antiphon.wire.ids import InstanceId

log = logging.getLogger(__name__)


SUFFIX = ".plans"
FILES_MAX = 16
"""Maximum files of one instance, so that a process that crashes repeatedly fills no disk."""

_MAGIC = b"antiphon plans 3\n"
_LENGTH_BYTES = 4


class RecordingBroken(Exception):
    """A file is not a recording, or is damaged."""


class RecordingHeader(msgspec.Struct, frozen=True, kw_only=True):
    """All that is needed to replay the plans; `resolved` is None where the worker ran no model."""

    reason: str
    unix_ms: int
    instance: str
    weights_digest: str
    weight_version: str
    groups: tuple[CacheGroup, ...]
    resolved: Resolved | None


@dataclass(frozen=True, slots=True)
class Recording:
    header: RecordingHeader
    records: tuple[StepRecord, ...]


def write(folder: Path, header: RecordingHeader, records: Iterable[StepRecord]) -> Path:
    """Write a recording, readable only by the file's owner, since it holds prompts and outputs.

    The oldest files of the instance are deleted. Blocks for as long as the disk takes.

    Raises:
        OSError: The folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = escape(header.instance)
    file = folder / f"{name}-{header.unix_ms}{SUFFIX}"
    partial = file.with_suffix(".partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(_MAGIC)
        _put(stream, msgspec.msgpack.encode(header))
        for record in records:
            _put(stream, pack(record))
    partial.replace(file)
    for old in sorted(folder.glob(f"{name}-*{SUFFIX}"))[:-FILES_MAX]:
        old.unlink(missing_ok=True)
    return file


def read(file: Path) -> Recording:
    """Read a recording.

    Raises:
        RecordingBroken: The file is not a recording, or is truncated.
        OSError: The file cannot be read.
    """
    with file.open("rb") as stream:
        if stream.read(len(_MAGIC)) != _MAGIC:
            raise RecordingBroken(f"{file} is not a recording of this version")
        try:
            header = msgspec.msgpack.decode(_block(stream), type=RecordingHeader)
            records: list[StepRecord] = []
            while block := _block(stream):
                records.append(unpack(block, StepRecord))
        except (msgspec.DecodeError, ValueError, TypeError) as error:
            raise RecordingBroken(f"{file} is damaged: {error}") from error
    return Recording(header, tuple(records))


def _put(stream: BinaryIO, block: bytes | bytearray) -> None:
    stream.write(len(block).to_bytes(_LENGTH_BYTES, "little"))
    stream.write(block)


def _block(stream: BinaryIO) -> bytearray:
    length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
    block = bytearray(stream.read(length))  # writable, since torch has no read-only tensors
    if len(block) != length:
        raise ValueError("it ends too early")
    return block


@dataclass(frozen=True, slots=True)
class PlanDumps:
    """Writes recordings to `folder`, if set: they hold prompts and outputs."""

    folder: str
    instance: InstanceId
    engine: Engine
    recorder: FlightRecorder
    clock: Clock

    def write(self, reason: str) -> Path:
        """Write all recorded plans. Blocks; called from any thread.

        Raises:
            Unsupported: No folder is configured.
            Internal: The folder cannot be written to.
        """
        if not self.folder:
            raise Unsupported("no plans are written: batching.dump_folder is empty")
        core = self.engine.step_core
        header = RecordingHeader(
            reason=reason,
            unix_ms=self.clock.unix_ms(),
            instance=self.instance,
            weights_digest=core.limits.weights_digest,
            weight_version=core.limits.weight_version,
            groups=core.cache_groups,
            resolved=self.engine.resolved,
        )
        try:
            file = write(Path(self.folder).expanduser(), header, self.recorder.records())
        except OSError as error:
            raise Internal(f"the plans cannot be written: {error}") from error
        log.info("plans written", extra={"file": str(file), "reason": reason})
        return file

    def write_on_exit(self, reason: str) -> None:
        """Write them before the process ends, if a folder is configured. Never raises."""
        try:
            self.write(reason)
        except (Unsupported, Internal) as error:
            log.warning("plans not written", extra={"reason": error.message})
