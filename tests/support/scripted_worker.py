"""A worker with scripted answers, so that a real client's conversation is predictable.

The model's folder has a `script.json` in place of weights: a list of rules, of which the first one
whose `contains` occurs in the prompt determines the answer. Each prompt is appended to
`prompts.jsonl` in the same folder.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from tests.support.echo_worker import Answer, EchoWorker
from tokenizers import Tokenizer

from antiphon.service.main import run
from antiphon.wire.base import FinishReason
from antiphon.wire.codec import unpack_ids

if TYPE_CHECKING:
    from antiphon.wire.command import Admit

CONTEXT_TOKENS = 65_536
SCRIPT = "script.json"
PROMPTS = "prompts.jsonl"


class Rule(msgspec.Struct, frozen=True):
    """An answer, and the text that a prompt must contain to get it; "" matches all prompts."""

    contains: str
    answer: str


def write_script(folder: Path, *rules: tuple[str, str]) -> None:
    """Write the rules of a worker, for the next request on, and delete earlier prompts."""
    script = [Rule(contains, answer) for contains, answer in rules]
    (folder / PROMPTS).unlink(missing_ok=True)
    (folder / SCRIPT).write_bytes(msgspec.json.encode(script))


def read_prompts(folder: Path) -> list[str]:
    """Return the prompts received since the script was written, in order."""
    file = folder / PROMPTS
    lines = file.read_bytes().splitlines() if file.exists() else []
    return [msgspec.json.decode(line, type=str) for line in lines]


class ScriptedWorker(EchoWorker):
    """Answers by the rules in the folder of its model."""

    def __init__(self) -> None:
        super().__init__(context_tokens=CONTEXT_TOKENS)

    @cached_property
    def _folder(self) -> Path:
        return Path(self._runtime.settings.model.path)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self._folder / "tokenizer.json"))

    def answer(self, admit: Admit) -> Answer:
        """Encode the answer of the first matching rule."""
        prompt = self._tokenizer.decode(unpack_ids(admit.prompt_ids), skip_special_tokens=False)
        with (self._folder / PROMPTS).open("ab") as prompts:
            prompts.write(msgspec.json.encode(prompt) + b"\n")
        rules = msgspec.json.decode((self._folder / SCRIPT).read_bytes(), type=list[Rule])
        answer = next((rule.answer for rule in rules if rule.contains in prompt), "No rule fits.")
        ids = self._tokenizer.encode(answer, add_special_tokens=False).ids
        return Answer(ids, FinishReason.STOP)


if __name__ == "__main__":
    run(ScriptedWorker())
