"""What a model folder says of text: the tokenizer, its special tokens and the chat template."""

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
    """A special token written as an object instead of a string."""

    content: str


class SpecialTokens(msgspec.Struct, frozen=True):
    """What special_tokens_map.json says, and tokenizer_config.json beside it."""

    bos_token: str | AddedToken | None = None
    eos_token: str | AddedToken | None = None
    unk_token: str | AddedToken | None = None
    sep_token: str | AddedToken | None = None
    pad_token: str | AddedToken | None = None
    cls_token: str | AddedToken | None = None
    mask_token: str | AddedToken | None = None


class ModelTokenizer(msgspec.Struct, frozen=True):
    """Everything that turns a conversation into ids.

    `habits` is what the template shows, `completion` how text with a gap to fill is written; None
    if that is not known. `token_characters` is the length of the longest token; tokens of bytes are
    written a character a byte, so no token writes more.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    size: int
    habits: TemplateFormats
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
        completion_template: How text with a gap to fill is written, a name or a file; empty: the
            tokenizer shows it.
        template_name: Which of the folder's templates every conversation gets; empty: by whether
            it has tools.

    Raises:
        ConfigError: A file is missing or malformed, there is no such template, or a mark is no
            token; the text names it.
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
    return ModelTokenizer(tokenizer, template, size, _habits(sources), completion, longest)


def _template(sources: TemplateSources | None, special: Mapping[str, str]) -> ChatTemplate | None:
    if sources is None:
        return None
    return ChatTemplate(sources.source, special, tool_source=sources.tool_source)


def _habits(sources: TemplateSources | None) -> TemplateFormats:
    """What the templates show: that of tools shows calls, that of other conversations thinking."""
    if sources is None:
        return TemplateFormats()
    plain, tools = detect_formats(sources.source), detect_formats(sources.tool_source or "")
    return TemplateFormats(
        tools=tools.tools or plain.tools,
        reasoning=plain.reasoning or tools.reasoning,
        reranks=plain.reranks,
    )


def _special(folder: Path, card: SpecialTokens) -> Mapping[str, str]:
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


def _sources(folder: Path, file: str, name: str) -> TemplateSources | None:
    """Find the templates: the operator's file, or the folder's own."""
    if not file:
        return choose_templates(folder, name)
    try:
        return TemplateSources(Path(file).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.chat_template: {error}") from error
