"""The output machine, event by event."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.support.worker import (
    DEADLINE,
    DETOKENIZER,
    GATEWAY,
    LEADER,
    WORKER,
    ColumnReader,
    FakeEngine,
    admit,
    attempt,
    process,
)

from antiphon.model_worker.batching.state import ChoiceKey, Finish
from antiphon.model_worker.batching.token_store import OutputIds
from antiphon.model_worker.protocol.commands import AttemptTombstones
from antiphon.model_worker.protocol.held_request import ROW_IDS_MAX, HeldChoice, HeldRequest
from antiphon.model_worker.protocol.outbox import BATCH_BYTES_MAX
from antiphon.model_worker.protocol.worker_output import (
    FORGOTTEN_AFTER_MS,
    FREED_AFTER_MS,
    OPEN_GRACE_MS,
    TOMBSTONE_MS,
    Action,
    DropChoice,
    DropPrompt,
    FetchPrompt,
    RunChoice,
    WorkerOutput,
)
from antiphon.service.sequence import SeqSender
from antiphon.wire.base import FinishReason, Process, Term
from antiphon.wire.claim import Claim, PromptClaim
from antiphon.wire.codec import encode, pack_ids, unpack_ids
from antiphon.wire.command import (
    Abort,
    ChoiceOutput,
    Command,
    CommandBatch,
    Rebind,
    ResendTokens,
    StopChoice,
    TokenCursor,
)
from antiphon.wire.errors import EngineError, Unavailable, WorkerLost, encode_error
from antiphon.wire.ids import InstanceId, RequestId
from antiphon.wire.media import Medium, MediumSpan
from antiphon.wire.sampling import SamplingParams, TokenOutputParams
from antiphon.wire.submit import OpenList, OpenRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from antiphon.model_worker.batching.plan import Ints
    from antiphon.wire.tokens import TokenRow


R = RequestId("r")
PROMPT = PromptClaim(
    claim=Claim(address="a:1", token="00", size_bytes=12, digest=bytes(32), expires_unix_ms=0)
)
FETCH = FetchPrompt(R, attempt(), PROMPT.claim, DEADLINE)
USURPER = Term(number=2, scheduler=process("a"))
LENGTH = Finish(reason=FinishReason.LENGTH)


class Bench:
    def __init__(self, *commands: Command, live_max: int = 8, leading: Term | None = None) -> None:
        self.leading = leading
        self.output = WorkerOutput(
            WORKER, SeqSender(), live_max=live_max, leading=lambda: self.leading
        )
        self.seq = 0
        self.engine = FakeEngine()
        self.readers: defaultdict[InstanceId, ColumnReader] = defaultdict(ColumnReader)
        if commands:
            self.command(*commands)

    def command(self, *commands: Command, now_ms: int = 0, leader: Term = LEADER) -> list[Action]:
        self.seq += 1
        return self.output.command(self.batch(*commands, leader=leader), now_ms)

    def batch(self, *commands: Command, leader: Term = LEADER) -> CommandBatch:
        return CommandBatch(
            leader=leader,
            worker=WORKER,
            seq=self.seq,
            commands=commands,
            not_after_unix_ms=100_000,
        )

    def step(self, key: int, ids: list[int], finish: Finish | None = None) -> None:
        self.output.step(1, [self.engine.progress(key, ids, finish)])

    def sample(self, tokens: Mapping[int, int], **fields: bool) -> None:
        """A step that adds one token to each of these choices."""
        self.output.step(1, [self.engine.sampled(tokens)], **fields)

    def rows(self) -> list[TokenRow]:
        """What is to be sent, with columns expanded."""
        return [row for to, batch in self.output.take() for row in self.readers[to].rows(batch)]

    @property
    def plain_count(self) -> int:
        """Rows that were sent in columns."""
        return sum(reader.plain_count for reader in self.readers.values())

    def open_list(
        self, *opened: str, closed: tuple[str, ...] = (), whole: bool = True, **fields: int
    ) -> OpenList:
        return OpenList(
            model="m",  # pyright: ignore[reportArgumentType]
            owner=GATEWAY,
            version=fields.get("version", 1),
            whole=whole,
            opened=tuple(
                OpenRequest(request_id=RequestId(name), deadline_unix_ms=DEADLINE)
                for name in opened
            ),
            closed=tuple(map(RequestId, closed)),
            not_after_unix_ms=100_000,
        )

    def stop(self, **fields: object) -> list[Action]:
        known = {"request_id": R, "attempt": attempt(), "detokenizer": DETOKENIZER}
        return self.output.stop(StopChoice(**known | fields))  # pyright: ignore[reportArgumentType]

    def resend(self, *places: TokenCursor, worker: Process = WORKER) -> list[Action]:
        message = ResendTokens(worker=worker, detokenizer=DETOKENIZER, places=places)
        return self.output.resend(message)


def place(offset: int, choice: int = 0) -> TokenCursor:
    return TokenCursor(request_id=R, choice=choice, offset=offset)


def test_an_admit_runs_each_choice_with_a_key_of_its_own() -> None:
    actions = Bench().command(admit(choices=2))
    runs = [action for action in actions if isinstance(action, RunChoice)]
    ids = pack_ids([1, 2, 3])
    choices = [(run.key, run.state.choice, run.state.prompt_ids) for run in runs]
    assert choices == [(1, 0, ids), (2, 1, ids)]


def test_the_first_row_introduces_the_request_and_later_ones_do_not() -> None:
    bench = Bench(admit(traceparent="t"))
    bench.step(1, [5])
    (first,) = bench.rows()
    bench.step(1, [6, 7], LENGTH)
    (second,) = bench.rows()
    assert first.stream is not None
    assert (first.stream.prompt_tokens, first.stream.owner) == (3, GATEWAY)
    assert second.stream is None
    assert (second.offset, list(unpack_ids(second.token_ids))) == (1, [6, 7])
    assert (first.finish_reason, second.finish_reason) == (None, FinishReason.LENGTH)


def test_batches_to_one_detokenizer_are_numbered_from_one() -> None:
    bench = Bench(admit())
    seqs: list[int] = []
    for _ in range(3):
        bench.step(1, [5])
        seqs += [batch.seq for _, batch in bench.output.take()]
    assert seqs == [1, 2, 3]
    assert bench.output.take() == []


def test_what_was_not_taken_for_steps_goes_as_one_row() -> None:
    bench = Bench(admit())
    for token in range(5):
        bench.step(1, [token])
    (row,) = bench.rows()
    assert list(unpack_ids(row.token_ids)) == [0, 1, 2, 3, 4]


def test_a_repeated_batch_and_a_repeated_admit_change_nothing() -> None:
    bench = Bench(admit())
    assert bench.output.command(bench.batch(admit(n=2)), 0) == []
    assert bench.command(admit()) == []
    assert bench.output.live_count == 1


@pytest.mark.parametrize(
    ("change", "now_ms"),
    [
        ({"worker": process("worker", "2")}, 0),
        ({"worker": process("another")}, 0),
        ({}, 100_001),
    ],
    ids=["another life", "another worker", "too late"],
)
def test_a_batch_that_is_not_for_us_or_not_for_now_is_ignored(
    change: dict[str, Process], now_ms: int
) -> None:
    bench = Bench()
    bench.seq = 1
    batch = msgspec.structs.replace(bench.batch(admit()), **change)
    assert bench.output.command(batch, now_ms) == []
    assert bench.output.commands.term is None


def test_a_lower_term_is_not_obeyed_and_a_higher_one_counts_its_batches_anew() -> None:
    bench = Bench()
    bench.command()
    bench.command(leader=USURPER)
    bench.seq = 0
    assert bench.command(admit()) == []
    assert len(bench.output.command(bench.batch(admit(), leader=USURPER), 0)) == 0
    bench.seq = 2
    assert len(bench.command(admit(), leader=USURPER)) == 1
    assert (bench.output.commands.term, bench.output.commands.seq) == (USURPER, 3)


@pytest.mark.parametrize("number", [2**32 + 1, 2**50, 2**62])
def test_a_new_worker_obeys_a_leader_whatever_its_number(number: int) -> None:
    bench = Bench()
    high = Term(number=number, scheduler=process("s"))
    assert len(bench.command(admit(), leader=high)) == 1
    assert bench.output.commands.term == high


@pytest.mark.parametrize(
    ("claimed", "known", "number"),
    [(None, LEADER, 2**32 + 2), (LEADER, None, 2**40)],
    ids=["of a worker with a term", "far above the claimed one"],
)
def test_commands_of_a_term_that_no_election_gives_are_refused_and_counted(
    claimed: Term | None, known: Term | None, number: int
) -> None:
    bench = Bench(leading=claimed)
    if known is not None:
        bench.command(leader=known)
    assert bench.command(admit(), leader=Term(number=number, scheduler=process("s"))) == []
    assert (bench.output.commands.term, bench.output.commands.unelected_count) == (known, 1)
    assert len(bench.command(admit())) == 1


@pytest.mark.parametrize("number", [2**33, 2**62])
def test_a_forged_term_is_forgotten_once_a_scheduler_claims_another(number: int) -> None:
    """It was commanded with before any scheduler led; no leader counts up to it."""
    bench = Bench()
    bench.command(leader=Term(number=number, scheduler=process("s")))
    bench.leading = LEADER
    assert len(bench.command(admit())) == 1
    assert bench.output.commands.term == LEADER


def test_a_forged_term_is_reported_no_longer_than_to_the_next_tick() -> None:
    bench = Bench()
    bench.command(leader=Term(number=2**62, scheduler=process("s")))
    bench.leading = LEADER
    bench.output.tick(0)
    assert bench.output.commands.term is None


def test_a_term_that_an_election_may_give_is_kept_until_it_is_surpassed() -> None:
    bench = Bench()
    bench.command(leader=USURPER)
    bench.leading = LEADER
    bench.output.tick(0)
    assert bench.command(admit()) == []
    assert bench.output.commands.term == USURPER


def test_prompt_that_is_elsewhere_is_fetched_before_its_choices_run() -> None:
    bench = Bench()
    assert bench.command(admit(choices=2, prompt_ids=b"", prompt=PROMPT)) == [FETCH]
    assert (bench.output.fetching_count, bench.output.unstarted(0)) == (2, [])
    fetched = bench.output.prompt_fetched(FETCH, pack_ids([4, 5, 6]))
    runs = [action for action in fetched if isinstance(action, RunChoice)]
    assert [run.state.prompt_ids for run in runs] == [pack_ids([4, 5, 6])] * 2
    assert bench.output.fetching_count == 0
    assert bench.output.prompt_fetched(FETCH, b"") == []
    bench.step(1, [7])
    (row,) = bench.rows()
    assert row.stream is not None
    assert row.stream.prompt_tokens == 3


def test_prompt_that_cannot_be_fetched_ends_its_request_with_the_reason() -> None:
    bench = Bench(admit(prompt_ids=b"", prompt=PROMPT))
    assert bench.output.prompt_failed(FETCH, Unavailable("gone")) == []
    (row,) = bench.rows()
    assert (row.finish_reason, row.error) == (FinishReason.ERROR, encode_error(Unavailable("gone")))
    assert not bench.output.live_count


@pytest.mark.parametrize("cause", ["abort", "owner_died", "closed", "deadline", "later attempt"])
def test_prompt_of_a_request_that_ends_meanwhile_is_not_fetched_any_more(cause: str) -> None:
    bench = Bench(admit(prompt_ids=b"", prompt=PROMPT))
    actions = {
        "abort": lambda: bench.command(Abort(request_id=R, attempt=attempt())),
        "owner_died": lambda: bench.output.owner_died(GATEWAY, 0),
        "closed": lambda: bench.output.open_list(bench.open_list(closed=("r",), whole=False), 1),
        "deadline": lambda: bench.output.tick(DEADLINE + FREED_AFTER_MS),
        "later attempt": lambda: bench.command(admit(n=2, prompt_ids=b"", prompt=PROMPT)),
    }[cause]()
    assert DropPrompt(R, attempt()) in actions
    assert bench.output.prompt_fetched(FETCH, pack_ids([4, 5, 6])) == []
    assert bench.output.fetching_count == (cause == "later attempt")


def test_a_higher_attempt_takes_the_place_of_a_lower_one() -> None:
    bench = Bench(admit())
    actions = bench.command(admit(n=2))
    assert actions[0] == DropChoice(ChoiceKey(1))
    assert isinstance(actions[1], RunChoice)
    assert bench.command(admit(n=1)) == []
    bench.step(1, [9])
    bench.step(2, [5])
    (row,) = bench.rows()
    assert (row.attempt, list(unpack_ids(row.token_ids))) == (attempt(2), [5])


def test_an_attempt_that_continues_sends_the_sealed_ids_again() -> None:
    bench = Bench()
    sealed = (ChoiceOutput(choice=0, output_ids=pack_ids([5, 6])),)
    again = msgspec.structs.replace(admit(n=2, continues=attempt(1)), choices=sealed)
    (run,) = bench.command(again)
    assert isinstance(run, RunChoice)
    bench.engine.begin(1, [5, 6])
    bench.step(1, [7])
    (row,) = bench.rows()
    assert (row.offset, list(unpack_ids(row.token_ids))) == (0, [5, 6, 7])
    assert row.stream is not None
    assert row.stream.continues == attempt(1)


def test_an_attempt_that_continues_what_has_ended_sends_it_at_once() -> None:
    ended = ChoiceOutput(choice=0, output_ids=pack_ids([5]), finish_reason=FinishReason.LENGTH)
    again = msgspec.structs.replace(admit(n=2, continues=attempt(1)), choices=(ended,))
    bench = Bench(again)
    (row,) = bench.rows()
    assert (row.offset, row.token_ids, row.finish_reason) == (0, pack_ids([5]), FinishReason.LENGTH)


def test_an_abort_of_the_owner_is_silent_and_leaves_a_tombstone() -> None:
    bench = Bench(admit())
    bench.step(1, [5])
    assert bench.command(Abort(request_id=R, attempt=attempt())) == [DropChoice(ChoiceKey(1))]
    assert bench.rows() == []
    assert bench.command(admit()) == []
    assert bench.output.held_count == 0


def test_an_abort_that_comes_before_its_admit_wins() -> None:
    bench = Bench(Abort(request_id=R, attempt=attempt(2)))
    assert bench.command(admit(n=1)) == []
    assert bench.command(admit(n=2)) == []
    assert len(bench.command(admit(n=3))) == 1


def test_an_abort_of_an_older_attempt_is_ignored() -> None:
    bench = Bench(admit(n=2))
    assert bench.command(Abort(request_id=R, attempt=attempt(1))) == []
    assert bench.output.live_count == 1


def test_an_abort_with_an_error_sends_it_after_all_tokens() -> None:
    bench = Bench(admit())
    bench.step(1, [5])
    error = encode_error(WorkerLost("gone"))
    drops = bench.command(Abort(request_id=R, attempt=attempt(), error=error))
    assert drops == [DropChoice(ChoiceKey(1))]
    (row,) = bench.rows()
    assert (row.finish_reason, row.error) == (FinishReason.ERROR, error)
    assert list(unpack_ids(row.token_ids)) == [5]


def test_a_stop_ends_the_choice_at_its_offset_and_counts_the_overrun() -> None:
    bench = Bench(admit(choices=2))
    bench.step(1, [5, 6, 7, 8])
    assert bench.stop(choice=0, offset=3) == [DropChoice(ChoiceKey(1), kept=3)]
    assert bench.output.overrun_tokens == 1
    bench.step(1, [9], LENGTH)
    bench.step(2, [5])
    assert [row.choice for row in bench.rows()] == [1]
    assert bench.output.held()[0].tokens == 4


def test_a_stop_without_a_choice_ends_them_all() -> None:
    bench = Bench(admit(choices=2))
    assert bench.stop() == [DropChoice(ChoiceKey(1)), DropChoice(ChoiceKey(2))]
    assert bench.output.held()[0].ended


@pytest.mark.parametrize(
    "fields",
    [{"attempt": attempt(2)}, {"detokenizer": process("e")}, {"request_id": RequestId("x")}],
    ids=["another attempt", "another detokenizer", "another request"],
)
def test_a_stop_that_is_not_ours_is_ignored(fields: dict[str, object]) -> None:
    bench = Bench(admit())
    assert bench.stop(**fields) == []


def test_a_resend_goes_from_the_named_offsets_and_from_zero_where_none_is_named() -> None:
    bench = Bench(admit(choices=2), admit("x"))
    for key in (1, 2, 3):
        bench.step(key, [5, 6, 7], LENGTH)
    before = bench.rows()
    bench.resend(place(2), place(3, choice=1))
    again = bench.rows()
    ends = [(row.offset, row.finish_reason) for row in again]
    assert ends == [(offset, FinishReason.LENGTH) for offset in (2, 3, 0)]
    assert [row.stream is not None for row in again] == [True, False, True]
    assert [row.stream is not None for row in before] == [True, False, True]


def test_each_attempt_names_the_process_of_its_detokenizer_and_what_it_continues() -> None:
    bench = Bench(admit(detokenizer_incarnation=DETOKENIZER.incarnation))
    bench.step(1, [5])
    successor = process(DETOKENIZER.instance, "next").incarnation
    for incarnation in (DETOKENIZER.incarnation, successor):
        (row,) = bench.rows()
        assert row.stream is not None
        assert row.stream.detokenizer_incarnation == incarnation
        assert row.stream.continued == ((0,) if row.stream.continues is None else (1,))
        (held,) = bench.output.held()
        assert held.detokenizer_incarnation == incarnation
        bench.command(
            Rebind(
                request_id=R,
                attempt=attempt(2),
                continues=attempt(1),
                detokenizer=DETOKENIZER.instance,
                detokenizer_incarnation=successor,
            )
        )


@pytest.mark.parametrize("cause", ["another detokenizer", "a restarted attempt there"])
def test_request_ends_once_token_outputs_of_it_are_lost_with_its_detokenizer(cause: str) -> None:
    """They were too large to be sent with its sealed output."""
    sampling = SamplingParams(max_new_tokens=8, details=TokenOutputParams(logprobs=True))
    output = ChoiceOutput(choice=0, output_ids=pack_ids([5, 6]))
    request = admit(sampling=sampling, detokenizer_incarnation=DETOKENIZER.incarnation)
    bench = Bench(msgspec.structs.replace(request, choices=(output,)))
    assert bench.rows() == []
    if cause == "another detokenizer":
        bench.command(
            Rebind(
                request_id=R,
                attempt=attempt(2),
                continues=attempt(1),
                detokenizer=DETOKENIZER.instance,
                detokenizer_incarnation=process(DETOKENIZER.instance, "next").incarnation,
            )
        )
    else:
        assert bench.resend(place(0)) == [DropChoice(ChoiceKey(1))]
    (row,) = bench.rows()
    assert (row.offset, row.token_ids, row.finish_reason) == (0, b"", FinishReason.ERROR)
    assert row.error is not None
    assert row.error.code == "worker_lost"


def test_a_resend_to_another_life_of_the_worker_or_of_another_detokenizer_is_ignored() -> None:
    bench = Bench(admit())
    bench.step(1, [5])
    bench.rows()
    bench.resend(worker=process("worker", "0"))
    bench.output.resend(ResendTokens(worker=WORKER, detokenizer=process("e")))
    assert bench.rows() == []


def test_what_the_owner_closed_is_forgotten_at_once_whether_it_runs_or_not() -> None:
    bench = Bench(admit(), admit("x"))
    bench.step(2, [5], LENGTH)
    closed = bench.open_list(closed=("r", "x"), whole=False)
    assert bench.output.open_list(closed, 1) == [DropChoice(ChoiceKey(1))]
    assert bench.output.held_count == 0


def test_what_runs_and_is_not_open_is_dropped_once_it_is_old_enough_to_be_listed() -> None:
    bench = Bench(admit(), admit("x"))
    young = bench.open_list("x", version=1)
    assert bench.output.open_list(young, OPEN_GRACE_MS - 1) == []
    old = bench.open_list("x", version=2)
    assert bench.output.open_list(old, OPEN_GRACE_MS) == [DropChoice(ChoiceKey(1))]
    assert [line.request_id for line in bench.output.held()] == ["x"]


def test_a_late_list_or_an_old_one_drops_nothing() -> None:
    bench = Bench(admit())
    bench.output.open_list(bench.open_list("r", version=5), OPEN_GRACE_MS)
    assert bench.output.open_list(bench.open_list(version=5), OPEN_GRACE_MS) == []
    assert bench.output.open_list(bench.open_list(version=6), 100_001) == []
    assert bench.output.held_count == 1


def test_an_end_that_is_still_open_two_lists_later_is_sent_again() -> None:
    bench = Bench(admit())
    bench.output.open_list(bench.open_list("r", version=1), 1)
    bench.step(1, [5], LENGTH)
    bench.rows()
    again: list[list[TokenRow]] = []
    for version in (2, 3, 4):
        bench.output.open_list(bench.open_list("r", version=version), 1)
        again.append(bench.rows())
    assert again[0] == []
    for rows in again[1:]:
        ((offset, ids, finish),) = [(r.offset, r.token_ids, r.finish_reason) for r in rows]
        assert (offset, ids, finish) == (1, b"", FinishReason.LENGTH)
        assert rows[0].stream is not None


def test_a_dead_owner_takes_its_requests_with_it() -> None:
    bench = Bench(admit())
    assert bench.output.owner_died(process("gateway", "0"), 0) == []
    assert bench.output.owner_died(GATEWAY, 0) == [DropChoice(ChoiceKey(1))]


def test_request_of_a_dead_owner_goes_on_for_its_window() -> None:
    bench = Bench(admit(resume_ms=5000))
    assert bench.output.owner_died(GATEWAY, 1000) == []
    assert bench.output.tick(5999) == []
    assert bench.output.tick(6000) == [DropChoice(ChoiceKey(1))]
    assert bench.output.held() == ()


def test_closed_request_that_can_be_resumed_waits_to_be_adopted() -> None:
    for closed in (("r",), ()):
        bench = Bench(admit(resume_ms=5000))
        message = bench.open_list(closed=closed, whole=not closed)
        assert bench.output.open_list(message, 2000) == []
        assert bench.output.tick(6999) == []
        assert bench.output.tick(7000) == [DropChoice(ChoiceKey(1))]
        assert bench.output.held() == ()


@pytest.mark.parametrize("closed", [False, True])
def test_request_is_sent_again_from_its_start_for_the_gateway_that_adopts_it(closed: bool) -> None:
    """The gateway that had it may be dead, or may have learned of that before the worker."""
    bench = Bench(admit(resume_ms=5000))
    bench.step(1, [5, 6])
    bench.rows()
    if closed:
        bench.output.open_list(bench.open_list(closed=("r",), whole=False), 1000)
    else:
        bench.output.owner_died(GATEWAY, 1000)
    other = process("gateway-1", "1")
    bench.command(
        Rebind(
            request_id=RequestId("r"),
            attempt=attempt(2),
            continues=attempt(1),
            detokenizer=DETOKENIZER.instance,
            detokenizer_incarnation=DETOKENIZER.incarnation,
            owner=other,
            deadline_unix_ms=70_000,
        )
    )
    (row,) = bench.rows()
    assert (row.offset, row.token_ids) == (0, pack_ids([5, 6]))
    assert row.stream is not None
    assert (row.stream.owner, row.stream.deadline_unix_ms) == (other, 70_000)
    assert bench.output.tick(9000) == []
    assert bench.output.owner_died(GATEWAY, 9000) == []


def test_media_of_a_request_are_at_the_gateway_that_has_adopted_it() -> None:
    """A rebind without media leaves them where they are, and so does one with another number."""
    before, after = medium("gateway-0:1"), medium("gateway-1:1")
    bench = Bench(admit(resume_ms=5000, media=(before,)))
    for n, media, known in ((2, (), before), (3, (after,), after), (4, (before,) * 2, after)):
        bench.command(
            Rebind(
                request_id=R,
                attempt=attempt(n),
                continues=attempt(n - 1),
                detokenizer=DETOKENIZER.instance,
                detokenizer_incarnation=DETOKENIZER.incarnation,
                media=media,
            )
        )
        held = bench.output.find(R)
        assert held is not None
        assert held.media == (known,)


def medium(address: str) -> Medium:
    claim = msgspec.structs.replace(PROMPT.claim, address=address)
    span = MediumSpan(start=0, tokens=1, key=bytes(32))
    return Medium(span=span, width=1, height=1, claim=claim)


def test_a_rebind_sends_nothing_of_what_was_stopped_whether_or_not_it_had_ended() -> None:
    """Its outputs are gone: its end alone would be that of an empty text."""
    bench = Bench(admit(choices=2))
    bench.step(1, [5], LENGTH)
    bench.step(2, [6])
    bench.output.stop(
        StopChoice(request_id=R, attempt=attempt(), detokenizer=DETOKENIZER, choice=None)
    )
    bench.rows()
    bench.command(
        Rebind(
            request_id=R,
            attempt=attempt(2),
            continues=attempt(1),
            detokenizer=DETOKENIZER.instance,
            detokenizer_incarnation=DETOKENIZER.incarnation,
        )
    )
    assert bench.rows() == []


def test_a_finished_request_keeps_its_ids_and_nothing_else() -> None:
    bench = Bench(admit())
    bench.step(1, [5], LENGTH)
    assert bench.output.live_count == 0
    assert bench.output.held()[0].ended


def test_a_request_is_freed_soon_after_its_deadline_and_forgotten_later() -> None:
    bench = Bench(admit())
    assert bench.output.tick(DEADLINE + FREED_AFTER_MS - 1) == []
    assert bench.output.tick(DEADLINE + FREED_AFTER_MS) == [DropChoice(ChoiceKey(1))]
    assert (bench.output.live_count, bench.output.held_count) == (0, 1)
    assert bench.output.tick(DEADLINE + FORGOTTEN_AFTER_MS) == []
    assert bench.output.held_count == 0


def test_a_tombstone_outlives_an_admit_that_is_under_way_and_not_much_more() -> None:
    tombstones = AttemptTombstones(kept_ms=TOMBSTONE_MS)
    now_ms = 10 * TOMBSTONE_MS
    tombstones.expire(now_ms)
    tombstones.add(R, attempt(n=2))
    tombstones.add(R, attempt(n=1))
    for _ in range(4):
        assert tombstones.covers(R, attempt(n=2))
        assert not tombstones.covers(R, attempt(n=3))
        now_ms += TOMBSTONE_MS // 2
        tombstones.expire(now_ms)
    assert not tombstones._young
    assert not tombstones._old


def test_an_admit_past_its_deadline_does_not_run() -> None:
    assert Bench().command(admit(), now_ms=DEADLINE + FREED_AFTER_MS) == []


@pytest.mark.parametrize(
    ("owner", "name", "draining"),
    [
        (HeldRequest, "__init__", False),
        (WorkerOutput, "_requeue", True),
        (HeldChoice, "stop", False),
    ],
)
def test_what_a_failed_readmission_replaces_is_dropped_all_the_same(
    owner: type, name: str, draining: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the loop runs it for ever, and no request is heard of that it belongs to."""

    def fail(*_: object) -> None:
        raise AssertionError("a bug, on purpose")

    bench = Bench(admit(choices=2))
    bench.output.draining = draining
    monkeypatch.setattr(owner, name, fail)
    actions = bench.command(admit(n=2, choices=2))
    assert {DropChoice(ChoiceKey(1)), DropChoice(ChoiceKey(2))} <= set(actions)
    live = [action.key for action in actions if isinstance(action, RunChoice)]
    assert bench.output.live_count == len(live)


