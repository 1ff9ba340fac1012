"""Progress display while the services start."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Self

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console
    from rich.progress import Task

BAR_COLUMNS = 12
"""Narrow enough for lines of at most 80 columns, whatever service it waits for."""
_LOADING = re.compile(r"(done_bytes|total_bytes|seconds_left)\W+([\d.]+)")


def loading(log: str) -> str:
    """Format the progress of loading weights from a worker's log; empty if none is in progress."""
    lines = [line for line in log.splitlines() if "weights" in line]
    if not lines or "loading weights" not in lines[-1]:
        return ""
    fields = {name: float(number) for name, number in _LOADING.findall(lines[-1])}
    if len(fields) < 3:
        return ""
    done, total = fields["done_bytes"] / 1e9, fields["total_bytes"] / 1e9
    return f"weights {done:.2f} of {total:.2f} GB, {fields['seconds_left']:.0f} s left"


class _Waiting(ProgressColumn):
    """Progress of loading weights, read twice a second; else the service that is awaited."""

    max_refresh = 0.5

    def __init__(self, progress: Callable[[], str]) -> None:
        super().__init__()
        self._progress = progress

    def render(self, task: Task) -> Text:
        return Text(self._progress() or task.description)


class StartProgress:
    """A progress bar in a terminal; one line per service elsewhere.

    `worker_log` is the end of the worker's log, which has the progress of its weights.
    """

    def __init__(
        self, console: Console, names: Sequence[str], worker_log: Callable[[], str]
    ) -> None:
        self._console = console
        self._waiting = list(names)
        self._bar = Progress(
            TextColumn("starting"),
            BarColumn(bar_width=BAR_COLUMNS),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            _Waiting(lambda: loading(worker_log())),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(self._description(), total=len(names))

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def ready(self, name: str) -> None:
        if name in self._waiting:
            self._waiting.remove(name)
        self._bar.update(self._task, advance=1, description=self._description())
        if not self._console.is_terminal:
            self._console.print(f"{name} is ready", highlight=False)

    def _description(self) -> str:
        if not self._waiting:
            return "all ready"
        first, *others = self._waiting
        return f"waiting for {first}" + (f" and {len(others)} more" if others else "")
