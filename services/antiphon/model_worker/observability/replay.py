"""Replays recorded plans: `python -m antiphon.model_worker.observability.replay FILE`.

A recording starts while the worker runs. Rows whose context was computed before that are run,
because other rows depend on them, but not compared.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from antiphon.config.errors import ConfigError
from antiphon.config.model import ModelConfig
from antiphon.config.settings import Settings
from antiphon.model_card.served_model import model_files
from antiphon.model_worker.batching.plan import PLAIN
from antiphon.model_worker.batching.slot_tables import SlotTables
from antiphon.model_worker.cache.groups import HOLE, UNKNOWN_STATE, CacheGroup, GroupKind
from antiphon.model_worker.observability.recording import Recording, RecordingBroken, read
from antiphon.model_worker.startup.loading import load_resolved
from antiphon.service.startup import CannotStart

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.model_worker.batching.plan import Flags, Longs, PlanRunner, StepOutcome, StepPlan
    from antiphon.model_worker.observability.flight_recorder import StepRecord

SAME = 0
DIFFERENT = 1
CANNOT_RUN = 2


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of a replay. `row` is None if the whole plan differs."""

    step: int
    row: int | None
    recorded: str
    replayed: str

    def __str__(self) -> str:
        place = f"step {self.step}" + ("" if self.row is None else f", row {self.row}")
        return f"{place}: recorded {self.recorded}, replayed {self.replayed}"


@dataclass(slots=True)
class ReplayResult:
    """The result of a replay: numbers of plans and of rows.

    Attributes:
        rows: Rows that were compared and equal.
        passed: Rows that were not compared, because their context is not in the recording.
        failed: Plans that failed when they were recorded, and again.
        unended: Plans without an outcome when they were written: the last, or a hung one.
        difference: The first difference, at which the replay ended.
    """

    plans: int = 0
    rows: int = 0
    passed: int = 0
    failed: int = 0
    unended: int = 0
    difference: Difference | None = None


def replay(
    records: Sequence[StepRecord], groups: Sequence[CacheGroup], runner: PlanRunner
) -> ReplayResult:
    """Run plans in order, up to the first one with a different outcome."""
    result = ReplayResult()
    state = ReplayState(groups)
    for record in records:
        plan, sound = state.prepare(record.plan)
        result.plans += 1
        try:
            outcome = runner.run(plan)
        except Exception as error:  # noqa: BLE001  # whatever it raised then, it may raise now
            result.difference = _compare_failure(record, error)
            result.failed += result.difference is None
            sound[:] = False
        else:
            result.difference = _compare(record, outcome, sound)
            if record.outcome is None:
                result.unended += not record.failure
                sound[:] = False
            else:
                result.rows += int(sound.sum())
                result.passed += int((~sound).sum())
        if result.difference is not None:
            return result
        state.note(plan, record.outcome, sound)
    return result


