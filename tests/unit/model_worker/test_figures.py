"""What a worker says of the last seconds is of these, and of no others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from antiphon.model_worker.observability.step_accounting import SlidingSum


def test_what_is_old_is_forgotten():
    lately = SlidingSum(10)
    lately.add(3, 100.2)
    lately.add(4, 100.9)
    lately.add(5, 105.0)
    assert lately.total(109.9) == 12
    assert lately.total(110.0) == 5
    assert lately.total(115.0) == 0
    lately.add(1, 300.0)
    assert lately.total(300.0) == 1


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 9)), max_size=60))
def test_the_sum_is_that_of_the_last_seconds(events: list[tuple[float, int]]):
    lately, now, every = SlidingSum(10), 0.0, list[tuple[float, int]]()
    for pause, amount in events:
        now += pause
        lately.add(amount, now)
        every.append((now, amount))
        assert lately.total(now) == sum(n for at, n in every if int(at) > int(now) - 10)
