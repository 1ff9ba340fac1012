"""Reads the chat templates of a tokenizer's folder, which may have several named ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from antiphon.config.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

TOKENIZER_CONFIG = "tokenizer_config.json"
FILE = "chat_template.jinja"
MORE = "additional_chat_templates"
"""A folder with files `<name>.jinja`, next to `FILE`."""
_DEFAULT, _TOOL_USE = "default", "tool_use"
_SUFFIX = ".jinja"


class NamedTemplate(msgspec.Struct, frozen=True):
    """A named template."""

    name: str
    template: str


class _TemplateFields(msgspec.Struct, frozen=True):
    """The field of tokenizer_config.json that holds templates."""

    chat_template: str | Annotated[tuple[NamedTemplate, ...], Meta(min_length=1)] | None = None


class TemplateSources(msgspec.Struct, frozen=True):
    """The chat template, and the one for conversations with tools if it is different."""

    source: str
    tool_source: str | None = None


def read_templates(folder: Path) -> Mapping[str, str]:
    """Read a folder's templates by name; a single one is named `default`.

    Files take precedence over tokenizer_config.json, as in transformers.

    Raises:
        ConfigError: A file cannot be read, or is malformed.
    """
    templates = {_DEFAULT: _text(folder / FILE)} if (folder / FILE).is_file() else {}
    for file in sorted((folder / MORE).glob(f"*{_SUFFIX}")):
        templates[file.name.removesuffix(_SUFFIX)] = _text(file)
    return templates or _of_card(folder / TOKENIZER_CONFIG)


def choose_templates(folder: Path, name: str = "") -> TemplateSources | None:
    """Choose the template of a folder's tokenizer; None if it has none.

    Args:
        folder: The folder with the templates.
        name: The template for all conversations; empty: `tool_use`, if there is one, for those with
            tools, `default` for the others, else the first.

    Raises:
        ConfigError: There is no template of that name; the message lists the names.
    """
    templates = read_templates(folder)
    if name:
        if name not in templates:
            raise ConfigError(_unknown(name, templates))
        return TemplateSources(templates[name])
    if not templates:
        return None
    first = next(iter(templates.values()))
    return TemplateSources(templates.get(_DEFAULT, first), templates.get(_TOOL_USE))


def _unknown(name: str, templates: Mapping[str, str]) -> str:
    if templates:
        why = f"the tokenizer has no template {name!r}, only {', '.join(templates)}"
    else:
        why = "the tokenizer has no chat template"
    return f"model.chat_template_name (--hf-chat-template-name): {why}"


def _of_card(file: Path) -> Mapping[str, str]:
    if not file.is_file():
        return {}
    try:
        found = msgspec.json.decode(file.read_bytes(), type=_TemplateFields).chat_template
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file}: {error}") from error
    if isinstance(found, tuple):
        return {named.name: named.template for named in found}
    return {_DEFAULT: found} if found else {}


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from error
