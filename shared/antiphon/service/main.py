"""The entry point of every service: `python -m antiphon.<service> --config FILE --instance NAME`.

    run(TokenizerService)

Exit codes: 0 stopped by a signal, 1 failed while running, 2 bad settings, 3 could not start, 4
replaced by another process with its name.
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
from functools import partial
from typing import TYPE_CHECKING, NoReturn, cast

import uvloop

from antiphon.bus.bus import Bus
from antiphon.bus.nats import NatsTransport
from antiphon.config.cluster import digest
from antiphon.config.errors import ConfigError
from antiphon.config.load import ProcessArguments, load_process
from antiphon.service.instance_name import Replaced
from antiphon.service.run import serve
from antiphon.service.service import ProcessContext, Service, ServiceFactory
from antiphon.service.startup import CannotStart, die_with
from antiphon.telemetry import log as logs
from antiphon.wire.base import WIRE_VERSION, Process, ProcessState, Role
from antiphon.wire.errors import EngineError
from antiphon.wire.ids import ClusterName, InstanceId, new_incarnation

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

log = logging.getLogger(__name__)

FAILED = 1
BAD_SETTINGS = 2
CANNOT_START = 3
REPLACED = 4

_LEAVE_S = 4.0
"""Maximum time of the shutdown beyond the drain deadline."""
_YOUNG_MAX = 10_000
"""Threshold of the youngest garbage collector generation; a collection of it takes a millisecond.
Nearly all objects of a request are freed by reference counting. With Python's default of 700, each
2,000 incoming requests caused several full collections, 0.05 to 0.4 s in the gateway, which paused
all streams."""


def run(factory: ServiceFactory[Service]) -> NoReturn:
    """Run a service until SIGTERM or SIGINT, then drain; a second signal ends it at once."""
    try:
        arguments = load_process()
    except ConfigError as error:
        sys.stderr.write(f"antiphon {factory.role}: {error}\n")
        sys.exit(BAD_SETTINGS)
    faulthandler.enable()  # a crash in a kernel leaves its stack in the log
    telemetry = arguments.settings.telemetry
    logs.set_up(level=telemetry.log_level, form=telemetry.log_format, instance=arguments.instance)
    with _traces(factory.role, arguments):
        code = _run(factory, arguments)
    log.info("stopped", extra={"code": code})
    sys.exit(code)


def _run(factory: ServiceFactory[Service], arguments: ProcessArguments) -> int:
    try:
        if arguments.parent_pid is not None:
            die_with(arguments.parent_pid)
        context = _process_context(factory.role, arguments)
    except (CannotStart, ConfigError, EngineError) as error:
        log.error(logs.CANNOT_START, extra={"reason": str(error)})  # noqa: TRY400  # one line
        return CANNOT_START
    process = context.bus.process
    log.info(
        "starting",
        extra={
            "role": factory.role,
            "incarnation": process.incarnation,
            "pid": os.getpid(),
            "wire_version": WIRE_VERSION,
            "config_digest": digest(arguments.settings.cluster),
        },
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_until_signal(factory, context))


def _process_context(role: Role, arguments: ProcessArguments) -> ProcessContext:
    settings = arguments.settings
    if not settings.bus.url:
        raise CannotStart("bus.url is not set; use --bus-url nats://host:port")
    process = Process(instance=InstanceId(arguments.instance), incarnation=new_incarnation())
    transport = NatsTransport(settings.bus, name=arguments.instance)
    context = ProcessContext(
        settings=settings,
        bus=Bus(transport, ClusterName(settings.cluster.name), process, party=role),
        on_started=tune_gc,
    )
    for kind in ("dropped", "forbidden", "failed"):
        errors = context.metrics.link_errors.labels(kind)
        errors.set_function(partial(getattr, transport.errors, kind))
    return context


def tune_gc() -> None:
    """Exclude all objects created so far from garbage collection, and collect less often."""
    # They live as long as the process: a collection that includes them takes 0.2 s in a worker, in
    # which no step starts.
    gc.collect()
    gc.freeze()
    _, *older = gc.get_threshold()
    gc.set_threshold(_YOUNG_MAX, *older)


async def _until_signal(factory: ServiceFactory[Service], context: ProcessContext) -> int:
    stop = asyncio.Event()
    leave_s = context.settings.service.drain_timeout_s + _LEAVE_S

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        # If anything hangs during shutdown, even the event loop, exit then with tracebacks.
        faulthandler.dump_traceback_later(leave_s, exit=True)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    code = 0
    try:
        await serve(factory, context, stop)
    except Exception as error:  # noqa: BLE001  # here and in the inbox
        code = _failed(error, starting=context.health.state is ProcessState.STARTING)
    return _bound_exit(code, quiet=code in (CANNOT_START, REPLACED))


def _bound_exit(code: int, *, quiet: bool) -> int:
    """Bound the rest of the shutdown: joining a hanging thread must not keep the process alive."""
    # `quiet`: the reason is already logged, and thread stacks would hide it.
    if quiet:
        faulthandler.cancel_dump_traceback_later()
        end = threading.Timer(_LEAVE_S, os._exit, (code,))
        end.daemon = True
        end.start()
    else:
        faulthandler.dump_traceback_later(_LEAVE_S, exit=True)
    return code


def _failed(error: Exception, *, starting: bool) -> int:
    """Log the error: an operating condition at startup in one line, others with a traceback."""
    causes = list(_leaf_errors(error))
    if all(isinstance(cause, Replaced) for cause in causes):
        log.error("replaced", extra={"reason": str(causes[0])})
        return REPLACED
    known = (CannotStart, ConfigError, EngineError)
    if starting and all(isinstance(cause, known) for cause in causes):
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
    from antiphon.telemetry import export  # noqa: PLC0415  # saves 0.1 s without tracing

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
