"""Reads how a model takes audio: what its encoder sees, and what stands for it in prompts.

Read by the tokenizer, which writes the prompts, the worker, and the encoder; without torch.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta

from antiphon.config.errors import ConfigError
from antiphon.model_card.config_json import (
    AUDIO_PROMPT_ARCHITECTURES,
    TRANSCRIBING_ARCHITECTURES,
    parse_json,
    read_json,
)
from antiphon.model_card.processor_files import NESTING, PROCESSOR
from antiphon.wire.errors import InvalidRequest
from antiphon.wire.sampling import HEADS_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_Size = Annotated[int, Meta(ge=1, le=2**20)]
_Id = Annotated[int, Meta(ge=0, le=2**31 - 1)]
DOWNSAMPLED: Final = 2
"""Frames of features for each token of the encoder: its second convolution has this stride."""

_LANGUAGES: Final = (
    "en:english zh:chinese de:german es:spanish ru:russian ko:korean fr:french ja:japanese "
    "pt:portuguese tr:turkish pl:polish ca:catalan nl:dutch ar:arabic sv:swedish it:italian "
    "id:indonesian hi:hindi fi:finnish vi:vietnamese he:hebrew uk:ukrainian el:greek "
    "ms:malay cs:czech ro:romanian da:danish hu:hungarian ta:tamil no:norwegian th:thai "
    "ur:urdu hr:croatian bg:bulgarian lt:lithuanian la:latin mi:maori ml:malayalam cy:welsh "
    "sk:slovak te:telugu fa:persian lv:latvian bn:bengali sr:serbian az:azerbaijani "
    "sl:slovenian kn:kannada et:estonian mk:macedonian br:breton eu:basque is:icelandic "
    "hy:armenian ne:nepali mn:mongolian bs:bosnian kk:kazakh sq:albanian sw:swahili "
    "gl:galician mr:marathi pa:punjabi si:sinhala km:khmer sn:shona yo:yoruba so:somali "
    "af:afrikaans oc:occitan ka:georgian be:belarusian tg:tajik sd:sindhi gu:gujarati "
    "am:amharic yi:yiddish lo:lao uz:uzbek fo:faroese ht:haitian_creole ps:pashto tk:turkmen "
    "nn:nynorsk mt:maltese sa:sanskrit lb:luxembourgish my:myanmar bo:tibetan tl:tagalog "
    "mg:malagasy as:assamese tt:tatar haw:hawaiian ln:lingala ha:hausa ba:bashkir "
    "jw:javanese su:sundanese yue:cantonese"
)
LANGUAGES: Final[Mapping[str, str]] = {
    code: name for code, _, name in (pair.partition(":") for pair in _LANGUAGES.split())
}
"""Whisper's languages: their names, by the codes that its tokens have."""