def test_a_failed_abort_with_an_error_drops_each_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(admit(choices=2))
    real, refused = WorkerOutput.refuse, list[ChoiceKey]()

    def refuse(output: WorkerOutput, key: ChoiceKey, error: EngineError) -> None:
        refused.append(key)
        if len(refused) == 2:
            raise AssertionError("a bug, on purpose")
        real(output, key, error)

    monkeypatch.setattr(WorkerOutput, "refuse", refuse)
    lost = encode_error(WorkerLost("gone"))
    actions = bench.command(Abort(request_id=R, attempt=attempt(), error=lost))
    assert {DropChoice(ChoiceKey(1)), DropChoice(ChoiceKey(2))} <= set(actions)
    assert bench.output.live_count == 0


def test_what_cannot_be_given_back_ends_and_what_is_beside_it_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(admit("a"), admit("b"))
    real = WorkerOutput._requeue

    def give_back(output: WorkerOutput, held: HeldRequest) -> None:
        if held.request_id == "a":
            raise AssertionError("a bug, on purpose")
        real(output, held)

    monkeypatch.setattr(WorkerOutput, "_requeue", give_back)
    actions = bench.output.requeued([ChoiceKey(1), ChoiceKey(2)])
    assert set(actions) == {DropChoice(ChoiceKey(1)), DropChoice(ChoiceKey(2))}
    assert given_back(bench) == ["b"]
    (row,) = bench.rows()
    assert (row.request_id, row.finish_reason) == ("a", FinishReason.ERROR)


