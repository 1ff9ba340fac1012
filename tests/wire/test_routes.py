"""The route table: one name and one subject each, and names that fit into subjects."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.wire import routes
from antiphon.wire.base import Role
from antiphon.wire.ids import TenantId
from antiphon.wire.routes import (
    CLIENT,
    OPERATOR,
    ROUTES,
    DeliveryMode,
    RequestRoute,
    Route,
    escape,
    inbox,
)

names = st.text(min_size=1)


def name(route: Route) -> str:
    return route.name


def test_every_route_is_in_the_table_once_and_none_is_an_inbox() -> None:
    defined = [value for value in vars(routes).values() if isinstance(value, Route)]
    assert sorted(map(name, defined)) == sorted(map(name, ROUTES))
    assert len({route.name for route in ROUTES}) == len(ROUTES)
    assert not [route for route in ROUTES if route.subject.startswith("inbox.")]


def test_no_subject_can_be_another_routes() -> None:
    shapes = [re.sub(r"\{\w+\}", "*", route.subject).split(".") for route in ROUTES]
    for one, other in itertools.combinations(shapes, 2):
        same = len(one) == len(other) and all(
            a == b or "*" in (a, b) for a, b in zip(one, other, strict=True)
        )
        assert not same, (one, other)


@pytest.mark.parametrize("route", ROUTES, ids=name)
def test_route_names_its_parties_and_messages(route: Route) -> None:
    parties = {*Role, CLIENT, OPERATOR}
    assert route.carries
    assert route.senders
    assert route.listeners
    assert {*route.senders, *route.listeners} <= parties
    assert isinstance(route, RequestRoute) == hasattr(route, "replies")
    if isinstance(route, RequestRoute):
        assert route.replies
        assert route.delivery is not DeliveryMode.ALL
    if route.delivery is DeliveryMode.QUEUE:
        assert not route.ordered


@given(names)
def test_escaped_name_is_one_token_and_reads_back(text: str) -> None:
    token = escape(text)
    assert re.fullmatch(r"[A-Za-z0-9_=-]+", token)
    pieces = re.findall(r"=([0-9A-F]{2})|([A-Za-z0-9_-])", token)
    back = b"".join(bytes.fromhex(code) if code else plain.encode() for code, plain in pieces)
    assert back.decode() == text


def test_empty_name_is_a_bug() -> None:
    with pytest.raises(ValueError, match="empty name"):
        escape("")


def test_subject_is_filled_and_a_part_left_out_is_a_wildcard_to_listeners_only() -> None:
    assert routes.HEARTBEAT.subject_for(role="worker", instance="w.1") == "heartbeat.worker.w=2E1"
    assert routes.HEARTBEAT.subject_filter(role="worker") == "heartbeat.worker.*"
    assert routes.HEARTBEAT.subject_filter() == "heartbeat.*.*"
    with pytest.raises(KeyError):
        routes.HEARTBEAT.subject_for(role="worker")


def test_inboxes_of_parties_do_not_overlap() -> None:
    inboxes = [
        *(inbox(role) for role in Role),
        inbox(CLIENT),
        inbox(CLIENT, TenantId("other")),
        inbox(CLIENT, TenantId("a.b")),
    ]
    for one, other in itertools.permutations(inboxes, 2):
        assert not f"{one}.".startswith(f"{other}.")