class AudioFeatures(msgspec.Struct, frozen=True):
    """What becomes of samples, by preprocessor_config.json, with Whisper's defaults.

    Attributes:
        feature_size: Bands of the mel scale.
        chunk_length: Seconds that the encoder takes at once; shorter audio is padded.
    """

    feature_size: _Size = 80
    sampling_rate: _Size = 16000
    hop_length: _Size = 160
    chunk_length: _Size = 30
    n_fft: _Size = 400

    @property
    def samples(self) -> int:
        """Samples that the encoder takes at once."""
        return self.chunk_length * self.sampling_rate

    @property
    def frames(self) -> int:
        return self.samples // self.hop_length

    def frames_of(self, seconds: float) -> int:
        """Frames of audio of this duration, without those of the silence behind it."""
        return -(-round(seconds * self.sampling_rate) // self.hop_length)

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(msgspec.msgpack.encode(self)).digest()


class AudioCard(msgspec.Struct, frozen=True):
    """How a model transcribes audio.

    Attributes:
        source_tokens: What the encoder makes of `features.samples` samples.
        suppressed: Tokens that are never sampled.
        first_suppressed: Tokens that are not sampled first.
        first_timestamp_max: The latest timestamp that an output may begin with, in steps.
        multilingual: Whether prompts name a language and a task.
        alignment_heads: Layer and number of each head of cross attention whose weights say where a
            token is in the audio.
        filter_width: Tokens of the encoder over which these are smoothed by their median.
    """

    source_tokens: int
    features: AudioFeatures
    suppressed: tuple[int, ...] = ()
    first_suppressed: tuple[int, ...] = ()
    first_timestamp_max: int | None = None
    multilingual: bool = True
    alignment_heads: tuple[tuple[int, int], ...] = ()
    filter_width: int = 7

    @property
    def processing(self) -> bytes:
        """A digest of how samples become embeddings."""
        return self.features.digest

    @property
    def step_s(self) -> float:
        """Seconds from one timestamp to the next: there is one for each token of the encoder."""
        return self.features.chunk_length / self.source_tokens


class PromptAudio(msgspec.Struct, frozen=True):
    """How a model takes audio in a prompt: placeholders, as many as its duration asks for.

    Attributes:
        placeholder: Token id of the placeholder, one for each row of an embedding.
        features: What the encoder sees. It halves their frames twice.
    """

    placeholder: int
    features: AudioFeatures

    @property
    def processing(self) -> bytes:
        """A digest of how samples become embeddings."""
        return self.features.digest

    def rows(self, seconds: float) -> int:
        """Rows of audio of this duration.

        Raises:
            InvalidRequest: It is longer than what the model takes at once, or too short for a row.
        """
        frames, most = self.features.frames_of(seconds), self.features.frames
        if frames > most:
            raise InvalidRequest(
                f"the audio takes {seconds:g} s; this model takes {self.features.chunk_length} s"
            )
        if (rows := halved(frames) // DOWNSAMPLED) < 1:
            raise InvalidRequest(f"the audio takes {seconds:g} s, which is too short")
        return rows


def halved(frames: int) -> int:
    """What a convolution with a stride of 2 leaves of frames."""
    return -(-frames // DOWNSAMPLED)


class _TranscribingConfig(msgspec.Struct, frozen=True):
    max_source_positions: _Size = 1500
    num_mel_bins: _Size = 80
    decoder_layers: _Size = 4
    decoder_attention_heads: _Size = 6
    median_filter_width: Annotated[int, Meta(ge=1, le=255)] = 7
    suppress_tokens: tuple[_Id, ...] | None = None
    begin_suppress_tokens: tuple[_Id, ...] | None = None


class _TranscribingGeneration(msgspec.Struct, frozen=True):
    suppress_tokens: tuple[_Id, ...] | None = None
    begin_suppress_tokens: tuple[_Id, ...] | None = None
    max_initial_timestamp_index: _Id | None = None
    is_multilingual: bool | None = None
    alignment_heads: Annotated[tuple[tuple[_Id, _Id], ...], Meta(max_length=HEADS_MAX)] | None = (
        None
    )


class _FeatureNesting(msgspec.Struct, frozen=True):
    feature_extractor: msgspec.Raw = msgspec.Raw(b"null")


class _PromptTower(msgspec.Struct, frozen=True):
    max_source_positions: _Size = 1500
    num_mel_bins: _Size = 128


class _PromptConfig(msgspec.Struct, frozen=True):
    audio_token_index: _Id = 151646
    audio_config: _PromptTower = msgspec.field(default_factory=_PromptTower)


def read_prompt_audio(folder: Path) -> PromptAudio | None:
    """How the model of a folder takes audio in prompts; None if it does not.

    Raises:
        ConfigError: A file is malformed, or the encoder takes other features than these.
    """
    file = folder / "config.json"
    if not _is_one_of(file, AUDIO_PROMPT_ARCHITECTURES):
        return None
    config, features = read_json(file, _PromptConfig), _features(folder)
    _check_features(file, config.audio_config, features)
    return PromptAudio(config.audio_token_index, features)


def read_audio(folder: Path) -> AudioCard | None:
    """How the model of a folder transcribes audio; None if it does not.

    Raises:
        ConfigError: A file is malformed, or the encoder takes other features than these.
    """
    file = folder / "config.json"
    if not _is_one_of(file, TRANSCRIBING_ARCHITECTURES):
        return None
    config, features = read_json(file, _TranscribingConfig), _features(folder)
    _check_features(file, config, features)
    generation = _TranscribingGeneration()
    if (own := folder / "generation_config.json").is_file():
        generation = read_json(own, _TranscribingGeneration)
    return AudioCard(
        source_tokens=config.max_source_positions,
        features=features,
        suppressed=_first(generation.suppress_tokens, config.suppress_tokens),
        first_suppressed=_first(generation.begin_suppress_tokens, config.begin_suppress_tokens),
        first_timestamp_max=generation.max_initial_timestamp_index,
        multilingual=generation.is_multilingual is not False,
        alignment_heads=_alignment_heads(file, config, generation),
        filter_width=config.median_filter_width,
    )


def _alignment_heads(
    file: Path, config: _TranscribingConfig, generation: _TranscribingGeneration
) -> tuple[tuple[int, int], ...]:
    """Those of generation_config.json, or all of the second half of the layers.

    Source: the default of OpenAI's program, https://github.com/openai/whisper, `model.py`.
    """
    if not config.median_filter_width % 2:
        raise ConfigError(
            f"{file}: median_filter_width = {config.median_filter_width}: must be odd"
        )
    layers, heads = config.decoder_layers, config.decoder_attention_heads
    if not (named := generation.alignment_heads):
        return tuple((layer, head) for layer in range(layers // 2, layers) for head in range(heads))
    if any(layer >= layers or head >= heads for layer, head in named):
        raise ConfigError(
            f"{file.parent / 'generation_config.json'}: alignment_heads name a layer or a head that"
            f" the model does not have, of {layers} layers with {heads} heads"
        )
    return named


def _check_features(
    file: Path, config: _TranscribingConfig | _PromptTower, features: AudioFeatures
) -> None:
    """Check that the encoder takes these features."""
    if features.feature_size != config.num_mel_bins:
        raise ConfigError(
            f"{file}: num_mel_bins = {config.num_mel_bins}, and feature_size ="
            f" {features.feature_size} in {PROCESSOR}"
        )
    if features.frames != DOWNSAMPLED * config.max_source_positions:
        raise ConfigError(
            f"{file}: max_source_positions = {config.max_source_positions}: {features.frames}"
            f" frames of features become {features.frames / DOWNSAMPLED:g}"
        )


def _first(*lists: tuple[int, ...] | None) -> tuple[int, ...]:
    """The first of these lists that a file has, which may be empty."""
    return next((each for each in lists if each is not None), ())


def _is_one_of(file: Path, architectures: tuple[str, ...]) -> bool:
    if not file.is_file():
        return False
    return bool(set(read_json(file, _Architectures).architectures or ()) & set(architectures))


class _Architectures(msgspec.Struct, frozen=True):
    architectures: tuple[str, ...] | None = None


def _features(folder: Path) -> AudioFeatures:
    if (file := folder / NESTING).is_file():
        nested = bytes(read_json(file, _FeatureNesting).feature_extractor)
        if nested != b"null":
            return parse_json(nested, AudioFeatures, file)
    if (file := folder / PROCESSOR).is_file():
        return read_json(file, AudioFeatures)
    return AudioFeatures()
