"""Reads the chat templates of a tokenizer's folder, which may have several named ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from antiphon.config.errors import ConfigError
from antiphon.model_card.config_json import read_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

TOKENIZER_CONFIG = "tokenizer_config.json"
PROCESSOR_CONFIGS = ("processor_config.json", "chat_template.json")
"""Where models that take media may have the template of their processor; the second is older."""
FILE = "chat_template.jinja"
MORE = "additional_chat_templates"
"""A folder with files `<name>.jinja`, next to `FILE`."""
_DEFAULT, _TOOL_USE = "default", "tool_use"
_SUFFIX = ".jinja"


class NamedTemplate(msgspec.Struct, frozen=True):
    name: str
    template: str


class _TemplateFields(msgspec.Struct, frozen=True):
    chat_template: str | Annotated[tuple[NamedTemplate, ...], Meta(min_length=1)] | None = None


class TemplateSources(msgspec.Struct, frozen=True):
    """The chat template, and the one for conversations with tools if it is different."""

    source: str
    tool_source: str | None = None


def read_templates(folder: Path) -> Mapping[str, str]:
    """A folder's templates by name.

    As in transformers, files win over tokenizer_config.json, and for models that take media the
    template of their processor over that of the tokenizer.
    """
    return {**_of_tokenizer(folder), **_of_processor(folder)}


def choose_templates(folder: Path, name: str = "") -> TemplateSources | None:
    """Choose the template of a folder's tokenizer; None if it has none.

    Without a `name` it is `tool_use`, if there is one, for conversations with tools, and `default`,
    or else the first, for the others.
    """
    templates = read_templates(folder)
    if name:
        if name not in templates:
            why = "the tokenizer has no chat template"
            if templates:
                why = f"the tokenizer has no template {name!r}, only {', '.join(templates)}"
            raise ConfigError(f"model.chat_template_name (--hf-chat-template-name): {why}")
        return TemplateSources(templates[name])
    if not templates:
        return None
    first = next(iter(templates.values()))
    return TemplateSources(templates.get(_DEFAULT, first), templates.get(_TOOL_USE))


def _of_processor(folder: Path) -> Mapping[str, str]:
    for name in PROCESSOR_CONFIGS:
        if found := _of_card(folder / name):
            return found
    return {}


def _of_tokenizer(folder: Path) -> Mapping[str, str]:
    templates = {_DEFAULT: _text(folder / FILE)} if (folder / FILE).is_file() else {}
    for file in sorted((folder / MORE).glob(f"*{_SUFFIX}")):
        templates[file.name.removesuffix(_SUFFIX)] = _text(file)
    return templates or _of_card(folder / TOKENIZER_CONFIG)


def _of_card(file: Path) -> Mapping[str, str]:
    if not file.is_file():
        return {}
    found = read_json(file, _TemplateFields).chat_template
    if isinstance(found, tuple):
        return {named.name: named.template for named in found}
    return {_DEFAULT: found} if found else {}


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}") from error
