"""Text is a pure function of the ids, whole characters only."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from antiphon import embedded
from antiphon.detokenizer.incremental import HELD_TOKENS_MAX, Decode, IncrementalDecoder
from antiphon.model_card.tokenizer_file import open_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence


def decode_bytes(ids: Sequence[int], skip_special_tokens: bool) -> str:
    """A vocabulary of the 256 bytes, and 256 for a special token."""
    kept = [i for i in ids if i < 256] if skip_special_tokens else list(ids)
    return b"".join(bytes([i]) if i < 256 else b"<end>" for i in kept).decode(errors="replace")


def write(ids: Sequence[int], *, skip: bool = True, decode: Decode = decode_bytes) -> list[str]:
    """The pieces of text that come with each id, and at the end."""
    decoder = IncrementalDecoder(decode, skip)
    return [*(decoder.push(i) for i in ids), decoder.flush()]


def test_half_a_character_is_held_back():
    assert write("né".encode()) == ["n", "", "é", ""]


def test_half_a_character_at_the_end_shows_as_a_replacement():
    assert write("é".encode()[:1]) == ["", "\ufffd"]


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


WORDS = ["▁Hello", "▁world", "ing", "!", "▁", "▁▁", "é", "<unk>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPECIAL = ["<s>", "</s>", "<|tool|>"]
EURO = [BYTES[byte] for byte in "€".encode()]


def with_special(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return tokenizer


def byte_level() -> Tokenizer:
    return with_special(open_tokenizer(embedded.path()))


def metaspace() -> Tokenizer:
    pieces = [(word, 0.0) for word in WORDS]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=len(WORDS) - 1))
    tokenizer.decoder = decoders.Metaspace()
    return with_special(tokenizer)


def byte_fallback() -> Tokenizer:
    vocabulary = {word: index for index, word in enumerate([*WORDS, *BYTES])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    steps = (decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse())
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return with_special(tokenizer)


def id_of(name: str, text: str) -> int:
    token = TOKENIZERS[name].token_to_id(text)
    assert token is not None, text
    return token


TOKENIZERS = {make.__name__: make() for make in (byte_level, metaspace, byte_fallback)}


def any_ids(name: str) -> st.SearchStrategy[list[int]]:
    """Any ids; of those that stand for bytes, such that they make characters."""
    tokenizer = TOKENIZERS[name]
    if name != "byte_fallback":
        plain = st.integers(0, tokenizer.get_vocab_size() - 1).map(lambda token: [token])
    else:
        # A whole U+FFFD looks like a character that is not whole yet: see `IncrementalDecoder`.
        characters = st.characters(codec="utf-8", exclude_characters="\N{REPLACEMENT CHARACTER}")
        spelled = characters.map(lambda text: [id_of(name, BYTES[byte]) for byte in text.encode()])
        plain = st.one_of(st.integers(0, len(WORDS) - 1).map(lambda token: [token]), spelled)
    special = st.sampled_from(SPECIAL).map(lambda text: [id_of(name, text)])
    runs = st.lists(st.one_of(plain, special), max_size=40)
    return runs.map(lambda some: [token for run in some for token in run])


def in_pieces(name: str, ids: list[int], *, skip: bool) -> list[str]:
    def decode(some: Sequence[int], skip_special_tokens: bool) -> str:
        return TOKENIZERS[name].decode(list(some), skip_special_tokens=skip_special_tokens)

    return write(ids, skip=skip, decode=decode)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_add_up_to_the_text_of_all_ids(name: str, skip: bool):
    tokenizer = TOKENIZERS[name]

    @given(any_ids(name))
    def add_up(ids: list[int]) -> None:
        assert "".join(in_pieces(name, ids, skip=skip)) == tokenizer.decode(
            ids, skip_special_tokens=skip
        )

    add_up()


@pytest.mark.parametrize(
    "tokens",
    [
        ["▁Hello", "▁world", "!"],
        ["▁Hello", *EURO, "▁world"],
        ["▁", "▁Hello", "▁", "▁world"],
        EURO,
    ],
)
def test_a_space_that_depends_on_its_neighbours_is_kept(tokens: list[str]):
    ids = [id_of("byte_fallback", token) for token in tokens]
    whole = TOKENIZERS["byte_fallback"].decode(ids)
    assert "".join(in_pieces("byte_fallback", ids, skip=True)) == whole


@pytest.mark.parametrize("name", ["metaspace", "byte_fallback"])
def test_a_skipped_special_token_leaves_the_space_behind_it(name: str):
    ids = [id_of(name, text) for text in ("▁Hello", "</s>", "<s>", "▁Hello")]
    assert in_pieces(name, ids, skip=True) == ["Hello", "", "", " Hello", ""]


@given(st.binary(max_size=64))
@example(b"\x80" * 40)
@example(b"\xe4" * 9 + b"\xb8\xad")
@example(b"\xe4\xb8" * 9)
def test_bytes_of_any_kind_add_up_to_their_text(data: bytes):
    assert "".join(write(data)) == data.decode(errors="replace")


def decoder_of(cuts: Sequence[bytes]) -> Decode:
    """Decodes a vocabulary of these bytes."""
    return lambda ids, _: b"".join(cuts[token] for token in ids).decode(errors="replace")


def test_text_whose_tokens_all_end_inside_a_character_comes_out_whole_and_in_time():
    text = "日本語を話す人" * 4
    data = text.encode()
    cuts = [data[:1], *(data[at : at + 3] for at in range(1, len(data), 3))]
    decoder = IncrementalDecoder(decoder_of(cuts), True)
    assert [decoder.push(token) for token in range(len(cuts))] == ["", *text]
    assert not decoder.has_pending


@given(st.lists(st.tuples(st.sampled_from("aé漢😀👍🏽"), st.integers(1, 5)), max_size=40))
@example([("漢", 3), ("😀", 3), ("👍", 1), ("🏽", 3), ("😀", 1), ("😀", 2)] * 3)
def test_characters_cut_anywhere_come_out_whole(drawn: list[tuple[str, int]]):
    data = "".join(character for character, _ in drawn).encode()
    cuts: list[bytes] = []
    for _, width in itertools.cycle(drawn or [("", 1)]):
        if not data:
            break
        cuts.append(data[:width])
        data = data[width:]
    pieces = write(range(len(cuts)), decode=decoder_of(cuts))
    assert not any("\ufffd" in piece for piece in pieces[:-1])
    assert "".join(pieces) == "".join(character for character, _ in drawn)


def test_half_a_character_before_many_skipped_tokens_stays_cheap_and_whole():
    widest = 0

    def decode(ids: Sequence[int], skip: bool) -> str:
        nonlocal widest
        widest = max(widest, len(ids))
        return decode_bytes(ids, skip)

    first, *rest = "é".encode()
    pieces = write([first, *[256] * 1000, *rest], decode=decode)
    assert pieces == [*[""] * 1001, "é", ""]
    assert widest <= 2 * HELD_TOKENS_MAX


def test_bytes_that_break_off_do_not_take_back_the_character_before():
    spelled = [id_of("byte_fallback", BYTES[byte]) for byte in "中".encode()]
    ids = [*spelled, spelled[0], id_of("byte_fallback", "▁world")]
    assert "".join(in_pieces("byte_fallback", ids, skip=True)) == "中\ufffd world"
