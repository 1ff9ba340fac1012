"""Writes the recorded plans to a file after a failure, or by an operator command."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from antiphon.model_worker.observability.recording import RecordingHeader, write
from antiphon.wire.errors import Internal, Unsupported

if TYPE_CHECKING:
    from antiphon.model_worker.observability.flight_recorder import FlightRecorder
    from antiphon.model_worker.startup.engine import Engine
    from antiphon.service.clock import Clock
    from antiphon.wire.ids import InstanceId

log = logging.getLogger(__name__)


class PlanDumps:
    """Writes recordings to `batching.dump_folder`; without one, prompts stay in memory.

    They hold the tokens of prompts and outputs, so they are only written if a folder is configured.
    """

    def __init__(
        self,
        folder: str,
        instance: InstanceId,
        engine: Engine,
        recorder: FlightRecorder,
        clock: Clock,
    ) -> None:
        self._folder = Path(folder).expanduser() if folder else None
        self._instance = instance
        self._engine = engine
        self._recorder = recorder
        self._clock = clock

    def write(self, reason: str) -> Path:
        """Write all recorded plans. Blocks; called from any thread.

        Raises:
            Unsupported: No folder is configured.
            Internal: The folder cannot be written to.
        """
        if self._folder is None:
            raise Unsupported("no plans are written: batching.dump_folder is empty")
        core = self._engine.core
        header = RecordingHeader(
            reason=reason,
            unix_ms=self._clock.unix_ms(),
            instance=self._instance,
            weights_digest=core.limits.weights_digest,
            weight_version=core.limits.weight_version,
            groups=core.pools.groups,
            resolved=self._engine.resolved,
        )
        try:
            file = write(self._folder, header, self._recorder.records())
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
