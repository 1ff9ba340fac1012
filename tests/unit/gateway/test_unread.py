"""What waits for a client that does not read is bounded, logprobs of its prompt included."""

from __future__ import annotations

import msgspec
from tests.simulation.owner_world import LEADER, ME, MODEL, submission
from tests.support.clock import ManualClock

from antiphon.config.gateway import GatewayConfig
from antiphon.gateway.owner.actions import Action, Deliver, Ended, TextDelta
from antiphon.gateway.owner.machine import Owner
from antiphon.gateway.owner.request import OwnedRequest
from antiphon.wire.base import Attempt, Process, Term
from antiphon.wire.codec import pack_ids
from antiphon.wire.errors import Cancelled
from antiphon.wire.ids import Incarnation, InstanceId, RequestId
from antiphon.wire.sampling import SamplingParams, TokenOutputParams
from antiphon.wire.submit import RequestAdopted
from antiphon.wire.text import TextBatch, TextRow
from antiphon.wire.token_outputs import TokenOutputs, TokenOutputsChunk

BYTES_MAX = 4000
PROMPT = list(range(2001))
DETOKENIZER = Process(instance=InstanceId("detokenizer-0"), incarnation=Incarnation("1"))
ATTEMPT = Attempt(term=Term(number=1, scheduler=LEADER), n=1)


class Desk:
    """An owner, one request with logprobs of its prompt, and a client that reads on command."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.owner = Owner(ME, MODEL, self.clock, GatewayConfig(unread_bytes_max=BYTES_MAX))
        self.unread: list[TextDelta] = []
        self.ended: Ended | None = None
        self.seq = 0
        self.offset = -(len(PROMPT) - 1)
        sampling = SamplingParams(
            max_new_tokens=8, details=TokenOutputParams(logprobs=True, prompt_start=0)
        )
        submit = msgspec.structs.replace(
            submission("r", self.clock, 1000.0), prompt_ids=pack_ids(PROMPT), sampling=sampling
        )
        self.do(self.owner.open(submit))

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Deliver) and isinstance(action.event, TextDelta):
                self.unread.append(action.event)
            elif isinstance(action, Deliver) and isinstance(action.event, Ended):
                self.ended = action.event

    def adopt(self) -> None:
        submit = self.owner.find(RequestId("r"))
        assert submit is not None
        adopted = RequestAdopted(submit=submit, term=ATTEMPT.term, attempt=None, changed=True)
        self.do(self.owner.adopt(adopted))

    def write(self, offset: int, size: int) -> None:
        """The next text."""
        self.seq += 1
        row = TextRow(
            request_id=RequestId("r"),
            choice=0,
            attempt=ATTEMPT,
            text_offset=offset,
            text="x" * size,
        )
        batch = TextBatch(detokenizer=DETOKENIZER, gateway=ME, seq=self.seq, rows=(row,))
        self.do(self.owner.text_arrived(batch))

    def send(self, tokens: int) -> None:
        """Details of the prompt's next tokens, eight bytes each."""
        column = bytes(4 * tokens)
        details = TokenOutputs(count=tokens, token_ids=column, logprobs=column)
        self.seq += 1
        row = TextRow(
            request_id=RequestId("r"),
            choice=0,
            attempt=ATTEMPT,
            text_offset=0,
            details=TokenOutputsChunk(offset=self.offset, details=details),
        )
        self.offset += tokens
        batch = TextBatch(detokenizer=DETOKENIZER, gateway=ME, seq=self.seq, rows=(row,))
        self.do(self.owner.text_arrived(batch))

    def read(self, pieces: int) -> None:
        for said in self.unread[:pieces]:
            self.owner.mark_consumed(RequestId("r"), said.size_bytes)
        del self.unread[:pieces]

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds)):
            self.clock.advance(1.0)
            self.do(self.owner.tick())


def test_a_client_that_leaves_a_long_prompts_details_unread_loses_its_request() -> None:
    desk = Desk()
    for _ in range(20):
        desk.send(100)
    assert desk.ended is None, "no client reads 16 kB at once"
    desk.wait(6)
    assert desk.ended is not None
    error = desk.ended.error
    assert isinstance(error, Cancelled)
    assert error.details == {"unread_bytes": "16000", "bytes_max": "4000"}


def test_a_client_that_reads_as_fast_as_it_can_keeps_it() -> None:
    desk = Desk()
    for _ in range(20):
        desk.send(100)
    while desk.unread:
        desk.wait(4)
        desk.read(6)
        assert desk.ended is None
    desk.wait(20)
    assert desk.ended is None


def test_a_client_that_stops_in_between_loses_it_too() -> None:
    desk = Desk()
    for _ in range(20):
        desk.send(100)
    desk.wait(4)
    desk.read(6)
    desk.wait(4)
    assert desk.ended is None
    desk.wait(4)
    assert desk.ended is not None


def test_all_text_of_a_resumed_stream_may_come_at_once_but_is_read() -> None:
    for rewound in (False, True):
        desk = Desk()
        if rewound:
            desk.owner.rewind(RequestId("r"))
        else:
            desk.adopt()
        for number in range(5):
            desk.write(3000 * number, 3000)
        assert desk.ended is None, "no client reads 15 kB at once"
        desk.wait(4)
        desk.read(4)
        desk.wait(4)
        assert desk.ended is None
        for number in range(5, 8):
            desk.write(3000 * number, 3000)
        desk.wait(12)
        assert desk.ended is not None


def test_details_within_the_bound_may_wait() -> None:
    desk = Desk()
    desk.send(500)
    desk.wait(60)
    assert desk.ended is None


def test_kept_request_is_as_large_as_its_prompt_and_its_output() -> None:
    desk = Desk()
    submit = desk.owner.find(RequestId("r"))
    assert submit is not None
    request = OwnedRequest(submit, 0.0)
    empty = request.size_bytes
    outputs = TokenOutputs(count=2, token_ids=pack_ids([5, 6]), logprobs=bytes(8))
    row = TextRow(
        request_id=RequestId("r"),
        choice=0,
        attempt=ATTEMPT,
        text_offset=0,
        text="ab",
        tokens=2,
        ids=pack_ids([5, 6]),
        details=TokenOutputsChunk(offset=desk.offset, details=outputs),
    )
    assert list(request.apply(row))
    assert request.size_bytes == empty + 8 + 16
