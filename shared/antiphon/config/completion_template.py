"""Fill-in-the-middle templates: three markers around a prompt and its suffix."""

# ruff: noqa: RUF001  # these bars are part of some markers

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from antiphon.config.errors import ConfigError


class CompletionTemplate(msgspec.Struct, frozen=True):
    """The markers before the prompt, between prompt and suffix, and after the suffix."""

    name: str
    marks: tuple[str, str, str]

    def write(self, prompt: str, suffix: str) -> str:
        before, between, behind = self.marks
        return f"{before}{prompt}{between}{suffix}{behind}"


TEMPLATES = (
    CompletionTemplate("deepseek_coder", ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")),
    CompletionTemplate("star_coder", ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")),
    CompletionTemplate("qwen_coder", ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")),
)
"""Templates by SGLang's names."""

_FILE = ".json"


def check_name(name_or_file: str) -> None:
    """Raise `ValueError` with the names for anything but the name of a template or a file."""
    names = [template.name for template in TEMPLATES]
    if name_or_file and name_or_file not in names and not name_or_file.endswith(_FILE):
        raise ValueError(
            f"completion_template = {name_or_file!r}: must be {', '.join(names)} or a {_FILE} file"
        )


def read_template(name_or_file: str) -> CompletionTemplate:
    known = {template.name: template for template in TEMPLATES}
    if name_or_file in known:
        return known[name_or_file]
    try:
        content = Path(name_or_file).expanduser().read_bytes()
        file = msgspec.json.decode(content, type=_TemplateFile)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"model.completion_template: {name_or_file}: {error}") from error
    begin, middle, end = file.fim_begin_token, file.fim_middle_token, file.fim_end_token
    inside = file.fim_position == "MIDDLE"
    return CompletionTemplate(file.name, (begin, middle, end) if inside else (begin, end, middle))


class _TemplateFile(msgspec.Struct, frozen=True):
    """A template file in SGLang's format; `fim_position` is the position of the middle marker."""

    name: str
    fim_begin_token: str
    fim_middle_token: str
    fim_end_token: str
    fim_position: Literal["MIDDLE", "END"]
