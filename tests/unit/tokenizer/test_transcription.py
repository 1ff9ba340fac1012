"""Prompts of transcriptions: what stands before the transcript, and what their pages depend on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.support.llava import write_tokenizer
from tests.support.whisper import MARKS

from antiphon.config.errors import ConfigError
from antiphon.model_card.audio import AudioCard, AudioFeatures
from antiphon.tokenizer.encoding import TextEncoder
from antiphon.tokenizer.model_tokenizer import read_model_tokenizer
from antiphon.tokenizer.transcription import Transcriber
from antiphon.wire.claim import AudioWindow
from antiphon.wire.codec import pack_ids, unpack_ids
from antiphon.wire.errors import EngineError, InvalidRequest, Unsupported
from antiphon.wire.ids import ModelName, RequestId
from antiphon.wire.media import MediumHeader
from antiphon.wire.namespaces import PageOrigin
from antiphon.wire.tokenize import EncodeRequest, TranscriptionPrompt

if TYPE_CHECKING:
    from pathlib import Path

    from antiphon.tokenizer.encoding import EncodedPrompt

CONTEXT_TOKENS = 448
CARD = AudioCard(source_tokens=1500, features=AudioFeatures(), suppressed=(3,))


class Prompts:
    def __init__(self, folder: Path, **card: Any) -> None:
        write_tokenizer(folder, [f"<|{name}|>" for name in MARKS], "")
        words = read_model_tokenizer(folder)
        self.transcriber = Transcriber.of(words.tokenizer, msgspec.structs.replace(CARD, **card))
        origin = PageOrigin(model_digest="m")
        self.encoder = TextEncoder(words, origin, 10**6, CONTEXT_TOKENS, self.transcriber)

    def encoded(
        self, before: str = "", *, digest: bytes = bytes(32), start_s: float = 0.0, **asked: Any
    ) -> EncodedPrompt | EngineError:
        window = AudioWindow(format="wav", start_s=start_s, seconds=90.0)
        header = MediumHeader(digest=digest, width=0, height=0, audio=window)
        request = EncodeRequest(
            request_id=RequestId("r"),
            model=ModelName("m"),
            prompt=before,
            media=(header,),
            transcription=TranscriptionPrompt(**asked),
            deadline_unix_ms=0,
        )
        return self.encoder.encode([request])[0]

    def marks(self, before: str = "", **asked: Any) -> list[str]:
        """The tokens of a prompt, marks without their brackets."""
        made = self.encoded(before, **asked)
        if isinstance(made, EngineError):
            raise made
        names = map(self.transcriber.tokenizer.id_to_token, unpack_ids(made.token_ids))
        return [(name or "").strip("<|>") for name in names]


@pytest.fixture
def prompts(tmp_path: Path) -> Prompts:
    return Prompts(tmp_path)


def test_a_prompt_names_language_task_and_timestamps(prompts: Prompts) -> None:
    start = "startoftranscript"
    assert prompts.marks(language="de") == [start, "de", "transcribe", "notimestamps"]
    assert prompts.marks(language="en", translate=True, timestamps=True) == [
        *(start, "en", "translate"),
    ]
    assert prompts.marks("before") == [start], "the language is to be detected"


def test_text_before_is_text_and_its_end_fits_half_of_the_context(prompts: Prompts) -> None:
    made = prompts.marks("<|translate|><|endoftext|> Alba", language="en")
    assert made[0] == "startofprev"
    assert {"translate", "endoftext"} & set(made) == set()
    assert made[-4:] == ["startoftranscript", "en", "transcribe", "notimestamps"]
    long = prompts.marks("word " * 1000 + "end", language="en")
    assert len(long) == CONTEXT_TOKENS // 2 - 1 + 5
    assert prompts.marks("  ", language="en")[0] == "startoftranscript"


def test_a_model_of_english_alone_has_neither_language_nor_task(tmp_path: Path) -> None:
    prompts = Prompts(tmp_path, multilingual=False)
    assert prompts.transcriber.card.languages == ()
    assert prompts.marks() == prompts.marks(language="en") == ["startoftranscript", "notimestamps"]
    with pytest.raises(InvalidRequest, match="English alone"):
        prompts.marks(language="de")
    with pytest.raises(Unsupported, match="does not translate"):
        prompts.marks(translate=True)


def test_an_unknown_language_is_refused_with_those_that_are_known(prompts: Prompts) -> None:
    with pytest.raises(InvalidRequest, match="'xx' is not known to this model; known are en, de"):
        prompts.marks(language="xx")


def test_digests_depend_on_file_and_part(prompts: Prompts) -> None:
    text = "word " * 200
    found = set[bytes]()
    for digest, start_s in ((bytes(32), 0.0), (bytes(32), 30.0), (bytes([1]) * 32, 0.0)):
        made = prompts.encoded(text, digest=digest, start_s=start_s, language="en")
        assert not isinstance(made, EngineError)
        assert made.block_digests
        (span,) = made.media
        assert (span.tokens, span.rows) == (0, 1500)
        found.add(made.block_digests)
    assert len(found) == 3


def test_a_tokenizer_without_a_mark_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, [f"<|{name}|>" for name in MARKS if name != "notimestamps"], "")
    words = read_model_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=r"<\|notimestamps\|>"):
        Transcriber.of(words.tokenizer, CARD)


def test_an_output_ends_the_prompt_that_it_was_written_behind(prompts: Prompts) -> None:
    asked = {"language": "de", "timestamps": True}
    before = prompts.marks("Names.", **asked)
    ids = prompts.transcriber.tokenizer.encode(" One two", add_special_tokens=False).ids
    made = prompts.marks("Names.", output=pack_ids(ids), **asked)
    assert made[: len(before)] == before
    assert len(made) == len(before) + len(ids)
    plain = prompts.encoded(language="de", output=pack_ids(ids))
    assert not isinstance(plain, EngineError)
    assert list(unpack_ids(plain.token_ids))[-len(ids) :] == ids
