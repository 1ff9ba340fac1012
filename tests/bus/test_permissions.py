"""Users from the route table have their own permissions; discovery verbs are answered as ADR-32."""

from __future__ import annotations

import re
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.bus.worlds import Mailbox, World, bus_config, mailbox
from tests.support.nats import NatsServer
from tests.support.services import process
from tests.support.wait import until
from tests.wire.examples import EXAMPLES, TERM, WORKER

from antiphon.bus.bus import Bus, Delivery
from antiphon.bus.discovery import DISCOVERY_CLIENTS, EndpointCounters, answer_discovery
from antiphon.bus.nats import NatsTransport
from antiphon.bus.permissions import compose_config, user, users, users_text
from antiphon.bus.server import ServerSettings
from antiphon.wire.base import Role
from antiphon.wire.command import CommandBatch
from antiphon.wire.ids import DEFAULT_TENANT, ClusterName, TenantId
from antiphon.wire.routes import CLIENT, COMMAND, OPERATOR, ROUTES, Party, RequestRoute, Route

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


CLUSTER = ClusterName("antiphon")
OTHER = TenantId("other")
COMMITTED = Path(__file__).parents[2] / "compose" / "nats.conf"


@dataclass
class Member:
    party: Party
    bus: Bus
    transport: NatsTransport

    async def refusals(self) -> int:
        """How much the broker has refused us, of all that we sent until now."""
        await self.transport.flush(5)
        return self.transport.errors.forbidden


class House:
    """A server with the generated users, and one member a party."""

    def __init__(self, url: str, stack: AsyncExitStack) -> None:
        self.url = url
        self.stack = stack
        self.members: dict[Party, Member] = {}

    async def join(self, party: Party, tenant: TenantId = DEFAULT_TENANT) -> Member:
        name = user(CLUSTER, party, tenant).name
        config = bus_config(self.url, user=name, password="secret")
        transport = NatsTransport(config, name=name)
        bus = Bus(transport, CLUSTER, process(f"{party}-0", tenant), party=party, tenant=tenant)
        await self.stack.enter_async_context(bus)
        return Member(party, bus, transport)


@pytest.fixture(scope="module")
def permitted() -> str:
    all_users = (*users(CLUSTER), user(CLUSTER, CLIENT, OTHER))
    return users_text([replace(one, password='"secret"') for one in all_users])


@pytest.fixture
async def house(permitted: str) -> AsyncIterator[House]:
    async with (
        NatsServer(ServerSettings(name="guarded", users=permitted)) as server,
        AsyncExitStack() as stack,
    ):
        house = House(server.url, stack)
        for party in (*Role, CLIENT, OPERATOR):
            house.members[party] = await house.join(party)
        yield house


def address(route: Route, sender: Party) -> dict[str, str]:
    """Fill every part of a route's subject, as its sender would."""
    parts = dict.fromkeys(re.findall(r"{(\w+)}", route.subject), "x")
    if "tenant" in parts:
        parts["tenant"] = DEFAULT_TENANT
    if "role" in parts:
        parts["role"] = sender
    return parts