def test_a_request_whose_last_row_cannot_be_made_ends_where_it_was_sent_up_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(admit(choices=2))
    bench.step(1, [5])
    bench.step(2, [6])
    bench.rows()
    bench.step(1, [7], LENGTH)
    bench.step(2, [8, 9], LENGTH)
    real, broken = OutputIds.read, bench.engine.outputs(2)

    def read(outputs: OutputIds, start: int, end: int) -> Ints:
        assert outputs is not broken, "a bug, on purpose"
        return real(outputs, start, end)

    monkeypatch.setattr(OutputIds, "read", read)
    (whole,) = bench.rows()
    assert (whole.choice, whole.offset, whole.finish_reason) == (0, 1, FinishReason.LENGTH)
    (failed,) = bench.rows()
    assert (failed.choice, failed.offset, failed.token_ids) == (1, 1, b"")
    assert failed.error is not None
    assert failed.error.code == "internal"
    bench.resend(place(2), place(0, choice=1))  # as after a restart, for a token that was sent
    (whole,) = bench.rows()
    assert (whole.choice, whole.finish_reason) == (0, FinishReason.LENGTH)
    (failed,) = bench.rows()
    assert (failed.choice, failed.offset, failed.finish_reason) == (1, 0, FinishReason.ERROR)
    assert not bench.output.has_unsent
    assert not bench.output.has_actions, "the loop has ended both choices before"


