"""All orders of the hardest case of a migration end with the text of one chain of attempts."""

from __future__ import annotations

import pytest
from tests.simulation.seal_orders import EVENTS, ORDERS, live


@pytest.mark.parametrize("forgets", [False, True], ids=["sealed", "by_owner"])
@pytest.mark.parametrize("first", EVENTS)
def test_every_order_of_two_seals_ends_with_one_generation(first: str, *, forgets: bool) -> None:
    """In each order the prompt is in the messages once, and once at its gateway."""
    for number, order in enumerate(ORDERS):
        if order[0] == first:
            print(order)
            live(order, forgets=forgets, claims=bool(number % 2) == forgets)
