"""Batches of seeds of simulated worlds: each one runs, whatever became of those before it."""

from __future__ import annotations

import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class SeedBatch:
    """Collects what fails in a batch, so that one run reports all of its seeds."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    @contextmanager
    def world(self, seed: int, kind: str) -> Iterator[None]:
        """A world, whose failure is printed, and kept for the end of the batch."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # whatever a world breaks on
            print(f"seed {seed} ({kind}) failed:")
            traceback.print_exception(error)
            reason = str(error).partition("\n")[0]
            self.failed.append(f"seed {seed} ({kind}): {type(error).__name__}: {reason}")

    def check(self) -> None:
        """Fail if a world did, and name all of them."""
        assert not self.failed, "\n".join([f"{len(self.failed)} worlds failed", *self.failed])
