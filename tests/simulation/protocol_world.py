"""A simulated cluster under load and faults, and what must hold of it at every end."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from tests.simulation.protocol_network import Network, Supervisor, Timeline, Weather
from tests.simulation.protocol_nodes import (
    BEAT_S,
    MESSAGE_BYTES_MAX,
    MODEL,
    RUNNING_MAX,
    DetokenizerNode,
    GatewayNode,
    Node,
    SchedulerNode,
    WorkerNode,
)

from antiphon.bus.transport import BusDown
from antiphon.gateway.owner.actions import Accepted, Ended, Finished, StreamEvent
from antiphon.gateway.owner.actions import TextDelta as Text
from antiphon.wire.base import Process, Term, Usage
from antiphon.wire.bounds import INT64_MAX
from antiphon.wire.codec import pack_ids
from antiphon.wire.command import CommandBatch
from antiphon.wire.errors import DeadlineExceeded, Unavailable, UnknownStream, WorkerLost, WrongTerm
from antiphon.wire.heartbeat import ProcessExited
from antiphon.wire.ids import Incarnation, InstanceId, RequestId, TenantId
from antiphon.wire.routes import COMMAND, EXIT, HEARTBEAT
from antiphon.wire.sampling import SamplingParams, StopStrings, TokenOutputParams
from antiphon.wire.submit import ResumeWindow, SubmitRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.wire.errors import EngineError
    from antiphon.wire.heartbeat import Heartbeat
    from antiphon.wire.token_outputs import TokenOutputsChunk

STOP = "<end>"
LETTERS: tuple[str, ...] = ("a", "b", " ", "é", "中", "🎶", "<", "<en")
LETTERS_MAX = 32
ANSWER_BYTES_MAX = 176
CHOICES = (1, 1, 3)
PRIORITIES = (0, 0, 3, 5)
FORGED = (0, 1, 7, 2**31, 2**32, 2**33, 2**40, 2**62 - 2**32, 2**62, 2**63)
"""About these sizes are forged terms."""
SETTLE_S = 4.0
"""From the start until a leader binds."""
RETRYABLE = (Unavailable, WrongTerm, DeadlineExceeded)
RESUMED_MAX = 4
"""How often a client loses its connection at most."""
WINDOW_MS = 20_000
"""Longer than two gateways are tried one after the other, of which one is frozen."""
NAME_TIMEOUT_S = 5 * BEAT_S
"""How long the holder of a name may take to say so to a process that claims it."""
FORGET_S = 14.0
"""Past the last deadline no service remembers anything."""


@dataclass(frozen=True)
class Truth:
    """What one run of a request says: another run may say something else, as samplers do."""

    text: str
    tokens: int
    token_ids: bytes


@dataclass
class Said:
    """What the client of a request received of one choice, and what its runs have sent.

    Attributes:
        reported: The token that is reported next; None if none is.
        had: The text that its client had when it resumed the stream.
    """

    reported: int | None
    truths: list[Truth] = field(default_factory=list[Truth])
    text: str = ""
    finished: bool = False
    token_ids: list[int] = field(default_factory=list[int])
    had: str = ""
    had_reported: int | None = None

    def again(self, details_from: int | None) -> None:
        """The client resumes the stream: it is delivered from its beginning."""
        self.had = max(self.had, self.text, key=len)
        if self.reported is not None:
            self.had_reported = max(self.reported, self.had_reported or 0)
        self.reported, self.text, self.finished, self.token_ids = details_from, "", False, []

    def report(self, text_offset: int, text: str, details: TokenOutputsChunk | None) -> None:
        assert not self.finished, f"{text} after the end"
        assert text_offset == len(self.text.encode()), "text is missing or repeated"
        self.text += text
        assert self.text.startswith(self.had) or self.had.startswith(self.text), (
            f"{self.text!r} is not what the client had: {self.had!r}"
        )
        assert any(truth.text.startswith(self.text) for truth in self.truths), (
            f"{self.text!r} is the beginning of none of {self.truths}"
        )
        if details is not None:
            self._tell_details(details)

    def _tell_details(self, piece: TokenOutputsChunk) -> None:
        assert piece.offset == self.reported, "details are missing or repeated"
        for offset, detail in enumerate(piece.details.iter_tokens(), piece.offset):
            assert detail.logprob == -offset
            self.token_ids.append(detail.token_id)
        assert piece.texts.keys() == set(self.token_ids[-piece.details.count :])
        self.reported = piece.end

    def matches(self, details_from: int | None) -> list[Truth]:
        """The runs that say just this."""
        return [
            truth
            for truth in self.truths
            if truth.text == self.text
            and (
                details_from is None
                or (
                    self.token_ids[-details_from:] == list(truth.token_ids)
                    and len(self.token_ids) == truth.tokens - details_from
                )
            )
        ]


@dataclass
class Story:
    """One request: what its runs have sent, and what its client received."""

    submit: SubmitRequest
    gateway: GatewayNode
    left: bool = False
    attached: bool = True
    resumed: int = 0
    trial: int = 0
    missed: WorkerLost | None = None  # its end, while its client was away
    ended: Ended | None = None
    ended_ms: int = 0

    def __post_init__(self) -> None:
        self.details_from = self.submit.sampling.details_from(len(self.submit.prompt_ids) // 4)
        self.choices = [Said(self.details_from) for _ in range(self.submit.choices)]

    @property
    def client_has(self) -> list[tuple[int, int | None]]:
        return [(len(said.had.encode()), said.had_reported) for said in self.choices]

    @property
    def has_output(self) -> bool:
        return any(said.text or said.had for said in self.choices)

    def detach(self) -> None:
        """The client has lost its connection."""
        self.attached, self.ended = False, None
        for said in self.choices:
            said.again(self.details_from)

    def report(self, event: StreamEvent, unix_ms: int) -> None:
        assert self.ended is None, f"{event} after the end"
        match event:
            case Accepted():
                assert not any(choice.text for choice in self.choices)
            case Text(choice, text_offset, text, _, details):
                self.choices[choice].report(text_offset, text, details)
            case Finished(choice, _, _, text_bytes):
                assert text_bytes == len(self.choices[choice].text.encode())
                self.choices[choice].finished = True
            case Ended():
                self.ended, self.ended_ms = event, unix_ms

    @property
    def error(self) -> EngineError | None:
        assert self.ended is not None
        return self.ended.error


class World:
    """Two gateways, two schedulers, two workers, two detokenizers, and their clients."""

    def __init__(
        self,
        seed: int,
        weather: Weather,
        queue_max: int = 256,
        fickle: float = 0.0,
        apart_s: float = 0.0,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        running_max: int = RUNNING_MAX,
    ) -> None:
        self.random = random.Random(f"world {seed}")
        self.resuming = False
        """Whether clients lose their connections, and resume their streams at any gateway."""
        self.watched = 0.5
        """The share of deaths that are seen by a supervisor."""
        self.poison: set[RequestId] = set()
        """A worker dies soon after it has begun to compute one of these."""
        self._watched = random.Random(f"supervisors {seed}")
        self._supervisor = Supervisor()
        self.timeline = Timeline()
        self.network = Network(self.timeline, seed, weather)
        self.network.apart_ms = round(1000 * apart_s)
        self.stories: dict[RequestId, Story] = {}
        self._asked: dict[bytes, Story] = {}
        self._answers: dict[tuple[bytes, int], list[bytes]] = {}
        self.begun: Counter[tuple[RequestId, int]] = Counter()
        self._last_deadline = 0.0
        self._loaded_until = 0.0
        self._lives = itertools.count(1)
        self._numbers = itertools.count(1)
        self.gateways: list[GatewayNode] = []
        self._lived: list[GatewayNode] = []
        self.schedulers: list[SchedulerNode] = []
        self.workers: list[WorkerNode] = []
        self.detokenizers: list[DetokenizerNode] = []
        worker = partial(
            WorkerNode,
            answer=self._answer,
            begun=self._begin,
            fickle=fickle,
            running_max=running_max,
            gateway=self._gateway,
        )
        scheduler = partial(
            SchedulerNode,
            queue_max=queue_max,
            message_bytes_max=message_bytes_max,
            running_max=running_max,
        )
        detokenizer = partial(DetokenizerNode, message_bytes_max=message_bytes_max)
        self._kinds: dict[str, tuple[list[Any], Callable[..., Node]]] = {
            "gateway": (self.gateways, partial(GatewayNode, deliver=self._deliver)),
            "scheduler": (self.schedulers, scheduler),
            "worker": (self.workers, worker),
            "detokenizer": (self.detokenizers, detokenizer),
        }
        for kind, (nodes, _) in self._kinds.items():
            nodes += [self._make(kind, f"{kind}-{n}") for n in range(2)]
        for node in self.nodes:
            self.timeline.after(self.random.uniform(0, 0.5), node.start)

    @property
    def nodes(self) -> list[Node]:
        return [*self.gateways, *self.schedulers, *self.workers, *self.detokenizers]

    @property
    def now(self) -> float:
        return self.timeline.clock.now()

    def run_past_freezes(self, seconds: float) -> None:
        """Run for so long after the last frozen process has woken up."""
        thawed_at = max(node.frozen_until for node in self.nodes)
        self.run(max(0.0, thawed_at + seconds - self.now))

    def run(self, seconds: float) -> None:
        self.timeline.run_until(self.now + seconds)

    def load(self, count: int, over_s: float, *, deadline_s: tuple[float, float]) -> None:
        """Let clients come at random within `over_s`; some leave before the end."""
        self._loaded_until = self.now + over_s
        for _ in range(count):
            left = self.random.random() < 0.15
            when = self.random.uniform(0, over_s)
            deadline = self.random.uniform(*deadline_s)
            self._last_deadline = max(self._last_deadline, self.now + when + deadline)
            self.timeline.after(when, partial(self.ask, deadline, leaves=left))

    def ask(self, deadline_s: float, *, leaves: bool = False) -> Story:
        """One client asks one gateway that lives."""
        gateway = self.random.choice(self.gateways)
        story = self._story(gateway, deadline_s)
        request_id = story.submit.request_id
        self._last_deadline = max(self._last_deadline, self.now + deadline_s)
        self.stories[request_id] = story
        gateway.open(story.submit)
        if self.resuming:
            self.timeline.after(self.random.uniform(0, 3), partial(self._lose, story))
            self.timeline.after(0.5, partial(self._notice, story))
        elif leaves:

            def leave() -> None:
                story.left = True
                gateway.leave(request_id)

            self.timeline.after(self.random.uniform(0, 5), leave)
        return story

    def _notice(self, story: Story) -> None:
        """The connection of a client breaks with its gateway."""
        if story.attached and not story.gateway.alive:
            self._lose(story)
            return
        if story.attached and story.ended is not None:
            return
        self.timeline.after(0.5, partial(self._notice, story))

    def _lose(self, story: Story) -> None:
        """A client loses its connection, perhaps with the last events, and comes again."""
        failed = story.ended is not None and story.error is not None
        if not story.attached or story.resumed >= RESUMED_MAX or failed:
            return
        if not story.has_output:
            # Without an event it has no position: it would send the request anew.
            self.timeline.after(0.5, partial(self._lose, story))
            return
        story.resumed += 1
        story.detach()
        story.gateway.detach(story.submit.request_id)
        self.timeline.after(self.random.uniform(0, 2), partial(self._resume, story))
        self.timeline.after(self.random.uniform(2, 4), partial(self._lose, story))

    def _resume(self, story: Story) -> None:
        """One connection after the other is tried; only the last one counts."""
        story.trial += 1
        trial, request_id = story.trial, story.submit.request_id
        alive = [gateway for gateway in self.gateways if gateway.alive]
        if not alive:
            self.timeline.after(0.5, partial(self._resume, story))
            return
        gateway = self.random.choice(alive)

        def opened() -> None:
            if story.trial == trial:
                story.gateway, story.attached = gateway, True
            else:
                self.timeline.after(0.0, partial(gateway.detach, request_id))

        def refused(error: EngineError) -> None:
            assert isinstance(error, (*RETRYABLE, UnknownStream)), error
            if story.trial == trial and isinstance(error, UnknownStream):
                story.gateway, story.attached = gateway, True
                story.report(Ended(Usage(), story.missed or error), gateway.clock.unix_ms())
            elif story.trial == trial:
                self.timeline.after(0.2, partial(self._resume, story))

        def impatient() -> None:
            if story.trial == trial and not story.attached:
                self._resume(story)

        gateway.resume(story.submit, story.client_has, opened, refused)
        self.timeline.after(6.0, impatient)

    def finish(self) -> None:
        """Wait until nothing is left, or every deadline is long past, then check everything."""
        self.network.weather = Weather()
        forget_s = FORGET_S + (WINDOW_MS / 1000 if self.resuming else 0)
        latest = max(self.now, self._last_deadline) + forget_s
        while self.now < latest - SETTLE_S and not self._is_over:
            self.run(BEAT_S)
        self.run(min(SETTLE_S, latest - self.now))  # what is under way may bring something back
        for story in self.stories.values():
            check_story(story)
        for node in self.nodes:
            check_empty(node)
        names = [one.name.partition("#")[0] for one in self.network.parties]
        assert len(names) == len(set(names)), f"two live under one name: {names}"
        terms = [node.leader.term for node in self.schedulers if node.leader.term]
        assert len(terms) == 1, f"these lead: {terms}"

    @property
    def _is_over(self) -> bool:
        """Whether all clients have come and gone, all processes answer, and none has a request."""
        if self.resuming or self.now < self._loaded_until or not self.network.up:
            return False
        answer = all(node.answers and node.connected for node in self.nodes)
        if not answer or any(worker.awake for worker in self.workers):
            return False
        try:
            self.check_recovered()
        except AssertionError:
            return False
        return True

    def check_ended(self) -> None:
        """All requests have ended whose gateways live."""
        waiting = [
            story.submit.request_id
            for story in self.stories.values()
            if story.ended is None and story.gateway.alive
        ]
        assert not waiting, f"{waiting} still wait"

    def check_recovered(self) -> None:
        """Long after a fault, and long before the deadlines: all have ended, none is orphaned."""
        self.check_ended()
        for node in self.nodes:
            check_empty(node)

    # Faults.

    def crash(self, kind: str, which: Node | None = None) -> None:
        """Kill one of a kind; another life of it comes after a while."""
        node = which or self.random.choice(self._kinds[kind][0])
        if not node.alive:
            return
        node.die()
        if self._watched.random() < self.watched:  # by its supervisor
            exited = ProcessExited(process=node.process)
            with suppress(BusDown):
                name = node.process.instance
                self.network.publish(self._supervisor, EXIT, exited, instance=name)
        self.timeline.after(self.random.uniform(0.3, 4), lambda: self._succeed(kind, node))

    def crash_host(self, number: int | None = None) -> None:
        """Kill a worker and a detokenizer at once: only the owners have what they were sent."""
        number = self.random.randrange(2) if number is None else number
        self.crash("worker", self.workers[number])
        self.crash("detokenizer", self.detokenizers[number])

    def crash_hosts(self) -> None:
        """Kill one host, and soon the other one, to which its requests have gone."""
        first = self.random.randrange(2)
        self.crash_host(first)
        self.timeline.after(self.random.uniform(0, 5), lambda: self.crash_host(1 - first))

    def crash_host_with_gateway(self) -> None:
        """Kill all of a host: only clients have what they were sent."""
        number = self.random.randrange(2)
        self.crash("gateway", self.gateways[number])
        self.crash_host(number)

    def crash_worker_beside_frozen_detokenizer(self) -> None:
        """Kill a worker; the detokenizer of its host answers nothing, and wakes up later."""
        number = self.random.randrange(2)
        self.crash("worker", self.workers[number])
        self.detokenizers[number].freeze(self.random.uniform(2, 8))

    def crash_leader(self) -> None:
        leaders = [node for node in self.schedulers if node.alive and node.leader.term]
        if leaders:
            self.crash("scheduler", leaders[0])

    def drain_worker(self, *, migrate: bool = False) -> None:
        """An operator replaces a worker: it leaves when it has ended what it had begun.

        With `migrate`, what it had begun continues on others.
        """
        node = self.random.choice(self.workers)
        if not node.alive or node.left is not None:
            return

        def left() -> None:
            node.die()
            self._succeed("worker", node)

        node.run(lambda: node.drain(left, migrate=migrate))

    def pause_worker(self) -> None:
        """An operator stops the steps of a worker for a while."""
        self.random.choice(self.workers).pause(self.random.uniform(0.5, 4))

    def forge(self) -> None:
        """Somebody sends heartbeats under the names of all, each of another life."""
        for turn in range(20):
            self.timeline.after(turn * self.random.uniform(0, 1), self._forge_one)

    def _forge_one(self) -> None:
        node = self.random.choice(self.nodes)
        life = Incarnation(f"forged-{self.random.randint(0, 3)}")
        node.beat(Process(instance=node.process.instance, incarnation=life))

    def forge_terms(self) -> None:
        """Forge terms of all sizes for some seconds, in every message that names one."""
        for _ in range(12):
            self.timeline.after(self.random.uniform(0, 6), self.forge_term)

    def forge_term(self) -> None:
        number = self.random.choice(FORGED) + self.random.randint(-3, 3)
        number += self.random.choice((0, self.term_number))
        who = self.random.choice(("stranger", "leader", "worker", "command"))
        self.forge_term_of(who, min(max(0, number), INT64_MAX))

    def forge_term_of(self, who: str, number: int) -> None:
        """Forge a term that is claimed by a process, obeyed by a worker, or in commands."""
        scheduler, worker = self.random.choice(self.schedulers), self.random.choice(self.workers)
        term = Term(number=number, scheduler=scheduler.process)
        match who:
            case "stranger":
                name = InstanceId(f"scheduler-{self.random.randint(2, 3)}")
                stranger = Process(instance=name, incarnation=Incarnation("forged"))
                beat = scheduler.heartbeat(stranger)
                claim = Term(number=number, scheduler=stranger)
                self._say(msgspec.structs.replace(beat, leads=claim))
            case "leader":
                self._say(msgspec.structs.replace(scheduler.heartbeat(), leads=term))
            case "worker":
                beat = worker.heartbeat()
                assert beat.worker is not None
                load = msgspec.structs.replace(beat.worker, term=term)
                self._say(msgspec.structs.replace(beat, worker=load))
            case _:
                self.forge_command(worker, term)

    def forge_command(self, worker: WorkerNode, term: Term) -> None:
        """Send a batch of no commands under a forged term."""
        batch = CommandBatch(
            leader=term,
            worker=worker.process,
            seq=1,
            commands=(),
            not_after_unix_ms=worker.clock.unix_ms() + 1500,
        )
        self.gateways[0].say(COMMAND, batch, worker=worker.process.instance)

    @property
    def term_number(self) -> int:
        """The number of the highest term that leads."""
        terms = [node.leader.term for node in self.schedulers]
        return max((term.number for term in terms if term), default=0)

    def _say(self, beat: Heartbeat) -> None:
        self.gateways[0].say(HEARTBEAT, beat, role=beat.role, instance=beat.process.instance)

    def replace_frozen(self, kind: str) -> None:
        """One is frozen until it counts as dead, another life takes its name; then it wakes."""
        node = self.random.choice(self._kinds[kind][0])
        if node.alive:
            node.freeze(self.random.uniform(4, 8))
            self.timeline.after(3 - NAME_TIMEOUT_S, lambda: self._succeed(kind, node))

    def _succeed(self, kind: str, node: Node, since: float | None = None) -> None:
        """Start another life, if no process answers to its name.

        One that is connected has some time to do so from `since` on, and all of an outage.
        """
        nodes, _ = self._kinds[kind]
        if node not in nodes:
            return
        holders = [
            one
            for one in self.network.parties
            if isinstance(one, type(node)) and one.process.instance == node.process.instance
        ]
        if answering := [one for one in holders if one.answers]:
            nodes[nodes.index(node)] = answering[0]  # the newcomer is refused
            return
        since = self.now if since is None or not self.network.up else since
        if holders and self.now - since < NAME_TIMEOUT_S:
            self.timeline.after(0.1, partial(self._succeed, kind, node, since))
            return
        nodes[nodes.index(node)] = fresh = self._make(kind, node.process.instance)
        fresh.start()

    def freeze(self) -> None:
        self.random.choice(self.nodes).freeze(self.random.uniform(0.5, 8))

    def freeze_gateway(self) -> None:
        """An owner pauses: what it owns runs on, and it shows the text that it missed."""
        self.random.choice(self.gateways).freeze(self.random.uniform(2, 12))

    def mute(self) -> None:
        """Nothing that one sends arrives, and it does not know it."""
        self.random.choice(self.nodes).mute_until = self.now + self.random.uniform(0.5, 6)

    def deaf(self) -> None:
        """One receives nothing."""
        self.random.choice(self.nodes).deaf_until = self.now + self.random.uniform(0.5, 6)

    def deaf_one(self, kind: str) -> None:
        """One of a kind receives nothing, for longer than it takes to count as dead."""
        node = self.random.choice(self._kinds[kind][0])
        node.deaf_until = self.now + self.random.uniform(3, 8)

    def disconnect(self) -> None:
        """One loses its connection to the broker, and connects again."""
        self.random.choice(self.nodes).disconnect(self.random.uniform(0.1, 6))

    def outage(self) -> None:
        if self.network.up:
            self.network.outage(self.random.uniform(0.2, 6))

    def short_outage(self) -> None:
        self.network.outage(self.random.uniform(0.2, 2))

    # Parts.

    def _make(self, kind: str, instance: str) -> Node:
        nodes, make = self._kinds[kind]
        node = make(self.timeline, self.network, instance, next(self._lives))

        def replaced(holder: Node) -> None:
            """List the true holder of a name in place of a process that has lost it."""
            if node in nodes:
                nodes[nodes.index(node)] = holder

        node.replaced = replaced
        if isinstance(node, GatewayNode):
            self._lived.append(node)
        return node

    def _gateway(self, name: str) -> GatewayNode | None:
        """The process that listens at an address, if it lives."""
        found = (node for node in self._lived if node.name == name and node.alive)
        return next(found, None)

    def _begin(self, request_id: RequestId, choice: int) -> None:
        self.begun[request_id, choice] += 1
        if request_id in self.poison:
            self.timeline.after(0.01, partial(self._poisoned, request_id))

    def _poisoned(self, request_id: RequestId) -> None:
        for worker in self.workers:
            if any(state.request_id == request_id for state in worker.engine.running):
                self.crash("worker", worker)

    def _deliver(self, gateway: GatewayNode, request_id: RequestId, event: StreamEvent) -> None:
        story = self.stories[request_id]
        if story.attached and story.gateway is gateway:
            story.report(event, gateway.clock.unix_ms())
        elif isinstance(event, Ended) and isinstance(event.error, WorkerLost):
            story.missed = event.error  # the stream is not found by a client that resumes it now

    def _story(self, gateway: GatewayNode, deadline_s: float) -> Story:
        number = next(self._numbers)
        prompt_ids = pack_ids([number, *range(self.random.randint(0, 60))])
        stops = self.random.random() < 0.3
        request_id = RequestId(f"r{number}")
        submit = SubmitRequest(
            request_id=request_id,
            owner=gateway.process,
            tenant=TenantId("default"),
            model=MODEL,
            digest=number.to_bytes(4, "little"),
            prompt_ids=prompt_ids,
            choices=self.random.choice(CHOICES),
            priority=self.random.choice(PRIORITIES),
            sampling=SamplingParams(max_new_tokens=ANSWER_BYTES_MAX, details=self._details()),
            stop=StopStrings(strings=(STOP,) if stops else (), token_texts=True),
            deadline_unix_ms=gateway.clock.unix_ms() + round(deadline_s * 1000),
            resume=ResumeWindow(window_ms=WINDOW_MS) if self.resuming else None,
            media=(gateway.hold(request_id),) if self.resuming else (),
        )
        self._asked[prompt_ids] = story = Story(submit, gateway)
        return story

    def _details(self) -> TokenOutputParams | None:
        """Half of the clients want a report of each token, a few of them of the prompt, too."""
        if self.random.random() < 0.5:
            return None
        start = self.random.choice((-1, -1, 0, 20))
        return TokenOutputParams(logprobs=True, top=1, hidden=True, prompt_start=start)

    def _answer(self, prompt_ids: bytes, choice: int, before: bytes) -> bytes:
        """Make up what a run will say, which continues what one before it has said."""
        story = self._asked[prompt_ids]
        begun = _whole_letters(before, self._answers[prompt_ids, choice]) if before else ""
        letters = self.random.choices(
            LETTERS, k=self.random.randint(1, max(1, LETTERS_MAX - len(begun)))
        )
        stops = story.submit.stop.strings
        if stops:
            letters.insert(self.random.randrange(len(letters)), STOP)
        if story.submit.request_id in self.poison:
            letters = ["a"] * 16 + letters  # it does not end before it kills
        answer = begun + "".join(letters)
        assert len(answer.encode()) < ANSWER_BYTES_MAX
        self._answers.setdefault((prompt_ids, choice), []).append(answer.encode())
        text, found, _ = answer.partition(STOP) if stops else (answer, "", "")
        tokens = (text + found).encode()
        story.choices[choice].truths.append(Truth(text, len(tokens), tokens))
        return answer.encode()


SILENCES: tuple[tuple[Callable[[Node], None], float, bool], ...] = (
    (Node.die, 2.5, False),
    (lambda node: node.freeze(10.0), 3.9, True),
    (lambda node: node.freeze(10.0), 5.5, False),
    (lambda node: node.disconnect(0.5 * BEAT_S), 2.5, True),
)
"""What makes a process silent, and whether it is listed still after so many heartbeats."""


def note_silences(seed: int, kind: str = "worker") -> None:
    """Let processes become silent; no supervisor watches them."""
    for fault, beats, listed in SILENCES:
        world = World(seed, Weather())
        world.run(SETTLE_S + seed / 10)
        node = next(one for one in world.nodes if one.process.instance == f"{kind}-0")
        fault(node)
        world.run(beats * BEAT_S)
        *_, peer = world.schedulers
        assert peer.peers.is_alive(node.process) is listed, beats


def move_attempts(seed: int) -> None:
    """A worker or a detokenizer dies: its requests go on elsewhere, and all succeed."""
    world = World(seed, Weather(delay_s=0.005))
    world.run(SETTLE_S)
    world.load(16, 3, deadline_s=(15, 20))
    kind = ("worker", "detokenizer")[seed % 2]
    world.timeline.after(world.random.uniform(1, 3), partial(world.crash, kind))
    world.finish()
    errors = [one.error for one in world.stories.values() if not one.left]
    assert not any(errors), errors


def freeze_leaders(seed: int) -> None:
    """The leader stands still, while others lead: no request notices, those that wait included."""
    world = World(seed, Weather(delay_s=0.005))
    world.run(SETTLE_S)
    world.load(60, 6, deadline_s=(100, 110))
    world.run(2 + seed % 5 / 2)
    for node in world.schedulers:
        if node.leader.term is not None:
            node.freeze(8)
    world.run(24)
    world.check_ended()
    errors = [one.error for one in world.stories.values() if not one.left]
    assert not any(errors), errors


def _whole_letters(before: bytes, answers: list[bytes]) -> str:
    """The bytes that were said, up to the end of their last letter in the answer they are of."""
    answer = next((one for one in answers if one.startswith(before)), None)
    assert answer is not None, f"no run has said {before}"
    for end in range(len(before), len(answer) + 1):
        try:
            return answer[:end].decode()
        except UnicodeDecodeError:
            continue
    raise AssertionError("an answer ends within a letter")


def check_story(story: Story) -> None:
    """One terminal, by the deadline; what was said is true, and all of it on success."""
    if story.ended is None:
        # The connection broke with the gateway: no client waits for an end.
        assert not story.gateway.alive, f"{story.submit.request_id} has no end"
        resumes = story.submit.resume is not None and story.has_output
        assert not resumes, f"{story.submit.request_id} is not resumed"
        return
    due_ms = max(story.submit.deadline_unix_ms, story.gateway.thawed_ms)
    late_ms = story.ended_ms - due_ms
    assert late_ms <= 100, f"{story.submit.request_id} ended {late_ms} ms late"
    if story.error is None:
        assert all(choice.finished for choice in story.choices)
        runs = itertools.product(*(choice.matches(story.details_from) for choice in story.choices))
        tokens = story.ended.usage.completion_tokens
        assert any(sum(truth.tokens for truth in run) == tokens for run in runs)


def check_empty(node: Node) -> None:
    """After the load nothing is left in any machine."""
    match node:
        case GatewayNode():
            assert node.owner.open_count == 0
            assert not node.prompts, node.name
            assert not node.media, node.name
            assert not node.leaving, node.name
        case SchedulerNode():
            leader = node.leader
            assert (leader.open_requests, leader.waiting, leader.failed_requests) == (0, 0, 0), (
                node.name
            )
        case WorkerNode():
            assert not node.output.held(), node.name
            assert not node.fetching, node.name
            assert not node.loading, node.name
            node.engine.check_empty()
        case DetokenizerNode():
            assert not node.machine.requests, node.name
        case _:
            raise AssertionError(node)
