"""Each kind of fault once, of real processes under load: nothing is lost, and nothing is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from tests.faults.faults import EACH_KIND
from tests.faults.matrix import FaultBed, fault_bed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.faults.site import Fault

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]
CLIENTS = 12
TOKENS = 96
"""Fewer than the page is measured with: what is lost or wrong shows in short answers, too."""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def bed() -> AsyncIterator[FaultBed]:
    async with fault_bed(CLIENTS, TOKENS, quiet_s=0.0) as running:  # pauses are not compared here
        yield running


@pytest.mark.parametrize("fault", EACH_KIND, ids=[fault.name for fault in EACH_KIND])
async def test_no_request_is_lost_and_none_says_anything_else(bed: FaultBed, fault: Fault) -> None:
    outcome = await bed.suffer(fault)
    assert (outcome.lost, outcome.wrong) == ([], [])
    assert outcome.times > 0
    assert outcome.open >= 3 * CLIENTS // 4
    assert outcome.complete >= CLIENTS