def given_back(bench: Bench) -> list[str]:
    return [held.request_id for held in bench.output.held() if held.returned]


@pytest.mark.parametrize("draining", [False, True], ids=["full", "draining"])
def test_a_full_or_draining_worker_gives_back_what_it_is_given(draining: bool) -> None:
    bench = Bench(admit("a"), live_max=8 if draining else 1)
    bench.output.draining = draining
    bench.command(admit("b"))
    assert bench.rows() == []
    assert given_back(bench) == ["b"]
    assert bench.output.live_count == 1
    held = [(line.ended, line.waiting) for line in bench.output.held()]
    assert held == [(False, True), (True, True)]


def test_what_has_begun_is_never_asked_back() -> None:
    bench = Bench(admit("a"), admit("b", choices=2))
    assert bench.output.unstarted(0) == [(ChoiceKey(1),), (ChoiceKey(2), ChoiceKey(3))]
    assert bench.output.unstarted(-1) == []
    bench.output.started([ChoiceKey(3)])
    assert bench.output.unstarted(0) == [(ChoiceKey(1),)]
    assert [held.waiting for held in bench.output.held()] == [True, False]


def test_what_is_too_long_for_others_is_not_asked_back() -> None:
    bench = Bench(admit("a"), admit("b", choices=2))
    assert bench.output.unstarted(0, 10) == []
    assert len(bench.output.unstarted(0, 11)) == 2


