"""What a request may wish of its logits and its details, and what is refused before it runs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.support.worker import state
from tests.unit.model_worker.steps import LIMITS

from antiphon.model_worker.batching.admission import check
from antiphon.wire.codec import pack_ids
from antiphon.wire.errors import InvalidRequest, Unsupported
from antiphon.wire.processors import AllowRange, DisallowTokens, ThinkingBudget
from antiphon.wire.sampling import LogitBias, TokenOutputParams
from antiphon.wire.token_outputs import pack_floats

VOCABULARY = LIMITS.vocab_size
INFINITE = float("inf")


def bias(*values: tuple[int, float]) -> LogitBias:
    return LogitBias(
        token_ids=pack_ids([token for token, _ in values]),
        values=pack_floats([value for _, value in values]),
    )


def test_what_makes_sense_is_let_in() -> None:
    wishes: dict[str, Any] = {
        "logit_bias": bias((0, -100.0), (VOCABULARY - 1, 5.0)),
        "processors": (
            DisallowTokens(token_ids=(0, VOCABULARY - 1)),
            AllowRange(first=VOCABULARY - 1, last=10 * VOCABULARY),
            ThinkingBudget(tokens_max=0, begin_id=4, closing_ids=(5,)),
        ),
        "stop_token_ids": (0, VOCABULARY - 1),
        "details": TokenOutputParams(
            logprobs=True, top=VOCABULARY + 1, named_ids=(VOCABULARY - 1,)
        ),
    }
    check(state(**wishes), LIMITS)


@pytest.mark.parametrize(
    ("wish", "param"),
    [
        ({"logit_bias": bias((VOCABULARY, 1.0))}, "logit_bias"),
        ({"logit_bias": bias((-1, 1.0))}, "logit_bias"),
        ({"logit_bias": bias((4, 1.0), (4, 2.0))}, "logit_bias"),
        ({"logit_bias": bias((4, INFINITE))}, "logit_bias"),
        ({"logit_bias": bias((4, INFINITE - INFINITE))}, "logit_bias"),
        ({"logit_bias": LogitBias(token_ids=pack_ids([1, 2]), values=b"1234")}, "logit_bias"),
        ({"logit_bias": LogitBias(token_ids=b"123", values=b"123")}, "logit_bias"),
        ({"processors": (DisallowTokens(token_ids=(VOCABULARY,)),)}, "processors"),
        ({"processors": (AllowRange(first=VOCABULARY, last=199),)}, "processors"),
        (
            {"processors": (ThinkingBudget(tokens_max=1, begin_id=1, closing_ids=(1, 100)),)},
            "processors",
        ),
        ({"stop_token_ids": (VOCABULARY,)}, "stop_token_ids"),
        ({"details": TokenOutputParams(named_ids=(VOCABULARY,))}, "details.named_ids"),
    ],
)
def test_what_cannot_be_is_refused(wish: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check(state(**wish), LIMITS)
    assert refused.value.param == param


def test_hidden_states_are_told_only_where_the_operator_allows_it() -> None:
    asking = state(details=TokenOutputParams(hidden=True))
    with pytest.raises(Unsupported, match=r"batching\.hidden_states"):
        check(asking, LIMITS)
    check(asking, msgspec.structs.replace(LIMITS, hidden_states=True))
