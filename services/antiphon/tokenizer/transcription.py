"""Prompts of models that transcribe audio: text before it, language, task, and timestamps or not.

Source: Radford et al. 2022, arXiv:2212.04356, figure 1 and section 2.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from antiphon.config.errors import ConfigError
from antiphon.model_card.audio import LANGUAGES
from antiphon.wire.codec import unpack_ids
from antiphon.wire.errors import InvalidRequest, Unsupported
from antiphon.wire.media import MediumSpan
from antiphon.wire.namespaces import medium_key
from antiphon.wire.tokenize import TranscriptionCard

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tokenizers import Tokenizer

    from antiphon.model_card.audio import AudioCard
    from antiphon.wire.media import MediumHeader
    from antiphon.wire.tokenize import TranscriptionPrompt


@dataclass(frozen=True, eq=False)
class Transcriber:
    """Writes the prompts of one model. Has no mutable state.

    Attributes:
        start, before: Tokens in front of the transcript, and of the text before it.
        transcribe, translate: Those of the tasks; None in a model that knows English alone.
        plain: The token after which there are no timestamps.
    """

    tokenizer: Tokenizer
    audio: AudioCard
    card: TranscriptionCard
    start: int
    before: int | None
    transcribe: int | None
    translate: int | None
    plain: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, audio: AudioCard) -> Transcriber:
        """Find the model's tokens.

        Raises:
            ConfigError: The tokenizer lacks one of them.
        """

        def token(name: str) -> int | None:
            found: int | None = tokenizer.token_to_id(f"<|{name}|>")
            return found

        def required(name: str) -> int:
            if (found := token(name)) is None:
                raise ConfigError(f"the tokenizer has no token <|{name}|>, which Whisper needs")
            return found

        plain = required("notimestamps")
        known = [(code, found) for code in LANGUAGES if (found := token(code)) is not None]
        if not audio.multilingual:
            known = []
        card = TranscriptionCard(
            window_s=float(audio.features.chunk_length),
            languages=tuple(code for code, _ in known),
            language_ids=tuple(found for _, found in known),
            end_id=required("endoftext"),
            first_timestamp_id=plain + 1,
            timestamp_s=audio.step_s,
            suppressed=audio.suppressed,
            first_suppressed=audio.first_suppressed,
            first_timestamp_max=audio.first_timestamp_max,
            no_speech_id=token("nospeech") or token("nocaptions"),
            alignment_heads=audio.alignment_heads,
            filter_width=audio.filter_width,
        )
        return cls(
            tokenizer,
            audio,
            card,
            start=required("startoftranscript"),
            before=token("startofprev"),
            transcribe=required("transcribe") if known else None,
            translate=required("translate") if known else None,
            plain=plain,
        )

    def prompt(self, before: str, asked: TranscriptionPrompt, context_tokens: int) -> list[int]:
        """The ids of a prompt, and of an output that ends it.

        Of the text before it, the end that fits half of the context.

        Raises:
            InvalidRequest: The model does not know the language.
            Unsupported: It does not translate.
        """
        ids = (
            []
            if asked.language is None and self.card.languages
            else self._before(before, context_tokens)
        )
        ids.append(self.start)
        if self.transcribe is not None and self.translate is not None:
            if asked.language is None:
                return ids
            ids.append(self._language(asked.language))
            ids.append(self.translate if asked.translate else self.transcribe)
        elif asked.translate:
            raise Unsupported("this model knows English alone, and does not translate")
        elif asked.language not in (None, "en"):
            raise InvalidRequest("this model knows English alone", param="language")
        if not asked.timestamps:
            ids.append(self.plain)
        return [*ids, *unpack_ids(asked.output)]

    def span(self, medium: MediumHeader) -> MediumSpan:
        """What a part of an audio file is beside the prompt."""
        where = msgspec.msgpack.encode(medium.audio)
        key = medium_key(medium.digest, self.audio.processing + where)
        return MediumSpan(start=0, tokens=0, key=key, placeholders=self.audio.source_tokens)

    def _before(self, text: str, context_tokens: int) -> list[int]:
        if not text.strip() or self.before is None:
            return []
        special = self.tokenizer.get_added_tokens_decoder()
        encoded: Iterable[int] = self.tokenizer.encode(
            " " + text.strip(), add_special_tokens=False
        ).ids
        # Marks that a text spells out are text: they would ask for another task.
        ids = [each for each in encoded if each not in special]
        return [self.before, *ids[-(context_tokens // 2 - 1) :]] if ids else []

    def _language(self, code: str) -> int:
        if code not in self.card.languages:
            known = ", ".join(self.card.languages)
            raise InvalidRequest(
                f"language {code!r} is not known to this model; known are {known}",
                param="language",
            )
        return self.card.language_ids[self.card.languages.index(code)]
