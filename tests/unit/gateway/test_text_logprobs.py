"""The likeliest tokens of a text completion, as clients of the older API read them."""

from __future__ import annotations

from antiphon.gateway.http.core.logprobs import text_logprobs
from antiphon.wire.codec import pack_ids
from antiphon.wire.token_outputs import TokenOutputs, TokenOutputsChunk, pack_floats


def test_the_likeliest_come_first_and_one_text_keeps_the_likelier() -> None:
    details = TokenOutputs(
        count=1,
        token_ids=pack_ids([3]),
        logprobs=pack_floats([-0.5]),
        top_ids=pack_ids([3, 1, 2]),
        top_logprobs=pack_floats([-0.5, -1.5, -2.5]),
    )
    piece = TokenOutputsChunk(offset=0, details=details, texts={1: "\ufffd", 2: "\ufffd", 3: "a"})
    told = text_logprobs(piece, 0)
    assert told is not None
    assert told.top_logprobs is not None
    (top,) = told.top_logprobs
    assert list((top or {}).items()) == [("a", -0.5), ("\ufffd", -1.5)]
