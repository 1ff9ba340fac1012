"""What the operator sees while the services start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from rich.console import Console


class StartProgress:
    """A bar in a terminal; a line a service elsewhere."""

    def __init__(self, console: Console, names: Sequence[str]) -> None:
        self._console = console
        self._waiting = list(names)
        self._bar = Progress(
            TextColumn("starting"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(self._description(), total=len(names))

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def ready(self, name: str) -> None:
        """Note that one is up."""
        if name in self._waiting:
            self._waiting.remove(name)
        self._bar.update(self._task, advance=1, description=self._description())
        if not self._console.is_terminal:
            self._console.print(f"{name} is ready", highlight=False)

    def _description(self) -> str:
        return "waiting for " + ", ".join(self._waiting) if self._waiting else "all ready"