def test_the_time_that_a_request_has_waited_goes_to_the_loop() -> None:
    (run,) = Bench().command(admit(waited_ms=1_500))
    assert isinstance(run, RunChoice)
    assert run.state.waited_ms == 1_500


def test_what_the_loop_has_given_up_sends_nothing_and_is_reported_until_it_is_aborted() -> None:
    bench = Bench(admit("a", choices=2))
    bench.output.requeued([ChoiceKey(1), ChoiceKey(2)])
    bench.step(1, [5], LENGTH)
    assert bench.rows() == []
    assert given_back(bench) == ["a"]
    assert bench.output.live_count == 0
    assert bench.command(admit("a")) == [], "the same attempt ran after all"
    bench.command(Abort(request_id=RequestId("a"), attempt=attempt()))
    assert bench.output.held() == ()


def test_what_was_given_back_may_come_again_as_another_attempt() -> None:
    bench = Bench(admit())
    bench.output.requeued([ChoiceKey(1)])
    runs = bench.command(admit(n=2))
    assert [type(action) for action in runs] == [RunChoice]
    assert given_back(bench) == []


def test_a_long_replay_is_cut_into_batches_of_bounded_size() -> None:
    bench = Bench(admit())
    ids = [token % 100 for token in range(3 * ROW_IDS_MAX + 1)]
    bench.step(1, ids, LENGTH)
    batches = [batch for _, batch in bench.output.take()]
    rows = [row for batch in batches for row in batch.rows]
    assert [token for row in rows for token in unpack_ids(row.token_ids)] == ids
    assert [row.offset for row in rows] == [0, ROW_IDS_MAX, 2 * ROW_IDS_MAX, 3 * ROW_IDS_MAX]
    assert [row.finish_reason is not None for row in rows] == [False, False, False, True]
    assert len(batches) > 1
    assert max(len(encode(batch)) for batch in batches) < BATCH_BYTES_MAX


