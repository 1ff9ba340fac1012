"""A stack that transcribes, by the OpenAI client, unmodified, against transformers."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import openai
import pytest
import torch
import transformers
from openai import AsyncOpenAI
from tests.support.wait import until
from tests.support.whisper import CONTEXT_TOKENS, RATE, WINDOW_S, encoded, tones, wav, write_whisper
from tests.system.stack import Stack, pages_in_use, read, serving, wait_until
from tokenizers import Tokenizer

from antiphon.encoder.audio import AudioPreprocessor
from antiphon.model_card.audio import read_audio
from antiphon.wire.claim import AudioWindow

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

SHORT = wav(tones(1.7, seed=3))
GREEDY = 1e-9
"""A temperature that is no other one where a text repeats itself, as those of this model do."""
PART_BYTES = 2 * RATE * WINDOW_S
LONG = wav(tones(2.5 * WINDOW_S, seed=4))


@dataclass(frozen=True)
class Transcribing:
    stack: Stack
    folder: Path

    @cached_property
    def reference(self) -> Any:
        made: Any = transformers.WhisperForConditionalGeneration.from_pretrained(self.folder)
        # Whisper has learned not to write timestamps where it is asked for none; this one has not.
        first = (self.tokenizer.token_to_id("<|notimestamps|>") or 0) + 1
        timestamps = range(first, self.tokenizer.get_vocab_size())
        made.generation_config.suppress_tokens += [*timestamps]
        return made.eval()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    def features(self, data: bytes, start_s: float = 0.0) -> torch.Tensor:
        card = read_audio(self.folder)
        assert card is not None
        window = AudioWindow(format="wav", start_s=start_s, seconds=len(data[44:]) / 2 / RATE)
        return torch.as_tensor(AudioPreprocessor(card.features).decoded(data, window))[None]

    def transcript(self, data: bytes, task: str = "transcribe", language: str = "en") -> str:
        """What transformers makes of a file that the model takes at once."""
        ids = self.reference.generate(
            self.features(data), language=language, task=task, do_sample=False
        )[0].tolist()
        return self.tokenizer.decode(ids, skip_special_tokens=True).strip()

    def language(self, data: bytes) -> str:
        found = self.reference.detect_language(input_features=self.features(data))
        mark: str = self.tokenizer.id_to_token(int(found[0])) or ""
        return {"<|en|>": "english", "<|de|>": "german"}[mark]

    @torch.inference_mode()
    def no_speech(self, data: bytes) -> float:
        """How likely transformers' model takes the first part of a file for silence."""
        begin, silence = map(self.tokenizer.token_to_id, ("<|startoftranscript|>", "<|nospeech|>"))
        ids = torch.tensor([[begin]])
        logits = self.reference(self.features(data), decoder_input_ids=ids).logits[0, -1]
        return float(logits.softmax(-1)[silence])

    def embedded(self) -> int:
        """Parts of files that the encoder has embedded."""
        return self._counted("request_e2e_latency_seconds_count")

    def fetched(self) -> int:
        """Files that the encoder has fetched."""
        return self._counted("fetch_seconds_count")

    def _counted(self, name: str) -> int:
        ports = json.loads(self.stack.get("/server_info"))["metrics_ports"]
        text = read(f"http://127.0.0.1:{ports['encoder-0']}/metrics")
        pattern = rf"^antiphon_encoder_{name}(?:{{[^}}]*}})? (\S+)$"
        return int(sum(map(float, re.findall(pattern, text, re.MULTILINE))))


@pytest.fixture(scope="module")
def transcribing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Transcribing]:
    folder = write_whisper(tmp_path_factory.mktemp("whisper"))
    with serving(
        *("--model-path", str(folder), "--served-model-name", "tiny", "--dtype", "float32"),
        *("--encoder-audio-seconds-max", "8", "--page-size", "16"),
    ) as stack:
        yield Transcribing(stack, folder)


@pytest.fixture
async def client(transcribing: Transcribing) -> Any:
    url = f"{transcribing.stack.url}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as made:
        yield made


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # the client's translations
async def test_transcripts_are_those_of_transformers(
    transcribing: Transcribing, client: AsyncOpenAI
) -> None:
    one, two = ("a.wav", SHORT), ("b.wav", wav(tones(0.6, seed=9)))
    files: list[Any] = [one, two, one]
    create: Any = client.audio.transcriptions.create
    wanted: dict[str, Any] = {"model": "tiny", "temperature": GREEDY}
    made = await asyncio.gather(*(create(file=f, language="en", **wanted) for f in files))
    expected = [transcribing.transcript(data) for _, data in files]
    assert [each.text for each in made] == expected
    assert len(expected[0]) > CONTEXT_TOKENS / 2
    assert expected[0] != expected[1]
    assert transcribing.embedded() == 2, "the same file is embedded once"
    translated = await client.audio.translations.create(file=one, **wanted)
    found = transcribing.language(SHORT)
    assert translated.text == transcribing.transcript(SHORT, "translate", found)


