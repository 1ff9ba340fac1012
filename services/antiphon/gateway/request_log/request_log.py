"""Records every request from its arrival to its end, and logs what is enabled.

Submission starts a record, the request's stream updates it, and its terminal event ends it; no
endpoint takes part. With nothing enabled there are no records, and no overhead in streams.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from prometheus_client import Counter

from antiphon.config.errors import ConfigError
from antiphon.config.gateway import STDOUT, LogFormat, LogLevel, targets
from antiphon.gateway.owner.actions import Ended, Finished, StreamEvent, TextDelta
from antiphon.gateway.request_log.record import (
    CUT_CHARACTERS,
    EVERYTHING,
    PARAMETERS,
    TEXTS,
    RecordedInput,
    RequestRecord,
    TextTruncator,
    as_json,
    as_text,
    exported_line,
    finished_line,
    received_line,
    sampling_of,
)
from antiphon.gateway.request_log.writer import (
    CrashDump,
    HourlyFile,
    RecordWriter,
    StandardOutput,
    folder_of,
    make_folder,
)
from antiphon.gateway.requests.generation_request import PROBE_API, GenerationRequest
from antiphon.gateway.stream.stream import RequestStream
from antiphon.wire.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from antiphon.service.service import Runtime
    from antiphon.wire.ids import RequestId

log = logging.getLogger(__name__)

FINISHED_S = 300.0
"""How long a finished request is kept for a crash dump."""
_ALL_CHARACTERS = 2**62
_QUEUED_BYTES = 2048
"""Size of a queued record without its texts."""

LogTarget = HourlyFile | StandardOutput


class LoggingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to log of requests, and where. Can be changed at run time."""

    enabled: bool
    level: LogLevel
    format: LogFormat
    target: tuple[str, ...]