def sampling(count: int) -> Bench:
    """A machine with so many requests, each with one token that was sent."""
    bench = Bench(*(admit(f"r{n + 1}") for n in range(count)), live_max=max(8, count))
    bench.output.step(1, [bench.engine.progress(n + 1, [7]) for n in range(count)])
    bench.rows()
    return bench


def test_sampled_tokens_are_sent_in_columns_of_one_small_message() -> None:
    bench = sampling(1000)
    for number in (2, 3):
        bench.sample({n + 1: 2**31 - 1 for n in range(1000)})
        ((to, batch),) = bench.output.take()
        assert batch.rows == ()
        assert len(encode(batch)) < 20 * 1000 + 200
        rows = bench.readers[to].rows(batch)
        assert {row.offset for row in rows} == {number - 1}
        assert [row.request_id for row in rows] == [f"r{n + 1}" for n in range(1000)]


def test_a_detokenizer_that_does_not_read_columns_is_sent_rows() -> None:
    bench = Bench(admit(columns=False))
    bench.step(1, [7])
    assert [row.stream_number for row in bench.rows()] == [None]
    for number in (1, 2, 3):
        bench.sample({1: 8})
        assert [row.offset for row in bench.rows()] == [number]
    assert bench.plain_count == 0


def test_each_detokenizer_is_sent_the_columns_of_its_own_choices() -> None:
    there = InstanceId("there")
    bench = Bench(admit("a"), admit("b", detokenizer=there), admit("c"))
    bench.output.step(1, [bench.engine.progress(key, [7]) for key in (1, 2, 3)])
    bench.rows()
    bench.sample({3: 30, 2: 20, 1: 10})
    sent = {
        to: [(row.request_id, *unpack_ids(row.token_ids)) for row in bench.readers[to].rows(batch)]
        for to, batch in bench.output.take()
    }
    assert sent == {DETOKENIZER.instance: [("c", 30), ("a", 10)], there: [("b", 20)]}
    assert bench.plain_count == 3


