from __future__ import annotations

from antiphon.scheduler.queue import DrainRate, Queue
from antiphon.wire.ids import RequestId

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")


def test_first_come_is_first_served() -> None:
    queue = Queue(3)
    for request_id in (A, B, C):
        queue.push(request_id)
    assert [queue.position(request_id) for request_id in (A, B, C)] == [0, 1, 2]
    queue.remove(A)
    assert queue.first() == B
    assert queue.position(C) == 1


def test_one_over_the_bound_is_full_but_what_was_accepted_goes_back_in_front() -> None:
    queue = Queue(2)
    queue.push(A)
    queue.push(B)
    assert queue.full
    queue.put_back(C)
    assert queue.first() == C
    assert len(queue) == 3


def test_the_place_of_one_who_does_not_wait_is_next() -> None:
    assert Queue(1).position(A) == 0


def test_retry_after_is_the_time_that_the_queue_takes_to_drain() -> None:
    rate = DrainRate()
    for second in range(11):
        rate.leave(float(second))
    assert 18 <= rate.retry_after_s(waiting=20, now=11.0) <= 22


def test_retry_after_grows_while_nothing_leaves() -> None:
    rate = DrainRate()
    rate.leave(0.0)
    rate.leave(1.0)
    assert rate.retry_after_s(waiting=4, now=20.0) > rate.retry_after_s(waiting=4, now=2.0)


def test_retry_after_is_never_less_than_a_second_nor_more_than_a_minute() -> None:
    rate = DrainRate()
    assert rate.retry_after_s(waiting=5, now=0.0) == 1.0
    rate.leave(0.0)
    assert rate.retry_after_s(waiting=1000, now=100.0) == 60.0
