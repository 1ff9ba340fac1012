"""Ranks of a worker: which have joined, which are silent, and processes that end together."""

from __future__ import annotations

import errno
import os
import socket
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import pytest

from antiphon.config.parallel import ParallelConfig
from antiphon.model_worker.ranks import membership
from antiphon.model_worker.ranks.layout import devices_of
from antiphon.model_worker.ranks.membership import (
    BEAT_S,
    JOIN_S,
    MISSED_MAX,
    MISSED_MAX_STARTING,
    Attendance,
    Attending,
    Membership,
    RankLost,
    join,
)
from antiphon.model_worker.ranks.processes import RankProcesses

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 20.0
STORE = 4321


def beats(attendance: Attendance, count: int) -> list[str]:
    return [reason for _ in range(count) if (reason := attendance.beat()) is not None]


def test_a_silent_rank_is_lost_sooner_once_all_serve() -> None:
    for serving, limit in ((False, MISSED_MAX_STARTING), (True, MISSED_MAX)):
        attendance = Attendance(3)
        assert [attendance.join(rank) for rank in (1, 2)] == [None, None]
        if serving:
            attendance.serve()
        for _ in range(3):
            assert beats(attendance, limit) == []
            attendance.seen(1)
            attendance.seen(2)
        for _ in range(limit):
            assert attendance.beat() is None
            attendance.seen(1)
        assert attendance.beat() == f"rank 2 has been silent for {limit * BEAT_S:.1f} s"


def test_ranks_that_do_not_join_are_lost() -> None:
    attendance = Attendance(3)
    attendance.join(2)
    for _ in range(round(JOIN_S / BEAT_S)):
        attendance.seen(2)
        assert attendance.beat() is None
    assert attendance.beat() == "ranks [1] have not joined within 60 s"


@pytest.mark.parametrize(
    ("rank", "reason"),
    [(0, "there is no rank 0"), (3, "no rank 3"), (1, "1 has joined twice")],
)
def test_a_rank_joins_once(rank: int, reason: str) -> None:
    attendance = Attendance(3)
    assert attendance.join(1) is None
    assert reason in (attendance.join(rank) or "")


def test_ranks_of_a_machine_have_neighbouring_gpus() -> None:
    assert devices_of(ParallelConfig(tp_size=3), "cuda") == ["cuda:0", "cuda:1", "cuda:2"]
    on_two = ParallelConfig(tp_size=4, nodes=2, node_rank=1, init_address="h:1")
    assert devices_of(on_two, "cuda:2") == ["cuda:2", "cuda:3"] * 2
    assert devices_of(on_two, "interpreter") == ["interpreter"] * 4


class Meeting:
    """Rank 0 of several, and what it notices."""

    def __init__(self, ranks: int) -> None:
        listening = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = listening.getsockname()
        self.lost = SimpleQueue[str]()
        self.membership = Membership(listening, ranks, STORE, self.lost.put)
        self._closed = False

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.membership.stop()
            self.membership.close()


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    meeting = Meeting(2)
    yield meeting
    meeting.close()


def test_ranks_notice_the_end_of_each_other(meeting: Meeting) -> None:
    connection, port = join(meeting.address, 1, 2)
    assert port == STORE
    ended = SimpleQueue[str]()
    attending = Attending(connection, ended.put)
    meeting.membership.serve()
    meeting.close()
    assert ended.get(timeout=WAIT_S) in (
        "rank 0 has ended",
        "the connection to rank 0 is broken: [Errno 104] Connection reset by peer",
    )
    attending.close()
    connection.close()
    assert meeting.lost.empty(), "the end was expected"


def test_rank_0_notices_that_another_has_ended(meeting: Meeting) -> None:
    connection, _ = join(meeting.address, 1, 2)
    connection.close()
    assert meeting.lost.get(timeout=WAIT_S) == "rank 1 has ended"


def test_a_silent_connection_is_noticed(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "MISSED_MAX", 2)
    connection, _ = join(meeting.address, 1, 2)
    meeting.membership.serve()
    assert "rank 1 has been silent" in meeting.lost.get(timeout=WAIT_S)
    connection.close()


def test_ranks_of_another_number_are_refused(meeting: Meeting) -> None:
    with pytest.raises(RankLost, match="rank 0 has refused this rank"):
        join(meeting.address, 1, 4)
    assert meeting.lost.get(timeout=WAIT_S) == "rank 1 was started as one of 4 ranks, not of 2"


def test_a_rank_that_comes_twice_is_refused_and_ends_no_rank_that_serves(meeting: Meeting) -> None:
    connection, _ = join(meeting.address, 1, 2)
    for ranks in (2, 4):
        with pytest.raises(RankLost, match="rank 0 has refused this rank"):
            join(meeting.address, 1, ranks)
    connection.close()
    assert meeting.lost.get(timeout=WAIT_S) == "rank 1 has ended"


class FullSocket(socket.socket):
    """Accepts nothing at first: the process has too many open files."""

    failed = False

    def accept(self) -> tuple[socket.socket, Any]:
        if not self.failed:
            self.failed = True
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


def test_a_connection_that_is_not_accepted_at_first_is_later() -> None:
    listening = FullSocket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    lost = SimpleQueue[str]()
    ranks = Membership(listening, 2, STORE, lost.put)
    connection, _ = join(listening.getsockname(), 1, 2)
    assert listening.failed
    ranks.stop()
    ranks.close()
    connection.close()
    assert lost.empty()


def test_ranks_are_lost_if_the_watch_over_them_fails() -> None:
    def fail() -> str | None:
        raise ValueError("no such child")

    lost = SimpleQueue[str]()
    ranks = Membership(socket.create_server(("127.0.0.1", 0)), 2, STORE, lost.put, fail)
    assert lost.get(timeout=WAIT_S) == "the watch over the ranks has failed: no such child"
    ranks.stop()
    ranks.close()


def test_whatever_is_no_rank_is_closed(meeting: Meeting) -> None:
    with socket.create_connection(meeting.address, timeout=WAIT_S) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert stranger.recv(100) == b""
    connection, _ = join(meeting.address, 1, 2)
    connection.close()


def test_a_rank_that_ends_while_it_starts_is_lost() -> None:
    lost = SimpleQueue[RankLost]()
    ranks = RankProcesses(ParallelConfig(tp_size=2), "worker", lost.put)
    ranks._children[0].kill()
    reason = str(lost.get(timeout=WAIT_S))
    assert reason in ("rank 1 has ended with status -9", "rank 1 has ended")
    ranks.close()
    assert ranks._children[0].poll() == -9
