"""Trains the tokenizer: byte-level BPE in which every digit is a separate token."""

from __future__ import annotations

import itertools
import json
import re
from typing import TYPE_CHECKING

from tests.training.dialogue import said, signature
from tests.training.grammar import conversations
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

PAD, BOS, END = "<|pad|>", "<|bos|>", "<|end|>"
ROLES = {role: f"<|{role}|>" for role in ("system", "user", "assistant", "tool")}
SPECIAL = (PAD, BOS, END, *ROLES.values())
THINK, THOUGHT = "<think>", "</think>"
MARKS = (THINK, THOUGHT, "<tool_call>", "</tool_call>", "<tools>", "</tools>")
"""One token each, but not special tokens: they must be visible in the text of an answer."""

VOCABULARY_SIZE = 1024
CONVERSATIONS_READ = 20_000
CONTEXT_TOKENS = 2048

# One digit; a word with the space before it; marks, with the space after them where a digit
# follows, so that a count spends one token on ", " and a sum one on " + "; other space.
PIECES = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+(?: (?=\p{N}))?|\s+"

# A tool is written as a line, not as its schema: schemas are too hard for a model this small.
_TOOL = (
    "{% set function = tool.function or tool %}"
    "{% set schema = function.parameters or {} %}"
    "{{ function.name }}("
    "{% for key, value in (schema.properties or {}).items() %}"
    "{{ ', ' if not loop.first }}{{ key }}{{ '?' if key not in (schema.required or []) }}: "
    "{{ value.enum | join('|') if value.enum "
    "else (value.type if value.type is string else 'any') }}"
    "{% endfor %})"
    "{{ ': ' + function.description | trim | replace('\\n', ' ') if function.description }}"
)
_CALL = (
    "<tool_call>{{ '\\n' }}"
    """{"name": "{{ call.function.name }}", "arguments": """
    "{{ call.function.arguments if call.function.arguments is string "
    "else call.function.arguments | tojson }}}"
    "{{ '\\n' }}</tool_call>"
)
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% set system = messages and messages[0].role == 'system' %}"
    "{% if tools %}"
    "<|system|>{{ messages[0].content | trim + '\\n' if system }}<tools>{{ '\\n' }}"
    "{% for tool in tools %}" + _TOOL + "{{ '\\n' }}{% endfor %}"
    "</tools><|end|>"
    "{% endif %}"
    "{% for message in (messages[1:] if tools and system else messages) %}"
    "{% if message.role not in ('system', 'user', 'assistant', 'tool') %}"
    "{{ raise_exception('the roles are system, user, assistant and tool, not ' + message.role) }}"
    "{% endif %}"
    "{% set said = message.content or '' %}"
    # Reasoning of earlier answers is left out.
    "{% if message.role == 'assistant' %}{% set said = said.split('</think>') | last %}{% endif %}"
    "<|{{ message.role }}|>{{ said | trim }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '\\n' if said or not loop.first }}" + _CALL + "{% endfor %}"
    "<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if (enable_thinking if enable_thinking is defined "
    "else reasoning_effort is defined and reasoning_effort != 'none') %}<think>{% endif %}"
    "{% endif %}"
)

_MARKED = re.compile("|".join(MARKS))


def train_tokenizer(seed: int, conversations_read: int = CONVERSATIONS_READ) -> Tokenizer:
    """Learn the merges from the first conversations of the seed."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(MARKS),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed, conversations_read), trainer)
    _add(tokenizer, MARKS)
    return tokenizer


def with_marks(tokenizer: Tokenizer) -> Tokenizer:
    """Add the missing roles and markers to a tokenizer, in place of its last merges.

    All other tokens keep their ids, and the vocabulary its size. Texts with a removed merge become
    one token longer.
    """
    lacking = [token for token in (*SPECIAL, *MARKS) if tokenizer.token_to_id(token) is None]
    if not lacking:
        return tokenizer
    settings = json.loads(tokenizer.to_str())
    words: dict[str, int] = settings["model"]["vocab"]
    kept = len(words) - len(lacking)
    assert kept == tokenizer.get_vocab_size() - len(lacking), "every token is in the model"
    settings["model"]["vocab"] = {word: at for word, at in words.items() if at < kept}
    del settings["model"]["merges"][-len(lacking) :]
    made = Tokenizer.from_str(json.dumps(settings))
    _add(made, lacking)
    return made


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json with the chat template."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT_TOKENS,
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "add_bos_token": False,  # the chat template writes it
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of one of the SPECIAL tokens, or of the MARKS."""
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None, token
    return token_id


def _add(tokenizer: Tokenizer, tokens: Sequence[str]) -> None:
    added = [AddedToken(token, special=token in SPECIAL, normalized=False) for token in tokens]
    tokenizer.add_tokens(added)  # pyright: ignore[reportUnknownMemberType]


def _texts(seed: int, count: int) -> Iterator[str]:
    for chat in itertools.islice(conversations(seed), count):
        yield from map(signature, chat.tools)
        for message in chat.messages:
            yield _MARKED.sub("", said(message))
