"""The masks let through what Python decodes, at every cut."""

from __future__ import annotations

import codecs

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.model_worker.grammar.xgrammar_backend import START, Utf8

BYTES = Utf8([b"", *(bytes([byte]) for byte in range(256))])


def allows(state: int, token: int) -> bool:
    return bool(BYTES.masks[state][token // 32] >> token % 32 & 1)


def wellformed(text: bytes) -> bool:
    """Whether a text is the beginning of one that decodes."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(text)
    except UnicodeDecodeError:
        return False
    # Python takes half of a surrogate for something that is still to come.
    return not (len(text) > 1 and text[-2] == 0xED and text[-1] >= 0xA0)


@given(st.text(max_size=8).map(str.encode), st.binary(max_size=3))
def test_a_byte_is_allowed_if_and_only_if_the_text_can_still_become_well_formed(
    text: bytes, rest: bytes
) -> None:
    state, said = START, b""
    for byte in text + rest:
        assert allows(state, 1 + byte) == wellformed(said + bytes([byte]))
        if not allows(state, 1 + byte):
            return
        state = BYTES.after(state, 1 + byte)
        said += bytes([byte])
        assert (state == START) == wellformed(said + b"a")
        assert allows(state, 0) == (state == START), "an answer ended within a character"


@pytest.mark.parametrize(
    "text",
    [
        b"\xed\xa0\x80",
        b"\xf0\x8f\xbf\xbf",
        b"\xe0\x9f\xbf",
        b"\xc0\x80",
        b"\xf4\x90\x80\x80",
        b"\x80",
    ],
    ids=["surrogate", "long four", "long three", "long two", "beyond", "stray"],
)
def test_what_no_character_is_made_of_is_forbidden_in_one_token_and_in_several(text: bytes) -> None:
    whole = Utf8([text, b"a" + text, text[:1], b"ok"])
    assert whole.masks[START].tolist() == [0b1000 | (wellformed(text[:1]) << 2)]


@given(
    st.lists(st.text(max_size=4).map(str.encode) | st.binary(max_size=4), min_size=1, max_size=40)
)
def test_a_token_is_allowed_as_its_bytes_are(tokens: list[bytes]) -> None:
    utf8 = Utf8(tokens)
    for text in (b"", b"\xc3", b"\xe4\xb8", b"\xed", b"\xf0\x9f"):
        state = START
        for byte in text:
            state = BYTES.after(state, 1 + byte)
        bits = np.unpackbits(utf8.masks[state].view(np.uint8), bitorder="little")
        for token, written in enumerate(tokens):
            fits = wellformed(text + written) if written else state == START
            assert bits[token] == fits
