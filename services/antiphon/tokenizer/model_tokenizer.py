"""Reads a model folder's tokenizer, special tokens and chat template."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import jinja2
import msgspec
from tokenizers import Tokenizer

from antiphon.config.completion_template import CompletionTemplate
from antiphon.config.errors import ConfigError
from antiphon.model_card.chat_templates import TOKENIZER_CONFIG, TemplateSources, choose_templates
from antiphon.model_card.tokenizer_file import open_tokenizer
from antiphon.tokenizer.completion import choose_completion_template
from antiphon.tokenizer.template import ChatTemplate
from antiphon.tokenizer.template_formats import TemplateFormats, detect_formats

if TYPE_CHECKING:
    from collections.abc import Mapping

T = TypeVar("T", bound=msgspec.Struct)


class AddedToken(msgspec.Struct, frozen=True):
    """A special token that is stored as an object instead of a string."""

    content: str


class SpecialTokens(msgspec.Struct, frozen=True):
    """The special tokens in special_tokens_map.json and tokenizer_config.json."""

    bos_token: str | AddedToken | None = None
    eos_token: str | AddedToken | None = None
    unk_token: str | AddedToken | None = None
    sep_token: str | AddedToken | None = None
    pad_token: str | AddedToken | None = None
    cls_token: str | AddedToken | None = None
    mask_token: str | AddedToken | None = None


class ModelTokenizer(msgspec.Struct, frozen=True):
    """The tokenizer of a model with its templates.

    `completion` is the fill-in-the-middle template, or None if it is unknown. `token_characters` is
    the length of the longest token; byte tokens are stored with one character per byte, so no token
    decodes to more.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    size: int
    template_formats: TemplateFormats
    completion: CompletionTemplate | None = None
    token_characters: int = 0


def read_model_tokenizer(
    folder: Path,
    template_file: str = "",
    completion_template: str = "",
    template_name: str = "",
) -> ModelTokenizer:
    """Load a folder's tokenizer and chat template.

    Args:
        folder: Holds tokenizer.json and, mostly, tokenizer_config.json.
        template_file: A template that replaces the folder's own; empty: none.
        completion_template: Name or file of the fill-in-the-middle template; empty: detect it by
            the tokenizer.
        template_name: The folder's template for all conversations; empty: chosen by whether a
            conversation has tools.

    Raises:
        ConfigError: A file is missing or malformed, there is no such template, or a marker is not a
            token; the message names it.
    """
    card = _read(folder / TOKENIZER_CONFIG, SpecialTokens)
    tokenizer = open_tokenizer(folder)
    sources = _sources(folder, template_file, template_name)
    try:
        template = _template(sources, _special(folder, card))
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"chat template, line {error.lineno}: {error.message}") from error
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    completion = choose_completion_template(tokenizer, completion_template)
    longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=0)
    return ModelTokenizer(tokenizer, template, size, _formats(sources), completion, longest)


def _template(sources: TemplateSources | None, special: Mapping[str, str]) -> ChatTemplate | None:
    if sources is None:
        return None
    return ChatTemplate(sources.source, special, tool_source=sources.tool_source)


def _formats(sources: TemplateSources | None) -> TemplateFormats:
    """The formats in the templates: tool calls by the tool template, reasoning by the plain one."""
    if sources is None:
        return TemplateFormats()
    plain, tools = detect_formats(sources.source), detect_formats(sources.tool_source or "")
    return TemplateFormats(
        tools=tools.tools or plain.tools,
        reasoning=plain.reasoning or tools.reasoning,
        reranks=plain.reranks,
    )


def _special(folder: Path, card: SpecialTokens) -> Mapping[str, str]:
    """The special tokens by their names in templates.

    Older folders have them in a separate file; tokenizer_config.json takes precedence.
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


def _sources(folder: Path, file: str, name: str) -> TemplateSources | None:
    """Find the templates: the configured file, or the folder's own."""
    if not file:
        return choose_templates(folder, name)
    try:
        return TemplateSources(Path(file).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.chat_template: {error}") from error
