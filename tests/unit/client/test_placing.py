from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from antiphon.client.stream import TextAssembler
from antiphon.wire.codec import pack_ids
from antiphon.wire.generate import GenerateText
from antiphon.wire.ids import RequestId
from antiphon.wire.token_outputs import TokenOutputs, TokenOutputsChunk, join_chunks

TEXT = "aé日🙂" * 4
BYTES = len(TEXT.encode())
BORDERS = [len(TEXT[:at].encode()) for at in range(len(TEXT) + 1)]
FIRST, LAST = -3, 12


def piece(start: int, stop: int, begin: int, end: int) -> GenerateText:
    """Text from one border to another, with the details of so many tokens."""
    details = TokenOutputs(count=end - begin, token_ids=pack_ids(range(100 + begin, 100 + end)))
    return GenerateText(
        request_id=RequestId("r"),
        choice=0,
        text_offset=start,
        text=TEXT.encode()[start:stop].decode(),
        details=TokenOutputsChunk(offset=begin, details=details),
    )


BORDER = st.integers(0, len(TEXT)).map(BORDERS.__getitem__)
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
    assert text == TEXT
    whole = join_chunks(details)
    assert whole is not None
    assert whole.offset == FIRST
    assert [detail.token_id for detail in whole.details.iter_tokens()] == list(
        range(100 + FIRST, 100 + LAST)
    )
    (place,) = placing.cursors
    assert (place.text_offset, place.token_offset) == (BYTES, LAST)