def test_tokens_sent_in_columns_count_for_heartbeats_stops_and_resends() -> None:
    bench = sampling(2)
    for _ in range(4):
        bench.sample({1: 8, 2: 8})
        bench.rows()
    assert bench.plain_count == 8
    assert [line.tokens for line in bench.output.held()] == [5, 5]
    bench.sample({1: 8, 2: 8})
    bench.rows()
    (drop,) = bench.stop(request_id=RequestId("r1"), choice=0, offset=2)
    assert isinstance(drop, DropChoice)
    assert bench.output.overrun_tokens == 4
    bench.sample({1: 8, 2: 8})  # sampled before the engine knew of the stop
    (row,) = bench.rows()
    assert (row.request_id, row.offset) == ("r2", 6)
    bench.resend()
    bench.sample({2: 8})
    (row,) = bench.rows()
    assert (row.offset, len(unpack_ids(row.token_ids))) == (0, 8)
    assert row.stream is not None
    assert row.stream_number == 2


def test_a_stream_is_introduced_again_after_a_resend_that_lacks_nothing() -> None:
    bench = sampling(1)
    bench.output.resend(
        ResendTokens(
            worker=WORKER,
            detokenizer=DETOKENIZER,
            places=(TokenCursor(request_id=RequestId("r1"), choice=0, offset=1),),
        )
    )
    assert bench.rows() == []
    bench.sample({1: 8})
    (row,) = bench.rows()
    assert (row.offset, row.stream is not None, row.stream_number) == (1, True, 1)
    bench.sample({1: 8})
    assert [row.offset for row in bench.rows()] == [2]
    assert bench.plain_count == 1


