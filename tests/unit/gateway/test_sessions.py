"""Sessions by themselves: a tree of what was said, bounded, and forgotten in time."""

from __future__ import annotations

import pytest

from antiphon.gateway.sessions import SESSIONS_MAX, Place, Sessions
from antiphon.testing.clock import ManualClock
from antiphon.wire.errors import InvalidRequest, Overloaded


def sessions() -> tuple[Sessions, ManualClock, list[str]]:
    clock, aborted = ManualClock(), list[str]()
    return Sessions(clock.now, aborted.append), clock, aborted


def test_what_runs_below_a_replaced_request_is_aborted() -> None:
    kept, _, aborted = sessions()
    name = kept.open(None, 0, None)
    kept.begin(Place(name), "a", (1,), 1)
    kept.end(Place(name), "a", ((2,), "x"))
    below = Place(name, "a")
    assert kept.before(below) == (1, 2)
    kept.begin(below, "b", (1, 2, 3), 1)
    with pytest.raises(InvalidRequest, match="has not ended"):
        kept.before(Place(name, "b"))
    assert kept.before(Place(name, "a", replace=True)) == (1, 2)
    assert aborted == ["b"]
    kept.end(below, "b", ((4,), "y"))
    with pytest.raises(InvalidRequest, match="not known"):
        kept.before(Place(name, "b"))


def test_a_request_that_failed_is_no_place_to_go_on_from() -> None:
    kept, _, _ = sessions()
    name = kept.open("s", 0, None)
    kept.begin(Place(name), "a", (1,), 1)
    kept.end(Place(name), "a", None)
    with pytest.raises(InvalidRequest, match="not known"):
        kept.before(Place(name, "a"))
    kept.begin(Place(name), "a", (1,), 1)


def test_a_session_that_rests_is_forgotten() -> None:
    kept, clock, _ = sessions()
    name = kept.open(None, 0, 10.0)
    clock.advance(9)
    kept.before(Place(name))
    clock.advance(9)
    kept.before(Place(name))
    clock.advance(11)
    with pytest.raises(InvalidRequest, match="no session"):
        kept.before(Place(name))
    assert len(kept) == 0


def test_there_are_only_so_many() -> None:
    kept, _, _ = sessions()
    for _ in range(SESSIONS_MAX):
        kept.open(None, 0, None)
    with pytest.raises(Overloaded):
        kept.open(None, 0, None)


def test_closing_aborts_what_runs() -> None:
    kept, _, aborted = sessions()
    name = kept.open(None, 0, None)
    kept.begin(Place(name), "a", (1,), 1)
    kept.close(name)
    assert aborted == ["a"]
    kept.end(Place(name), "a", ((1,), "x"))
    with pytest.raises(InvalidRequest):
        kept.close(name)
