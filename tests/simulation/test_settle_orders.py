"""A new leader begins nothing twice and aborts nothing open, in whatever order it learns."""

from __future__ import annotations

import itertools

import pytest
from tests.simulation.settle_orders import EVENTS, LAGS, LOST, ORDERS, live, live_numbered


@pytest.mark.parametrize("first", EVENTS)
def test_a_new_leader_settles_in_every_order(first: str) -> None:
    for number, order in enumerate(ORDERS):
        if order[0] == first:
            print(number)
            live_numbered(number)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_new_leader_settles_in_every_order_with_every_lag_and_loss() -> None:
    for order, lag, lost in itertools.product(ORDERS, LAGS, LOST):
        print(order, lag, lost)
        live(order, lag=lag, lost=lost)
