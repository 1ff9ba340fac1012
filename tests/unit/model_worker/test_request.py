"""A request that goes on by a token is where `accept` and `progress` would have brought it."""

from __future__ import annotations

import pytest

from antiphon.model_worker.batching.request import ChoiceKey, Request, RequestState
from antiphon.wire.codec import pack_ids
from antiphon.wire.details import TokenDetails
from antiphon.wire.ids import RequestId
from antiphon.wire.sampling import SamplingParams

END = 1


def request(outputs: tuple[int, ...] = (5,), emitted: int = 1) -> Request:
    state = RequestState(
        request_id=RequestId("r"),
        choice=0,
        prompt_ids=pack_ids([7, 8]),
        output_ids=pack_ids(outputs),
        emitted=emitted,
        sampling=SamplingParams(max_new_tokens=4),
        deadline_unix_ms=0,
    )
    return Request(
        ChoiceKey(1),
        state,
        arrival=0,
        queued_s=0.0,
        outputs_max=4,
        end_ids=frozenset({END}),
        place=(0.0, 0.0, 0),
    )


@pytest.mark.parametrize("token", [0, 5, 70_000, 2**31 - 1])
def test_a_token_that_ends_nothing_is_told_at_once(token: int) -> None:
    one, other = request(), request()
    other.accept([token])
    assert one.go_on(token, "w") == other.progress("w")
    assert one.snapshot() == other.snapshot()
    assert one.go_on(token, "w") == other.go_on(token, "w") is not None


@pytest.mark.parametrize(
    ("waiting", "token"),
    [
        pytest.param(request(), END, id="the model's end"),
        pytest.param(request((5, 6, 7), 3), 5, id="the last token"),
        pytest.param(request((5, 6), 1), 5, id="something is untold"),
    ],
)
def test_anything_else_is_left_as_it_is(waiting: Request, token: int) -> None:
    before = waiting.snapshot()
    assert waiting.go_on(token, "w") is None
    assert waiting.snapshot() == before
    assert waiting.finish is None


def test_what_is_to_be_told_of_a_token_is_not_left_behind() -> None:
    waiting = request()
    waiting.tell(TokenDetails(count=1), prompt_entries=0)
    assert waiting.go_on(5, "w") is None
