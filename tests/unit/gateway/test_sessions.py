"""Sessions by themselves: a tree of what was said, bounded, and forgotten in time."""

from __future__ import annotations

import pytest

from antiphon.gateway.sessions import SESSIONS_MAX, Place, Sessions
from antiphon.testing.clock import ManualClock
from antiphon.wire.errors import InvalidRequest, Overloaded


def sessions() -> tuple[Sessions, ManualClock, list[str]]:
    clock, aborted = ManualClock(), list[str]()
    return Sessions(clock.now, aborted.append), clock, aborted


def run(kept: Sessions, place: Place, rid: str, ids: tuple[int, ...], characters: int = 1) -> None:
    """A request that was accepted and has not ended."""
    kept.begin(place, rid, ids, characters)
    kept.accept(place, rid)


def test_what_runs_below_a_replaced_request_is_aborted() -> None:
    kept, _, aborted = sessions()
    name = kept.open(None, 0, None)
    run(kept, Place(name), "a", (1,))
    kept.end(Place(name), "a", ((2,), "x"))
    below = Place(name, "a")
    assert kept.before(below) == (1, 2)
    run(kept, below, "b", (1, 2, 3))
    with pytest.raises(InvalidRequest, match="has not ended"):
        kept.before(Place(name, "b"))
    instead = Place(name, "a", replace=True)
    assert kept.before(instead) == (1, 2)
    kept.begin(instead, "c", (1, 2, 4), 1)
    assert aborted == []
    kept.accept(instead, "c")
    assert aborted == ["b"]
    kept.end(below, "b", ((4,), "y"))
    with pytest.raises(InvalidRequest, match="not known"):
        kept.before(Place(name, "b"))


def test_a_request_that_failed_is_no_place_to_go_on_from() -> None:
    kept, _, _ = sessions()
    name = kept.open("s", 0, None)
    run(kept, Place(name), "a", (1,))
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
    run(kept, Place(name), "a", (1,))
    kept.begin(Place(name), "b", (1,), 1)
    kept.close(name)
    assert aborted == ["a"]
    kept.accept(Place(name), "b")
    assert aborted == ["a", "b"]
    kept.end(Place(name), "a", ((1,), "x"))
    with pytest.raises(InvalidRequest):
        kept.close(name)


def test_a_request_that_is_refused_replaces_nothing() -> None:
    kept, _, aborted = sessions()
    name = kept.open(None, 0, None)
    run(kept, Place(name), "a", (1,))
    kept.end(Place(name), "a", ((2,), "x"))
    anew = Place(name, replace=True)
    kept.begin(anew, "a", (3,), 1)
    with pytest.raises(InvalidRequest, match="has a request 'a'"):
        kept.begin(anew, "a", (3,), 1)
    kept.end(anew, "a", None)
    assert kept.before(Place(name, "a")) == (1, 2)
    run(kept, anew, "b", (3,))
    assert aborted == []
    with pytest.raises(InvalidRequest, match="not known"):
        kept.before(Place(name, "a"))


def test_what_is_forgotten_or_replaced_leaves_its_room() -> None:
    kept, _, _ = sessions()
    name = kept.open(None, 10, None)
    for _ in range(3):
        run(kept, Place(name), "a", (1,), 9)
        kept.end(Place(name), "a", None)
    run(kept, Place(name), "a", (1,), 6)
    kept.end(Place(name), "a", ((2,), "four"))
    with pytest.raises(InvalidRequest, match="room for 10 characters"):
        kept.begin(Place(name), "b", (1,), 1)
    run(kept, Place(name, replace=True), "b", (1,), 10)
    with pytest.raises(InvalidRequest, match="room for 10 characters"):
        kept.begin(Place(name), "c", (1,), 1)
