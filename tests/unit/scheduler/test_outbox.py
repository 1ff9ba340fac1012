from __future__ import annotations

from typing import TYPE_CHECKING

from tests.unit.scheduler.stage import GATEWAY, other_attempt

from antiphon.scheduler.outbox import ENVELOPE_BYTES, command_bytes
from antiphon.scheduler.request_table import TOMBSTONES_MAX, SchedulerTombstones
from antiphon.wire.codec import pack_ids, split_rows
from antiphon.wire.command import Abort, Admit, ChoiceOutput
from antiphon.wire.ids import InstanceId, RequestId
from antiphon.wire.sampling import SamplingParams

if TYPE_CHECKING:
    from antiphon.wire.base import Attempt


def admit(name: str, prompt_tokens: int) -> Admit:
    return Admit(
        request_id=RequestId(name),
        owner=GATEWAY,
        attempt=other_attempt(1),
        detokenizer=InstanceId("detokenizer-0"),
        prompt_ids=pack_ids(range(prompt_tokens)),
        choices=(ChoiceOutput(choice=0),),
        sampling=SamplingParams(max_new_tokens=1),
        deadline_unix_ms=0,
    )


def test_commands_are_cut_into_messages_that_fit_and_keep_their_order() -> None:
    commands = [admit(str(number), 1000) for number in range(5)]
    cut = split_rows(commands, command_bytes, bytes_max=2 * (ENVELOPE_BYTES + 4100))
    assert [[command.request_id for command in part] for part in cut] == [
        ["0", "1"],
        ["2", "3"],
        ["4"],
    ]


def test_a_command_is_never_left_out_however_large() -> None:
    large, abort = admit("r", 1000), Abort(request_id=RequestId("s"), attempt=attempt())
    assert [*split_rows([large, abort], command_bytes, bytes_max=1)] == [[large], [abort]]


def test_tombstone_lasts_until_its_latest_time() -> None:
    tombstones = SchedulerTombstones()
    tombstones.add(RequestId("r"), GATEWAY, 2000)
    tombstones.add(RequestId("r"), GATEWAY, 1000)
    tombstones.add(RequestId("r"), GATEWAY, 3000)
    tombstones.expire(2999)
    assert tombstones.was_ended_by(RequestId("r"), GATEWAY)
    tombstones.expire(3000)
    assert len(tombstones) == 0


def test_there_are_never_more_tombstones_than_the_bound() -> None:
    tombstones = SchedulerTombstones()
    for number in range(TOMBSTONES_MAX + 10):
        tombstones.add(RequestId(str(number)), GATEWAY, number + 1)
    assert len(tombstones) == TOMBSTONES_MAX
    assert RequestId("0") not in tombstones


def attempt() -> Attempt:
    return other_attempt(2)
