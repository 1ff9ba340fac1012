"""A stack with the encoder in the worker's process: a form that only a bench starts.

python -m tests.bench.joint_process serve --supervisor-encoders 0 ARGUMENTS
"""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING

import msgspec
import uvloop

from antiphon.cli import main as cli
from antiphon.config.load import load_process
from antiphon.config.settings import HealthConfig
from antiphon.encoder.service import EncoderService
from antiphon.model_worker.service import ModelWorker
from antiphon.service.main import _process_context
from antiphon.service.run import serve
from antiphon.service.startup import die_with
from antiphon.supervisor.child import Child
from antiphon.telemetry import log as logs
from antiphon.wire.base import Role

if TYPE_CHECKING:
    from pathlib import Path

    from antiphon.config.load import ProcessArguments


async def both(arguments: ProcessArguments) -> None:
    """A worker and an encoder, each with a connection of its own, until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    beside = msgspec.structs.replace(
        arguments,
        instance="encoder-0",
        settings=msgspec.structs.replace(arguments.settings, health=HealthConfig()),
    )
    async with asyncio.TaskGroup() as group:
        for factory, each in ((ModelWorker, arguments), (EncoderService, beside)):
            group.create_task(serve(factory, _process_context(factory.role, each), stop))


def main() -> None:
    if sys.argv[1:2] != ["serve"]:
        arguments = load_process()
        logs.set_up(
            level=arguments.settings.telemetry.log_level,
            form=arguments.settings.telemetry.log_format,
            instance=arguments.instance,
        )
        assert arguments.parent_pid is not None
        die_with(arguments.parent_pid)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(both(arguments))
        return
    usual = Child.command

    def command(child: Child, config: Path) -> tuple[str, ...]:
        python, flag, module, *words = usual(child, config)
        module = "tests.bench.joint_process" if child.role is Role.WORKER else module
        return (python, flag, module, *words)

    setattr(Child, "command", command)  # noqa: B010  # a supervisor starts services alone
    sys.exit(cli.main())


if __name__ == "__main__":
    main()