class RequestLog:
    def __init__(self, runtime: Runtime, model: str) -> None:
        config = runtime.settings.request_log
        self._config = config
        self._clock = runtime.clock
        self._model = model
        self._instance = runtime.process.instance
        dropped = Counter(
            "antiphon_dropped_request_records",
            "Records of requests that were not written, by reason.",
            ("reason",),
            registry=runtime.metrics.registry,
        )
        self._writer = RecordWriter(config.queue_bytes_max, dropped, runtime.clock.now)
        self._open: dict[RequestId, RequestRecord] = {}
        self._finished: deque[RequestRecord] = deque()
        self._held_bytes = 0
        self._targets: dict[str, LogTarget] = {}
        self.logging = LoggingOptions(
            enabled=config.enabled,
            level=config.level,
            format=config.format,
            target=targets(config.target),
        )
        self.folders = frozenset(self.logging.target) - {STDOUT}
        self._exported = (
            HourlyFile(
                folder_of(config.export_folder), f"request_metrics_{self._instance}", ".jsonl"
            )
            if config.export_metrics
            else None
        )
        self.crash_dump = (
            CrashDump(
                folder_of(config.crash_dump_folder),
                self._instance,
                bytes_max=config.held_bytes_max,
                unix_ms=runtime.clock.unix_ms,
            )
            if config.crash_dump_folder
            else None
        )
        self._open_targets()

    def check_folders(self) -> None:
        """Create the configured folders that are in use.

        Raises:
            ConfigError: One cannot be created or is not writable.
        """
        config = self._config
        named = [config.crash_dump_folder, config.export_folder if config.export_metrics else ""]
        for name in (*named, *(self.folders if config.enabled else ())):
            if name:
                try:
                    make_folder(folder_of(name))
                except OSError as error:
                    raise ConfigError(f"request_log: the folder {name}: {error}") from error

    def begin(self, gen_request: GenerationRequest, request_id: RequestId) -> RequestRecord | None:
        active = self.logging.enabled or self._exported is not None or self.crash_dump is not None
        if not active or gen_request.api == PROBE_API:
            return None
        record = RequestRecord.of(gen_request, request_id, self._clock.unix_ms())
        if not record.private:
            self._take_input(record, gen_request)
        self._held_bytes += record.held_bytes
        self._open[request_id] = record
        if self.logging.enabled and not record.private:
            record.logged = True
            self._log(record, received_line)
        return record

    def refuse(self, record: RequestRecord, error: BaseException, began_at: float) -> None:
        """End the record of a request that was rejected before it was open."""
        record.e2e_s = self._clock.now() - began_at
        if isinstance(error, EngineError):
            record.outcome, record.error = error.code, error.message
        else:
            record.outcome = "cancelled"
        self._end(record)

    def follow(self, record: RequestRecord, event: StreamEvent) -> None:
        match event:
            case TextDelta() if event.text and record.room[event.choice]:
                self._record_text(record, event.choice, event.text)
            case Finished():
                record.finish_reasons[event.choice] = str(event.reason)
            case _:
                pass

    def end(self, record: RequestRecord, stream: RequestStream, event: Ended) -> None:
        assert stream.ended_at is not None
        record.usage = event.usage
        record.outcome = event.error.code if event.error else str(stream.finish_reason)
        record.error = event.error.message if event.error else None
        record.e2e_s = stream.ended_at - stream.received_at
        if stream.first_token_at is not None and stream.last_token_at is not None:
            record.first_token_s = stream.first_token_at - stream.received_at
            record.decode_s = stream.last_token_at - stream.first_token_at
        self._end(record)

    def configure(self, wanted: LoggingOptions) -> None:
        self.logging = wanted
        self._open_targets()

    def dump(self, reason: str) -> None:
        """Write a crash dump, if a folder is set and none was written. Never raises."""
        if self.crash_dump is not None:
            self._forget_old()
            held = (*self._open.values(), *reversed(self._finished))
            self.crash_dump.write(reason, [record for record in held if not record.private])

    async def close(self) -> None:
        await self._writer.close()

    def _take_input(self, record: RequestRecord, gen_request: GenerationRequest) -> None:
        """Record the parts of the input that may be written, and set the limit for the output."""
        level = self.logging.level if self.logging.enabled else -1
        whole = self.crash_dump is not None or level >= EVERYTHING
        if whole or level >= PARAMETERS:
            record.sampling = sampling_of(gen_request)
        if not whole and level < TEXTS:
            return
        content = RecordedInput.of(gen_request)
        fits = whole and self._make_room(content.size_bytes)
        record.content = content if fits else TextTruncator().value(content)
        record.cut = whole and not fits
        record.room = [_ALL_CHARACTERS if fits else CUT_CHARACTERS + 1] * record.choices
        record.held_bytes += content.size_bytes if fits else CUT_CHARACTERS

    def _record_text(self, record: RequestRecord, choice: int, text: str) -> None:
        if not self._make_room(len(text)):
            record.room, record.cut = [0] * record.choices, True
            return
        size = record.keep(choice, text)
        record.held_bytes += size
        self._held_bytes += size

    def _make_room(self, size: int) -> bool:
        """Discard finished requests until a text fits; return whether it does."""
        while self._held_bytes + size > self._config.held_bytes_max and self._finished:
            self._held_bytes -= self._finished.popleft().held_bytes
        return self._held_bytes + size <= self._config.held_bytes_max

    def _end(self, record: RequestRecord) -> None:
        record.ended_at = self._clock.now()
        record.ended_unix_ms = self._clock.unix_ms()
        del self._open[record.request_id]
        if record.logged and self.logging.enabled:
            self._log(record, finished_line)
        if (file := self._exported) is not None:
            self._put(_QUEUED_BYTES, record, lambda: exported_line(record, self._model), [file])
        if self.crash_dump is not None and not record.private:
            self._finished.append(record)
            self._forget_old()
            self._make_room(0)
        else:
            self._held_bytes -= record.held_bytes

    def _forget_old(self) -> None:
        since = self._clock.now() - FINISHED_S
        while self._finished and (self._finished[0].ended_at or 0.0) < since:
            self._held_bytes -= self._finished.popleft().held_bytes

    def _log(
        self, record: RequestRecord, line: Callable[[RequestRecord, int], dict[str, object]]
    ) -> None:
        level, wanted = self.logging.level, list(self._targets.values())
        size = _QUEUED_BYTES + (record.held_bytes if level >= TEXTS else 0)
        write = as_json if self.logging.format == "json" else as_text
        self._put(size, record, lambda: line(record, level), wanted, write)

    def _put(
        self,
        size: int,
        record: RequestRecord,
        line: Callable[[], dict[str, object]],
        wanted: Sequence[LogTarget],
        write: Callable[[dict[str, object]], bytes] = as_json,
    ) -> None:
        unix_ms = record.ended_unix_ms or record.received_unix_ms

        def run() -> None:
            text = write(line())
            failed: OSError | None = None
            for target in wanted:
                try:
                    target.write(text, unix_ms / 1000)
                except OSError as error:
                    failed = error
            if failed is not None:
                raise failed

        self._writer.put(size, run)

    def _open_targets(self) -> None:
        """Keep open files of unchanged targets, and close the others in the writer thread."""
        kept, before = {}, self._targets
        for name in self.logging.target if self.logging.enabled else ():
            kept[name] = before.get(name) or self._target(name)
        self._targets = kept
        for name, target in before.items():
            if name not in kept:
                self._writer.put(0, target.close)

    def _target(self, name: str) -> LogTarget:
        if name == STDOUT:
            return StandardOutput()
        return HourlyFile(folder_of(name), f"requests_{self._instance}", ".log")


@dataclass(eq=False, kw_only=True)
class RecordedStream(RequestStream):
    """A stream whose events are also recorded."""

    record: RequestRecord
    request_log: RequestLog

    def put(self, event: StreamEvent, now: float) -> None:
        super().put(event, now)
        try:
            if self.ended is None:
                self.request_log.follow(self.record, event)
            else:
                self.request_log.end(self.record, self, self.ended)
        except Exception:
            # The request continues: a failure to record must not affect its client.
            log.exception("event not recorded", extra={"request_id": self.submit.request_id})
