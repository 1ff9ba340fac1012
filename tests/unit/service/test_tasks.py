"""Work of a group: what happens to a task that never begins, and to one that fails."""

from __future__ import annotations

import asyncio
import gc
import logging
import warnings

import pytest

from antiphon.service.inbox import SharedStateBroken
from antiphon.service.tasks import Tasks, isolated


async def test_work_cancelled_before_it_begins_is_never_called() -> None:
    begun: list[str] = []

    async def work(name: str) -> None:
        begun.append(name)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        async with asyncio.TaskGroup() as group:
            group.create_task(isolated(work, "a")).cancel()
        gc.collect()
    assert begun == []
    assert [str(warning.message) for warning in seen] == []


async def test_failing_work_is_logged_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(what: str) -> None:
        raise ValueError(what)

    with caplog.at_level(logging.ERROR):
        async with Tasks() as group:
            group.create_task(isolated(fail, "no such page"))
    (line,) = (record for record in caplog.records if record.message == "task failed")
    assert line.exc_info is not None
    assert str(line.exc_info[1]) == "no such page"


async def test_broken_shared_state_ends_the_group() -> None:
    async def broken() -> None:
        raise SharedStateBroken("pages")

    with pytest.raises(BaseExceptionGroup) as caught:
        async with asyncio.TaskGroup() as group:
            group.create_task(isolated(broken))
    assert caught.value.subgroup(SharedStateBroken) is not None