async def test_a_long_file_is_transcribed_in_parts(
    transcribing: Transcribing, client: AsyncOpenAI
) -> None:
    create: Any = client.audio.transcriptions.create
    wanted: dict[str, Any] = {"file": ("a.wav", LONG), "model": "tiny", "temperature": GREEDY}
    before = transcribing.embedded(), transcribing.fetched()
    whole = await create(**wanted, response_format="verbose_json")
    worked = transcribing.embedded() - before[0], transcribing.fetched() - before[1]
    assert worked == (len({each.seek for each in whole.segments}), 1), "parts, and files"
    assert whole.language == transcribing.language(LONG)
    assert whole.duration == 2.5 * WINDOW_S
    starts = [each.start for each in whole.segments]
    assert starts == sorted(starts)
    seeks = sorted({each.seek for each in whole.segments})
    assert len(seeks) >= 3
    assert all(100 <= later - each <= 100 * WINDOW_S for each, later in pairwise(seeks))
    assert "".join(each.text for each in whole.segments).strip() == whole.text
    assert whole.segments[0].no_speech_prob == pytest.approx(transcribing.no_speech(LONG), rel=1e-3)
    subtitles = await create(**wanted, response_format="srt")
    assert subtitles.count("-->") == len(whole.segments)
    plain = await create(**wanted)
    assert plain.text == whole.text
    stream = await create(**wanted, language="en", stream=True)
    events = [event async for event in stream]
    assert [event.type for event in events[:-1]] == ["transcript.text.delta"] * (len(events) - 1)
    assert events[-1].type == "transcript.text.done"
    deltas = "".join(event.delta for event in events[:-1])
    assert deltas.strip() == events[-1].text
    first = await create(**wanted | {"file": ("a.wav", LONG[: 44 + PART_BYTES])}, language="en")
    assert events[-1].text.startswith(first.text)


@pytest.mark.long
@pytest.mark.parametrize("killed", ["encoder-0", "worker-0"])
async def test_files_outlive_their_encoder_and_their_worker(
    transcribing: Transcribing, client: AsyncOpenAI, killed: str
) -> None:
    """Killed within eight files of four parts each, whose texts are those of a second time."""
    seeds = range(100, 108) if killed == "encoder-0" else range(200, 208)
    files = [wav(tones(4.0 * WINDOW_S, seed=seed)) for seed in seeds]
    before, pid = transcribing.embedded(), transcribing.stack.pid(killed)
    create: Any = client.audio.transcriptions.create
    common = {"model": "tiny", "language": "en", "temperature": GREEDY}
    wanted = [{"file": ("a.wav", file), **common} for file in files]
    async with asyncio.TaskGroup() as group:
        first = [group.create_task(create(**each)) for each in wanted]
        await until(lambda: transcribing.embedded() > before + 2, 30)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    second = await asyncio.gather(*(create(**each) for each in wanted))
    assert [task.result().text for task in first] == [each.text for each in second]
    assert transcribing.stack.pid(killed) != pid


def _letters(text: str) -> str:
    """A text without what tokens of random models make of halves of characters."""
    return "".join(text.replace("\N{REPLACEMENT CHARACTER}", "").split())


async def test_words_of_a_file_have_times_in_their_order(
    transcribing: Transcribing, client: AsyncOpenAI
) -> None:
    create: Any = client.audio.transcriptions.create
    wanted: dict[str, Any] = {"file": ("a.wav", LONG), "model": "tiny", "temperature": GREEDY}
    whole = await create(
        **wanted,
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
    )
    assert _letters(" ".join(each.word for each in whole.words)) == _letters(whole.text)
    assert len(whole.words) > len(whole.segments)
    assert all(0 <= each.start <= each.end <= 2.5 * WINDOW_S for each in whole.words)
    starts = [each.start for each in whole.words]
    assert starts == sorted(starts)
    assert len({*starts}) > len(whole.segments)
    alone = await create(**wanted, response_format="verbose_json", timestamp_granularities=["word"])
    assert (alone.words, alone.segments) == (whole.words, None)


async def test_what_cannot_be_transcribed_is_refused(
    transcribing: Transcribing, client: AsyncOpenAI
) -> None:
    create: Any = client.audio.transcriptions.create
    cut = encoded(tones(1.7), "flac", "flac")[:200]
    adpcm = SHORT[:20] + b"\x02\x00" + SHORT[22:]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"file": ("a.wav", b"no audio")}, "not audio of a known format"),
        ({"file": ("a.wav", wav(tones(9.0)))}, "takes at least 9 s; the limit is 8 s"),
        ({"file": ("a.flac", cut)}, "audio"),
        ({"file": ("a.wav", adpcm)}, "codec adpcm_ms"),
        ({"file": ("a.wav", SHORT), "language": "xx"}, "'xx' is not known"),
    ]
    for fields, message in cases:
        call = create(**({"model": "tiny"} | fields))
        (refusal,) = await asyncio.gather(call, return_exceptions=True)
        assert isinstance(refusal, openai.BadRequestError), (message, refusal)
        assert message in str(refusal)
    hello: Any = [{"role": "user", "content": "hi"}]
    with pytest.raises(openai.BadRequestError, match="transcribes audio files"):
        await client.completions.create(model="tiny", prompt="hi")
    with pytest.raises(openai.BadRequestError):
        await client.chat.completions.create(model="tiny", messages=hello)
    with pytest.raises(openai.BadRequestError, match="embed"):
        await client.embeddings.create(model="tiny", input="hi")
    assert transcribing.stack.healthy()


def test_nothing_is_held_behind_the_last_request(transcribing: Transcribing) -> None:
    wait_until(lambda: pages_in_use(transcribing.stack) == 0, 10, "all pages are free")
    held = r"^antiphon_media_bytes(?:{[^}]*})? 0(?:\.0)?$"
    text = transcribing.stack.get("/metrics")
    assert re.search(held, text, re.MULTILINE), "files are held"
