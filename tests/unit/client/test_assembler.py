"""Text is assembled once and in order, and docs/nats-client.md shows the messages that carry it."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from antiphon.client.client import BATCH, CALLS_MAX, EMBED_SILENCE_S
from antiphon.client.stream import NO_RESPONDERS_TIMEOUT_S, SILENCE_S, TextAssembler
from antiphon.wire.codec import decode, pack_ids
from antiphon.wire.generate import TEXTS_MAX, GenerateText
from antiphon.wire.ids import RequestId
from antiphon.wire.routes import CLIENT_TEXT, EMBED, GATEWAY_CONTROL, GENERATE, escape
from antiphon.wire.token_outputs import TokenOutputs, TokenOutputsChunk, join_chunks

MIXED = "aé日🙂" * 4
BYTES = len(MIXED.encode())
BORDERS = [len(MIXED[:at].encode()) for at in range(len(MIXED) + 1)]
FIRST, LAST = -3, 12


def piece(start: int, stop: int, begin: int, end: int) -> GenerateText:
    """Text from one border to another, with the details of so many tokens."""
    details = TokenOutputs(count=end - begin, token_ids=pack_ids(range(100 + begin, 100 + end)))
    return GenerateText(
        request_id=RequestId("r"),
        choice=0,
        text_offset=start,
        text=MIXED.encode()[start:stop].decode(),
        details=TokenOutputsChunk(offset=begin, details=details),
    )


BORDER = st.integers(0, len(MIXED)).map(BORDERS.__getitem__)
STRETCH = st.tuples(BORDER, BORDER).map(sorted)
TOKENS = st.tuples(st.integers(FIRST, LAST), st.integers(FIRST, LAST)).map(sorted)


@given(st.lists(st.tuples(STRETCH, TOKENS), max_size=30))
def test_text_and_details_are_given_out_once_and_in_order(pieces) -> None:
    placing, text = TextAssembler(FIRST), ""
    details: list[TokenOutputsChunk | None] = []
    for (start, stop), (first, end) in [*pieces, ((0, BYTES), (FIRST, LAST))]:
        have, known = placing.text_offset(0), placing.token_offset(0)
        new = placing.add(piece(start, stop, first, end))
        assert (new is None) == (start > have or first > known)
        if new is not None:
            assert new.text_offset == have
            text += new.text
            details.append(new.details)
        assert placing.text_offset(0) == len(text.encode())
    assert text == MIXED
    whole = join_chunks(details)
    assert whole is not None
    assert whole.offset == FIRST
    assert [detail.token_id for detail in whole.details.iter_tokens()] == list(
        range(100 + FIRST, 100 + LAST)
    )
    (place,) = placing.cursors
    assert (place.text_offset, place.token_offset) == (BYTES, LAST)


PAGE = (Path(__file__).parents[3] / "docs" / "nats-client.md").read_text(encoding="utf-8")


def test_the_examples_are_messages() -> None:
    blocks = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    examples = [one for block in blocks for one in re.split(r"\n(?=\{)", block.strip())]
    kinds = (
        *GENERATE.carries,
        *CLIENT_TEXT.carries,
        *GATEWAY_CONTROL.carries,
        *EMBED.carries,
        *EMBED.replies,
    )
    seen = {type(decode(example.encode(), kinds)) for example in examples}
    assert seen == set(kinds)


def test_the_figures_are_the_clients() -> None:
    assert f"after {SILENCE_S:g} seconds in which" in PAGE
    assert NO_RESPONDERS_TIMEOUT_S < 10, "it says a few seconds"
    assert f"At most {TEXTS_MAX}\ntexts go into a request" in PAGE
    assert (BATCH, CALLS_MAX, EMBED_SILENCE_S) == (16, 4, 60.0)
    assert f"`{escape('llama-3.1')}`" in PAGE