class ReplayState:
    """Which cache entries and slots hold the same content as when it was recorded."""

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        self._groups = groups
        self._tables = SlotTables(groups)
        self._known = [np.zeros(_places_total(group), np.bool_) for group in groups]
        self._counted: set[int] = set()
        self._last: dict[int, int] = {}

    def prepare(self, plan: StepPlan) -> tuple[StepPlan, Flags]:
        """The plan with all that it leaves open filled in, and which rows can be compared.

        A token that was unknown when the plan was made is taken from the recorded outcome, so that
        one difference does not become many.
        """
        plan, rows = _closed(self._tables.fill(plan)), len(plan.slot)
        sound = np.array([self._reproducible(plan, row) for row in range(rows)], np.bool_)
        futures = np.flatnonzero(plan.tokens < 0)
        if not len(futures):
            return plan, sound
        tokens = plan.tokens.copy()
        for index in futures.tolist():
            token = self._last.get(-1 - int(plan.tokens[index]))
            tokens[index] = token or 0
            if token is None:
                sound[np.searchsorted(plan.query_start, index, side="right") - 1] = False
        return msgspec.structs.replace(plan, tokens=tokens), sound

    def note(self, plan: StepPlan, outcome: StepOutcome | None, sound: Flags) -> None:
        """Note that a plan was run; the entries written by rows that were not sound are unknown."""
        for row in range(len(plan.slot)):
            begin, end = int(plan.kv_len[row] - plan.query_len[row]), int(plan.kv_len[row])
            for index, group in enumerate(self._groups):
                places: Longs = plan.page_tables[index][row, 1:].astype(np.int64)
                places = places[places >= 0]
                if group.kind is not GroupKind.STATE:
                    places = self._places(plan, row, index, begin, end)
                self._known[index][places] = sound[row]
        penalties = None if plan.part is None else plan.part.penalties
        if penalties is not None:
            self._counted.update(penalties.begun.tolist())
        if outcome is not None:
            accepted = np.flatnonzero(np.diff(outcome.starts))
            last = outcome.token_ids[outcome.starts[1:][accepted] - 1]
            self._last.update(zip(plan.slot[accepted].tolist(), last.tolist(), strict=True))

    def _reproducible(self, plan: StepPlan, row: int) -> bool:
        """Whether the whole context of a row was computed in this replay."""
        begin = int(plan.kv_len[row] - plan.query_len[row])
        penalties = None if plan.part is None else plan.part.penalties
        if penalties is not None and row in penalties.rows:
            slot = int(plan.slot[row])
            if slot not in self._counted and slot not in penalties.begun:
                return False
        for index, group in enumerate(self._groups):
            if group.kind is GroupKind.STATE:
                read = int(plan.page_tables[index][row, 0])
                if read >= 0 and not self._known[index][read]:
                    return False
                continue
            first = 0 if group.window is None else max(0, begin - group.window + 1)
            if not self._known[index][self._places(plan, row, index, first, begin)].all():
                return False
        return True

    def _places(self, plan: StepPlan, row: int, index: int, begin: int, end: int) -> Longs:
        page_tokens = self._groups[index].page_tokens
        positions = np.arange(begin, end)
        pages = plan.page_tables[index][row].astype(np.int64)[positions // page_tokens]
        return pages * page_tokens + positions % page_tokens


def _closed(plan: StepPlan) -> StepPlan:
    """A plan that asks for no drafts, and leaves nothing open but tokens.

    One that was never computed may: its rows are run where they would be at most.
    """
    tables = [np.where(table == UNKNOWN_STATE, HOLE, table) for table in plan.page_tables]
    part = PLAIN if plan.part is None else plan.part
    return msgspec.structs.replace(
        plan,
        page_tables=tuple(tables),
        part=part,
        future_start=None,
        draft_counts=None,
        next_tokens=None,
    )


def _places_total(group: CacheGroup) -> int:
    if group.kind is GroupKind.STATE:
        return group.pages_total
    return group.pages_total * group.page_tokens


def main(argv: Sequence[str]) -> int:
    """Replay a file: 0 if the outcomes are as recorded, 1 if not, 2 if it cannot be run."""
    parser = argparse.ArgumentParser(
        "antiphon replay", description="Run recorded plans again and print the first difference."
    )
    parser.add_argument("file", type=Path, help="Recording from batching.dump_folder.")
    parser.add_argument("--model-path", default="embedded", help="Model of the recorded worker.")
    arguments = parser.parse_args(argv)
    try:
        recording = read(arguments.file)
        result = _replay_file(recording, arguments.model_path)
    except (OSError, RecordingBroken, ConfigError, CannotStart) as error:
        sys.stderr.write(f"antiphon replay: {error}\n")
        return CANNOT_RUN
    sys.stdout.write(_summary(recording, result))
    return SAME if result.difference is None else DIFFERENT


def _replay_file(recording: Recording, model_path: str) -> ReplayResult:
    header = recording.header
    if header.resolved is None:
        raise RecordingBroken("not recorded by a worker with a model")
    if (groups := header.resolved.attention_groups.value) > 1:
        raise CannotStart(
            f"recorded by {groups} attention groups, each with pages of its own: "
            "one process has not all of them"
        )
    files = model_files(Settings(model=ModelConfig(path=model_path)))
    # Drafts are tokens of the recorded plans, and are not drafted again.
    model = load_resolved(files, header.resolved)
    if model.spec.cross is not None:
        raise CannotStart(
            f"{files.folder}: a recording has not all that its requests attend to beside their text"
        )
    if model.groups != tuple(g for g in header.groups if g.kind is not GroupKind.DRAFT):
        raise CannotStart(f"{files.folder}: its cache layout differs from the recorded one")
    return replay(recording.records, header.groups, model.runner)


def _summary(recording: Recording, result: ReplayResult) -> str:
    header = recording.header
    lines = [
        f"{header.instance}: {header.reason}",
        f"{result.plans} of {len(recording.records)} plans run, {result.rows} rows equal, "
        f"{result.passed} passed over, {result.failed} plans failed again, "
        f"{result.unended} had not ended",
        "no difference" if result.difference is None else f"difference at {result.difference}",
    ]
    return "".join(f"{line}\n" for line in lines)


def _compare_failure(record: StepRecord, error: Exception) -> Difference | None:
    if record.failure:
        return None
    recorded = "no end" if record.outcome is None else "an outcome"
    return Difference(record.plan.step, None, recorded, f"the failure {error!r}")


def _compare(record: StepRecord, outcome: StepOutcome, sound: Flags) -> Difference | None:
    step = record.plan.step
    if record.failure:
        return Difference(step, None, f"the failure {record.failure}", "an outcome")
    if record.outcome is None:
        return None
    for row in np.flatnonzero(sound).tolist():
        recorded, replayed = _row(record.outcome, row), _row(outcome, row)
        if recorded != replayed:
            return Difference(step, row, recorded, replayed)
    return None


def _row(outcome: StepOutcome, row: int) -> str:
    tokens = outcome.token_ids[outcome.starts[row] : outcome.starts[row + 1]]
    return f"tokens {tokens.tolist()} status {int(outcome.status[row])}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
