from __future__ import annotations

from antiphon.scheduler.queue import DrainRate, SchedulerQueue
from antiphon.wire.ids import RequestId

A, B, C, D = RequestId("a"), RequestId("b"), RequestId("c"), RequestId("d")
HIGH, LOW = -5, 0


def queue_of(*waiting: tuple[RequestId, int], overtake_s_max: float = 10.0) -> SchedulerQueue:
    """These have come one second after the other, with these ranks."""
    queue = SchedulerQueue(overtake_s_max)
    for second, (request_id, rank) in enumerate(waiting):
        queue.put(request_id, (rank, 0.0, float(second), second))
    return queue


def test_of_one_rank_first_come_is_first_served() -> None:
    queue = queue_of((A, LOW), (B, LOW), (C, LOW))
    assert [queue.position(request_id) for request_id in (A, B, C)] == [0, 1, 2]
    queue.remove(A)
    assert list(queue.in_order(3.0)) == [B, C]
    assert queue.position(C) == 1


def test_higher_rank_goes_first() -> None:
    queue = queue_of((A, LOW), (B, LOW), (C, HIGH))
    assert list(queue.in_order(3.0)) == [C, A, B]
    assert queue.highest() == C
    assert [queue.position(request_id) for request_id in (A, B, C)] == [1, 2, 0]


def test_request_that_comes_back_takes_its_old_place() -> None:
    queue = queue_of((A, LOW), (B, LOW), (C, LOW))
    queue.start(A, 3.0)
    queue.put(D, (LOW, 0.0, 3.0, 3))
    queue.put(A, (LOW, 0.0, 0.0, 0))
    assert list(queue.in_order(4.0)) == [A, B, C, D]


def test_overtaken_request_alternates_with_those_that_outrank_it() -> None:
    highs = [RequestId(f"high-{number}") for number in range(4)]
    queue = queue_of((A, LOW), (B, LOW), *((high, HIGH) for high in highs), overtake_s_max=5.0)
    queue.start(highs[0], 10.0)
    assert next(queue.in_order(14.9)) == highs[1]
    order: list[RequestId] = []
    while queue:
        order.append(next(queue.in_order(15.0)))
        queue.start(order[-1], 15.0)
    assert order == [A, highs[1], B, highs[2], highs[3]]


def test_request_that_left_and_returned_was_not_overtaken_meanwhile() -> None:
    queue = queue_of((A, LOW), (B, HIGH), (C, HIGH), overtake_s_max=5.0)
    queue.start(B, 10.0)
    queue.remove(A)
    queue.put(A, (LOW, 0.0, 0.0, 0))
    assert next(queue.in_order(16.0)) == C
    queue.start(C, 16.0)
    assert list(queue.in_order(22.0)) == [A]


def test_position_of_a_request_that_does_not_wait_is_zero() -> None:
    assert queue_of().position(A) == 0
    assert queue_of().highest() is None


def test_retry_after_is_the_time_that_the_queue_takes_to_drain() -> None:
    rate = DrainRate()
    for second in range(11):
        rate.record(float(second))
    assert 18 <= rate.retry_after_s(waiting=20, now=11.0) <= 22


def test_retry_after_grows_while_nothing_leaves() -> None:
    rate = DrainRate()
    rate.record(0.0)
    rate.record(1.0)
    assert rate.retry_after_s(waiting=4, now=20.0) > rate.retry_after_s(waiting=4, now=2.0)


def test_retry_after_is_never_less_than_a_second_nor_more_than_a_minute() -> None:
    rate = DrainRate()
    assert rate.retry_after_s(waiting=5, now=0.0) == 1.0
    rate.record(0.0)
    assert rate.retry_after_s(waiting=1000, now=100.0) == 60.0
