"""The entry point of every service: `python -m antiphon.<service> --config FILE --instance NAME`.

    run("tokenizer", TokenizerService)

Exit codes: 0 stopped as told, 1 failed while it ran, 2 bad settings, 3 could not start, 4 replaced
by another process of its name.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn, cast

import uvloop

from antiphon.bus.bus import Bus
from antiphon.bus.nats import LinkErrors, NatsTransport
from antiphon.config.digest import digest
from antiphon.config.errors import ConfigError
from antiphon.config.load import ProcessArguments, load_process
from antiphon.service.instance_name import Replaced
from antiphon.service.parent import die_with
from antiphon.service.run import ProcessContext, serve
from antiphon.service.sockets import CannotStart
from antiphon.telemetry import log as logs
from antiphon.wire.base import WIRE_VERSION, Process, ProcessState, Role
from antiphon.wire.errors import EngineError
from antiphon.wire.ids import ClusterName, InstanceId, new_incarnation

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from antiphon.config.settings import Settings
    from antiphon.service.service import Service
    from antiphon.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

FAILED = 1
BAD_SETTINGS = 2
CANNOT_START = 3
REPLACED = 4

_LEAVE_S = 4.0
"""What leaving may take beyond the drain deadline."""
_YOUNG_MAX = 10_000
"""Objects that are new before the garbage collector looks for cycles in them, in a millisecond.
Nearly all that a request makes dies by its references. With Python's 700, each 2,000 requests that
came had it look at everything a few times, 0.05 to 0.4 s in the gateway, and no stream went on."""


def run(role: str, build: Callable[[Settings], Service]) -> NoReturn:
    """Be a service until SIGTERM or SIGINT, then drain; a second signal ends it at once.

    Args:
        role: For `service.name` in traces and in messages before there is a log.
        build: Makes the service. It does no work yet; it may raise `CannotStart`.
    """
    try:
        arguments = load_process()
    except ConfigError as error:
        sys.stderr.write(f"antiphon {role}: {error}\n")
        sys.exit(BAD_SETTINGS)
    faulthandler.enable()  # a crash in a kernel leaves its stack in the log
    telemetry = arguments.settings.telemetry
    logs.set_up(level=telemetry.log_level, form=telemetry.log_format, instance=arguments.instance)
    with _traces(role, arguments):
        code = _run(role, build, arguments)
    log.info("stopped", extra={"code": code})
    sys.exit(code)


def _run(role: str, build: Callable[[Settings], Service], arguments: ProcessArguments) -> int:
    try:
        if arguments.parent_pid is not None:
            die_with(arguments.parent_pid)
        around = _process_context(Role(role), arguments)
        service = build(arguments.settings)
    except (CannotStart, ConfigError, EngineError) as error:
        log.error(logs.CANNOT_START, extra={"reason": str(error)})  # noqa: TRY400  # one line
        return CANNOT_START
    process = around.bus.process
    log.info(
        "starting",
        extra={
            "role": role,
            "incarnation": process.incarnation,
            "pid": os.getpid(),
            "wire_version": WIRE_VERSION,
            "config_digest": digest(arguments.settings.cluster),
        },
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_until_signal(service, around))


def _process_context(role: Role, arguments: ProcessArguments) -> ProcessContext:
    settings = arguments.settings
    if not settings.bus.url:
        raise CannotStart("bus.url is not set; use --bus-url nats://host:port")
    process = Process(instance=InstanceId(arguments.instance), incarnation=new_incarnation())
    transport = NatsTransport(settings.bus, name=arguments.instance)
    around = ProcessContext(
        settings=settings,
        bus=Bus(transport, ClusterName(settings.cluster.name), process, party=role),
        on_started=tune_gc,
    )
    _export_link_errors(around.metrics, transport.errors)
    return around


def tune_gc() -> None:
    """Have the garbage collector look at what is made from here on, and less often.

    What the start has made stays: in a worker it took 0.2 s each time, in which no step began.
    """
    gc.collect()
    gc.freeze()
    _, *older = gc.get_threshold()
    gc.set_threshold(_YOUNG_MAX, *older)


def _export_link_errors(metrics: Metrics, errors: LinkErrors) -> None:
    """Show what goes wrong out of anybody's sight: above all what a slow receiver lost."""
    metrics.link_errors.labels("dropped").set_function(lambda: errors.dropped)
    metrics.link_errors.labels("forbidden").set_function(lambda: errors.forbidden)
    metrics.link_errors.labels("failed").set_function(lambda: errors.failed)


async def _until_signal(service: Service, context: ProcessContext) -> int:
    stop = asyncio.Event()
    leave_s = context.settings.service.drain_timeout_s + _LEAVE_S

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        # Whatever hangs on the way out, even the loop itself: gone by then, with tracebacks.
        faulthandler.dump_traceback_later(leave_s, exit=True)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    try:
        await serve(service, context, stop)
    except Exception as error:  # noqa: BLE001  # here and in the inbox
        code = _failed(error, starting=context.health.state is ProcessState.STARTING)
        return _bound_exit(code, quiet=code in (CANNOT_START, REPLACED))
    else:
        return _bound_exit(0, quiet=False)


def _bound_exit(code: int, *, quiet: bool) -> int:
    """Bound what is left: to join threads, of which one that hangs must not keep the process.

    Args:
        code: The exit status.
        quiet: Whether the reason is logged already: stacks of threads would hide it.
    """
    if quiet:
        faulthandler.cancel_dump_traceback_later()
        end = threading.Timer(_LEAVE_S, os._exit, (code,))
        end.daemon = True
        end.start()
    else:
        faulthandler.dump_traceback_later(_LEAVE_S, exit=True)
    return code


def _failed(error: Exception, *, starting: bool) -> int:
    """Say it: an operating condition at the start in a line, anything else with its traceback."""
    causes = list(_leaf_errors(error))
    if all(isinstance(cause, Replaced) for cause in causes):
        log.error("replaced", extra={"reason": str(causes[0])})
        return REPLACED
    if starting and all(
        isinstance(cause, CannotStart | ConfigError | EngineError) for cause in causes
    ):
        for cause in causes:
            log.error(logs.CANNOT_START, extra={"reason": str(cause)})
        return CANNOT_START
    log.critical("service failed", exc_info=error)
    return FAILED


def _leaf_errors(error: BaseException) -> Iterator[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        yield error
        return
    for member in cast("BaseExceptionGroup[BaseException]", error).exceptions:
        yield from _leaf_errors(member)


@contextmanager
def _traces(role: str, arguments: ProcessArguments) -> Generator[None]:
    telemetry = arguments.settings.telemetry
    if not telemetry.traces:
        yield
        return
    from antiphon.telemetry import export  # noqa: PLC0415  # 0.1 s that most save

    provider = export.start(
        endpoint=telemetry.otlp_endpoint,
        service=role,
        instance=arguments.instance,
        ratio=telemetry.trace_ratio,
    )
    try:
        yield
    finally:
        export.stop(provider)