async def test_committed_config_is_generated_and_reads_passwords(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert COMMITTED.read_text() == compose_config(CLUSTER)
    for party in users(CLUSTER):
        monkeypatch.setenv(party.password.removeprefix("$"), f"secret{len(party.name)}")
    text = COMMITTED.read_text()
    authorization = text[text.index("authorization {") :]
    async with NatsServer(ServerSettings(name="composed", users=authorization)) as server:
        config = bus_config(server.url, user="worker", password="secret6")
        async with NatsTransport(config, name="worker") as transport:
            assert transport.link.up


async def test_every_route_works_between_its_rightful_parties(house: House) -> None:
    for route in ROUTES:
        for listener in route.listeners:
            for sender in route.senders:
                await try_route(route, house.members[sender], house.members[listener])
    for member in house.members.values():
        assert await member.refusals() == 0, member.party


async def try_route(route: Route, sender: Member, listener: Member) -> None:
    received: list[Delivery] = []

    async def deliver(delivery: Delivery) -> None:
        received.append(delivery)
        if isinstance(route, RequestRoute):
            delivery.respond(EXAMPLES[route.replies[0]])

    parts = address(route, sender.party)
    named = {"tenant": DEFAULT_TENANT} if "tenant" in parts else {}
    subscription = await listener.bus.listen(route, deliver, **named)
    message = EXAMPLES[route.carries[0]]
    if isinstance(route, RequestRoute):
        reply = await sender.bus.call(route, message, timeout_s=5, **parts)
        assert reply == EXAMPLES[route.replies[0]]
    else:
        sender.bus.publish(route, message, **parts)
    await until(lambda: len(received) == 1)
    assert received[0].read(route) == message
    await subscription.drain()


async def test_user_cannot_publish_the_routes_of_another_party(house: House) -> None:
    for member in house.members.values():
        own = {"discover"} if member.party == OPERATOR else set[str]()
        for route in ROUTES:
            if member.party in route.senders or route.name in own:
                continue
            before = await member.refusals()
            example = EXAMPLES[route.carries[0]]
            member.bus.publish(route, example, **address(route, route.senders[0]))
            assert await member.refusals() == before + 1, (member.party, route.name)


async def test_user_cannot_subscribe_to_the_routes_of_another_party(house: House) -> None:
    async def deliver(delivery: Delivery) -> None:
        raise AssertionError(delivery.subject)

    for member in house.members.values():
        own = {"heartbeat"} if member.party == OPERATOR else set[str]()
        for route in ROUTES:
            if member.party in route.listeners or route.name in own:
                continue
            before = await member.refusals()
            await member.bus.listen(route, deliver)
            assert await member.refusals() == before + 1, (member.party, route.name)


async def test_command_of_a_tokenizer_never_reaches_a_worker(house: House) -> None:
    worker, tokenizer, scheduler = (
        house.members[role] for role in (Role.WORKER, Role.TOKENIZER, Role.SCHEDULER)
    )
    received: list[str] = []

    async def deliver(delivery: Delivery) -> None:
        received.append(delivery.subject)

    await worker.bus.listen(COMMAND, deliver, worker="worker-0")
    command = CommandBatch(leader=TERM, worker=WORKER, seq=0, commands=(), not_after_unix_ms=1)
    tokenizer.bus.publish(COMMAND, command, worker="worker-0")
    assert await tokenizer.refusals() == 1
    assert not received
    scheduler.bus.publish(COMMAND, command, worker="worker-0")
    await until(lambda: len(received) == 1)


async def test_replies_are_received_by_their_own_party_only(house: House) -> None:
    inboxes = [f"antiphon.v1.inbox.{party}.>" for party in (*Role, OPERATOR)]
    inboxes += [f"antiphon.v1.client.{tenant}.>" for tenant in (DEFAULT_TENANT, OTHER)]
    wide = [">", "antiphon.>", "antiphon.v1.client.>", "antiphon.v1.inbox.>", "_INBOX.>"]
    members = [*house.members.values(), await house.join(CLIENT, OTHER)]
    allowed = 0
    for member in members:
        for subject in (*inboxes, *wide):
            before = await member.refusals()
            await member.transport.subscribe(subject, Mailbox().receive)
            allowed += await member.refusals() == before
    assert allowed == len(members)


async def test_client_publishes_to_gateways_only(house: House) -> None:
    client = house.members[CLIENT]
    for subject in (
        "antiphon.v1.inbox.gateway.gateway-0.1.0",
        "antiphon.v1.client.other.inbox",
        "antiphon.v1.client.default.inbox",
        "$SRV.PING",
        "anything",
    ):
        before = await client.refusals()
        client.transport.publish(subject, b"")
        assert await client.refusals() == before + 1, subject


async def test_every_role_responds_to_discovery_verbs_of_allowed_parties(house: House) -> None:
    for role in Role:
        member = house.members[role]
        await answer_discovery(
            member.transport,
            role=role,
            process=member.bus.process,
            version="0.1.0",
            cluster="antiphon",
            endpoints=[EndpointCounters("a", "b")],
        )
    for asker in DISCOVERY_CLIENTS:
        member, box = house.members[asker], Mailbox()
        prefix = f"antiphon.v1.inbox.{asker}.test"
        await member.transport.subscribe(prefix, box.receive)
        member.transport.publish("$SRV.PING", b"", prefix)
        await box.wait(len(Role))
    for member in house.members.values():
        assert await member.refusals() == 0, member.party


HEAD = {
    "name": "antiphon-tokenizer",
    "id": "abc",
    "version": "0.1.0",
    "metadata": {"instance": "tokenizer-0", "cluster": "test"},
}


async def ask(world: World, *subjects: str) -> list[dict[str, object]]:
    """Start a tokenizer's discovery, ask, and return what came."""
    asker, answerer = await world.join(), await world.join()
    endpoint = EndpointCounters("tokenizer.encode", "test.v1.tokenizer.m.encode", "tokenizer")
    endpoint.count(0.25)
    endpoint.count(0.75, "overloaded")
    await answer_discovery(
        answerer,
        role=Role.TOKENIZER,
        process=process("tokenizer-0", "abc"),
        version="0.1.0",
        cluster="test",
        endpoints=[endpoint],
    )
    box = await mailbox(asker, "inbox.1")
    for subject in subjects:
        asker.publish(subject, b"", "inbox.1")
    return [msgspec.json.decode(data) for data in await box.wait(len(subjects))]


@pytest.mark.parametrize("rest", ["", ".antiphon-tokenizer", ".antiphon-tokenizer.abc"])
async def test_ping_is_answered_on_all_three_subjects(world: World, rest: str) -> None:
    answers = await ask(world, f"$SRV.PING{rest}")
    assert answers == [{"type": "io.nats.micro.v1.ping_response", **HEAD}]


async def test_info_lists_the_endpoints(world: World) -> None:
    assert await ask(world, "$SRV.INFO") == [
        {
            "type": "io.nats.micro.v1.info_response",
            **HEAD,
            "description": "Antiphon tokenizer",
            "endpoints": [
                {
                    "name": "tokenizer.encode",
                    "subject": "test.v1.tokenizer.m.encode",
                    "queue_group": "tokenizer",
                }
            ],
        }
    ]


async def test_stats_count_requests_errors_and_nanoseconds(world: World) -> None:
    (answer,) = await ask(world, "$SRV.STATS.antiphon-tokenizer")
    started = answer.pop("started")
    assert datetime.fromisoformat(str(started)).tzinfo is not None
    assert answer == {
        "type": "io.nats.micro.v1.stats_response",
        **HEAD,
        "endpoints": [
            {
                "name": "tokenizer.encode",
                "subject": "test.v1.tokenizer.m.encode",
                "queue_group": "tokenizer",
                "num_requests": 2,
                "num_errors": 1,
                "last_error": "overloaded",
                "processing_time": 1_000_000_000,
                "average_processing_time": 500_000_000,
            }
        ],
    }


async def test_other_services_are_not_meant(world: World) -> None:
    await ask(world, "$SRV.PING")
    asker, box = world.transports[0], Mailbox()
    await asker.subscribe("inbox.2", box.receive)
    asker.publish("$SRV.PING.antiphon-gateway", b"", "inbox.2")
    await box.wait(1)
    assert box.packets[0].no_responders
