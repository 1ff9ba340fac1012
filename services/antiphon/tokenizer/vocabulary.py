"""What a model folder says of text: the tokenizer, its special tokens and the chat template."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import jinja2
import msgspec
from msgspec import Meta
from tokenizers import Tokenizer

from antiphon.config.completion_template import CompletionTemplate
from antiphon.config.errors import ConfigError
from antiphon.service.tokenizer_file import open_tokenizer
from antiphon.tokenizer.completion import template_of
from antiphon.tokenizer.habits import Habits, habits_of
from antiphon.tokenizer.template import ChatTemplate

if TYPE_CHECKING:
    from collections.abc import Mapping

T = TypeVar("T", bound=msgspec.Struct)


class AddedToken(msgspec.Struct, frozen=True):
    """A special token written as an object instead of a string."""

    content: str


class NamedTemplate(msgspec.Struct, frozen=True):
    """One of several templates; the one called `default` is taken."""

    name: str
    template: str


class SpecialTokens(msgspec.Struct, frozen=True):
    """What special_tokens_map.json says, and tokenizer_config.json beside it."""

    bos_token: str | AddedToken | None = None
    eos_token: str | AddedToken | None = None
    unk_token: str | AddedToken | None = None
    sep_token: str | AddedToken | None = None
    pad_token: str | AddedToken | None = None
    cls_token: str | AddedToken | None = None
    mask_token: str | AddedToken | None = None


class TokenizerCard(SpecialTokens, frozen=True):
    """The fields of tokenizer_config.json that matter here."""

    chat_template: str | Annotated[tuple[NamedTemplate, ...], Meta(min_length=1)] | None = None


class Vocabulary(msgspec.Struct, frozen=True):
    """Everything that turns a conversation into ids.

    `habits` is what the template shows, `completion` how text with a gap to fill is written; None
    if that is not known. `token_characters` is the length of the longest token; tokens of bytes are
    written a character a byte, so no token writes more.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    size: int
    habits: Habits
    completion: CompletionTemplate | None = None
    token_characters: int = 0


def read(folder: Path, template_file: str = "", completion_template: str = "") -> Vocabulary:
    """Load a folder's tokenizer and chat template.

    Args:
        folder: Holds tokenizer.json and, mostly, tokenizer_config.json.
        template_file: A template that replaces the folder's own; empty: none.
        completion_template: How text with a gap to fill is written, a name or a file; empty: the
            tokenizer shows it.

    Raises:
        ConfigError: A file is missing or malformed, or a mark is no token; the text names it.
    """
    card = _read(folder / "tokenizer_config.json", TokenizerCard)
    tokenizer = open_tokenizer(folder)
    source = _source(folder, card, template_file)
    try:
        template = ChatTemplate(source, _special(folder, card)) if source else None
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"chat template, line {error.lineno}: {error.message}") from error
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    completion = template_of(tokenizer, completion_template)
    longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=0)
    return Vocabulary(tokenizer, template, size, habits_of(source or ""), completion, longest)


def _special(folder: Path, card: TokenizerCard) -> Mapping[str, str]:
    """The special tokens by the names that templates have for them.

    Older folders keep them in a file of their own, which the newer one completes.
    """
    older = _read(folder / "special_tokens_map.json", SpecialTokens)
    special: dict[str, str] = {}
    for name in SpecialTokens.__struct_fields__:
        token: str | AddedToken | None = getattr(card, name) or getattr(older, name)
        if token is not None:
            special[name] = token.content if isinstance(token, AddedToken) else token
    return special


def _read(file: Path, kind: type[T]) -> T:
    if not file.exists():
        return kind()
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file}: {error}") from error


def _source(folder: Path, card: TokenizerCard, template_file: str) -> str | None:
    """Find the template: the operator's file, the folder's, then the card's."""
    if template_file:
        try:
            return Path(template_file).expanduser().read_text()
        except OSError as error:
            raise ConfigError(f"model.chat_template: {error}") from error
    beside = folder / "chat_template.jinja"
    if beside.exists():
        return beside.read_text()
    if isinstance(card.chat_template, tuple):
        by_name = {named.name: named.template for named in card.chat_template}
        return by_name.get("default", card.chat_template[0].template)
    return card.chat_template