def test_tokens_do_not_overtake_those_that_an_outage_left_unsent() -> None:
    bench = sampling(1)
    bench.sample({1: 6}, link_up=False)
    bench.sample({1: 7})
    (row,) = bench.rows()
    assert (row.offset, list(unpack_ids(row.token_ids))) == (1, [6, 7])
    assert bench.plain_count == 0
    bench.sample({1: 8})
    bench.rows()
    assert bench.plain_count == 1


def test_columns_that_wait_are_sent_before_the_rows_that_follow_on_them() -> None:
    bench = sampling(2)
    bench.sample({1: 6, 2: 6})
    bench.sample({1: 7, 2: 7})
    bench.step(1, [8], LENGTH)
    (_, first), (_, second) = bench.output.take()
    assert [len(batch.columns or ()) for batch in (first, second)] == [2, 2]
    assert [[row.offset for row in batch.rows] for batch in (first, second)] == [[], [3]]
    assert [first.seq, second.seq] == [2, 3]


def test_columns_that_wait_are_not_sent_beside_a_resend_of_their_tokens() -> None:
    bench = sampling(1)
    bench.sample({1: 6})
    bench.resend()
    ((_, batch),) = bench.output.take()
    assert batch.columns is None
    assert [list(unpack_ids(row.token_ids)) for row in batch.rows] == [[7, 6]]


def test_a_slot_that_another_choice_takes_over_says_nothing_of_the_one_before() -> None:
    bench = sampling(2)
    bench.sample({1: 6, 2: 6})
    bench.rows()
    bench.command(admit("r3"))
    bench.engine.retract(1)
    bench.output.step(3, [bench.engine.progress(3, [5])])  # in the slot of the first
    bench.rows()
    bench.sample({3: 6, 2: 7})
    bench.rows()
    assert [line.tokens for line in bench.output.held()] == [2, 3, 2]
    bench.output.step(4, [bench.engine.progress(1, [7], retractions=1)])
    (row,) = bench.rows()
    assert (row.request_id, row.offset, row.retractions) == ("r1", 2, 1)
    bench.sample({1: 8, 2: 8, 3: 8})
    assert [(row.request_id, row.offset) for row in bench.rows()] == [
        ("r1", 3),
        ("r2", 3),
        ("r3", 2),
    ]
