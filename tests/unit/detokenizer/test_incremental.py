"""Text is a pure function of the ids, whole characters only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from antiphon.detokenizer.incremental import IncrementalDecoder

if TYPE_CHECKING:
    from collections.abc import Sequence


def decode_bytes(ids: Sequence[int], skip_special_tokens: bool) -> str:
    """A vocabulary of the 256 bytes, and 256 for a special token."""
    kept = [i for i in ids if i < 256] if skip_special_tokens else list(ids)
    return b"".join(bytes([i]) if i < 256 else b"<end>" for i in kept).decode(errors="replace")


def write(ids: Sequence[int], *, skip: bool = True) -> list[str]:
    decoder = IncrementalDecoder(decode_bytes, skip)
    return [*(decoder.push(i) for i in ids), decoder.flush()]


def test_half_a_character_is_held_back():
    assert write("né".encode()) == ["n", "", "é", ""]


def test_half_a_character_at_the_end_shows_as_a_replacement():
    assert write("é".encode()[:1]) == ["", "\ufffd"]


def test_bytes_that_are_never_a_character_come_out_in_the_end():
    assert "".join(write([0x80] * 40)).count("\ufffd") == 40


def test_special_tokens_are_left_out_or_shown_as_asked():
    assert "".join(write([97, 256, 98])) == "ab"
    assert "".join(write([97, 256, 98], skip=False)) == "a<end>b"


@given(st.text())
def test_valid_text_comes_out_whole(text: str):
    assert "".join(write(text.encode())) == text


@given(st.text(), st.text())
def test_no_piece_ends_inside_a_character(before: str, after: str):
    for piece in write((before + after).encode())[:-1]:
        assert not piece.endswith("\ufffd") or "\ufffd" in before + after


@pytest.fixture(scope="module")
def sentencepiece_like() -> Tokenizer:
    """A vocabulary whose words begin with a mark that stands for a space, dropped at the start."""
    words = ["▁Hello", "▁world", "!", "▁", "<0xE2>", "<0x82>", "<0xAC>"]
    tokenizer = Tokenizer(
        models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


@pytest.mark.parametrize("ids", [[0, 1, 2], [0, 4, 5, 6, 1], [3, 0, 3, 1], [4, 5, 6]])
def test_a_space_that_depends_on_its_neighbours_is_kept(
    sentencepiece_like: Tokenizer, ids: list[int]
):
    def decode(token_ids: Sequence[int], skip: bool) -> str:
        return sentencepiece_like.decode(list(token_ids), skip_special_tokens=skip)

    decoder = IncrementalDecoder(decode, True)
    text = "".join([*(decoder.push(i) for i in ids), decoder.flush()])
    assert text == sentencepiece_like.decode(ids)
