"""How models take text with a gap to fill: three marks around a prompt and what comes after it."""

# ruff: noqa: RUF001  # these bars are the letters of some marks

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from antiphon.config.errors import ConfigError


class CompletionTemplate(msgspec.Struct, frozen=True):
    """The marks before the prompt, between it and the suffix, and behind that."""

    name: str
    marks: tuple[str, str, str]

    def write(self, prompt: str, suffix: str) -> str:
        """The text that a model goes on from with what fills the gap."""
        before, between, behind = self.marks
        return f"{before}{prompt}{between}{suffix}{behind}"


TEMPLATES = (
    CompletionTemplate("deepseek_coder", ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")),
    CompletionTemplate("star_coder", ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")),
    CompletionTemplate("qwen_coder", ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")),
)
"""By SGLang's names."""

_FILE = ".json"


def check_name(said: str) -> None:
    """Refuse what is neither a template's name nor a file's.

    Raises:
        ValueError: Lists the names.
    """
    names = [template.name for template in TEMPLATES]
    if said and said not in names and not said.endswith(_FILE):
        raise ValueError(
            f"completion_template = {said!r}: must be {', '.join(names)} or a {_FILE} file"
        )


def read_template(said: str) -> CompletionTemplate:
    """Look a template up by its name, or read it from a file.

    Raises:
        ConfigError: The file is missing or malformed.
    """
    known = {template.name: template for template in TEMPLATES}
    if said in known:
        return known[said]
    try:
        file = msgspec.json.decode(Path(said).expanduser().read_bytes(), type=_TemplateFile)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"model.completion_template: {said}: {error}") from error
    begin, middle, end = file.fim_begin_token, file.fim_middle_token, file.fim_end_token
    inside = file.fim_position == "MIDDLE"
    return CompletionTemplate(file.name, (begin, middle, end) if inside else (begin, end, middle))


class _TemplateFile(msgspec.Struct, frozen=True):
    """A file as SGLang reads it; `fim_position` is where the middle mark stands."""

    name: str
    fim_begin_token: str
    fim_middle_token: str
    fim_end_token: str
    fim_position: Literal["MIDDLE", "END"]
