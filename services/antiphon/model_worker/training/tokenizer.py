"""Makes the tokenizer: byte-level BPE in which every digit is a token of its own."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from antiphon.model_worker.training.grammar import conversations

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAD, BOS, END = "<|pad|>", "<|bos|>", "<|end|>"
ROLES = {role: f"<|{role}|>" for role in ("system", "user", "assistant")}
SPECIAL = (PAD, BOS, END, *ROLES.values())

VOCABULARY_SIZE = 1024
CONVERSATIONS_READ = 20_000
CONTEXT_TOKENS = 2048

# One digit; a word with the space before it; marks, with the space after them where a digit
# follows, so that a count spends one token on ", " and a sum one on " + "; other space.
PIECES = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+(?: (?=\p{N}))?|\s+"

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('the roles are system, user and assistant, not ' + message.role) }}"
    "{% endif %}"
    "<|{{ message.role }}|>{{ message.content | trim }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train_tokenizer(seed: int) -> Tokenizer:
    """Learn the merges from the first conversations that the seed writes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, which holds the chat template."""
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
    """The id of one of the SPECIAL tokens."""
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None, token
    return token_id


def _texts(seed: int) -> Iterator[str]:
    for conversation in itertools.islice(conversations(seed), CONVERSATIONS_READ):
        for message in conversation:
            yield message.content
