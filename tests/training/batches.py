"""Encodes conversations as sequences of tokens, and groups them in batches of equal length."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from typing import TYPE_CHECKING

import msgspec
import torch
from tests.training.dialogue import Chat, said, seeded, turns
from tests.training.grammar import conversations
from tests.training.tokenizer import BOS, CONTEXT_TOKENS, END, PAD, ROLES, SPECIAL, special_id
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from random import Random

    from tokenizers import Tokenizer

CHUNK_ROWS = 2048  # sequences that are sorted by length together, so that padding stays small
PLAIN_SHARE = 0.04  # share of plain text, for completions without a chat
GAPS_SHARE = 0.4  # share of sequences with position gaps between turns
ROOM_TOKENS = 256  # positions that a gap leaves for the following turns
UNSUPERVISED = -100  # the label of a token that the loss ignores


class Row(msgspec.Struct, frozen=True):
    """The token sequence of one conversation; each token has a position and may be supervised."""

    token_ids: list[int]
    supervised: list[bool]
    positions: list[int]


class Batch(msgspec.Struct, frozen=True):
    """B sequences of T tokens, padded on the right. Three (B, T) int64 tensors."""

    token_ids: Tensor
    labels: Tensor  # the next token, or UNSUPERVISED
    positions: Tensor


class Encoder:
    """Encodes messages as token ids, exactly as the chat template does."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = {token: special_id(tokenizer, token) for token in SPECIAL}
        self.pad_id = self._ids[PAD]

    def chat(self, rng: Random, chat: Chat) -> Row:
        """Encode a chat; the assistant's text is supervised, including its end token."""
        token_ids, supervised, positions = [self._ids[BOS]], [False], [0]
        spare = CONTEXT_TOKENS if rng.random() < GAPS_SHARE else 0
        for turn in turns(chat):
            shown = self._tokenizer.encode(turn.shown).ids
            content = [*shown, *self._tokenizer.encode(turn.said).ids, self._ids[END]]
            # Long chats are expensive to train on. Gaps between turns show the model the same
            # distances for free: rotary attention depends only on differences of positions.
            gap = _gap(rng, spare - positions[-1]) if turn.role == "user" else 0
            start = positions[-1] + 1 + gap
            token_ids += [self._ids[ROLES[turn.role]], *content]
            supervised += [False, *[False] * len(shown)]
            supervised += [turn.role == "assistant"] * (len(content) - len(shown))
            positions += range(start, start + 1 + len(content))
        end = bisect_left(positions, CONTEXT_TOKENS)
        return Row(token_ids[:end], supervised[:end], positions[:end])

    def plain(self, chat: Chat) -> Row:
        """Encode only the answers, as plain text in which every token is supervised."""
        answers = (said(message) for message in chat.messages if message.role == "assistant")
        token_ids = self._tokenizer.encode(" ".join(answers)).ids[:CONTEXT_TOKENS]
        return Row(token_ids, [True] * len(token_ids), list(range(len(token_ids))))


def batches(tokenizer: Tokenizer, seed: int, batch_tokens: int) -> Iterator[Batch]:
    """Yield an endless stream of batches of about `batch_tokens`, determined by the seed."""
    encoder = Encoder(tokenizer)
    rng = seeded("batches", seed)
    source = conversations(seed)
    while True:
        chats = itertools.islice(source, CHUNK_ROWS)
        rows = [
            encoder.plain(chat) if rng.random() < PLAIN_SHARE else encoder.chat(rng, chat)
            for chat in chats
        ]
        groups = list(_grouped(sorted(rows, key=lambda row: len(row.token_ids)), batch_tokens))
        rng.shuffle(groups)
        yield from (collate(group, encoder.pad_id) for group in groups)


def collate(rows: Sequence[Row], pad_id: int) -> Batch:
    """Pad sequences to one length. With causal attention, padding on the right needs no mask."""
    length = max(len(row.token_ids) for row in rows)
    token_ids = torch.full((len(rows), length), pad_id)
    labels = torch.full((len(rows), length), UNSUPERVISED)
    positions = torch.zeros((len(rows), length), dtype=torch.int64)
    for index, row in enumerate(rows):
        size = len(row.token_ids)
        token_ids[index, :size] = torch.tensor(row.token_ids)
        positions[index, :size] = torch.tensor(row.positions)
        following = torch.tensor(row.token_ids[1:])
        wanted = torch.tensor(row.supervised[1:], dtype=torch.bool)
        labels[index, : size - 1] = torch.where(wanted, following, UNSUPERVISED)
    return Batch(token_ids, labels, positions)


def _gap(rng: Random, spare: int) -> int:
    """Draw a gap, more often short than long, and leave positions for the following turns."""
    return int(max(0, spare - ROOM_TOKENS) * rng.random() ** 3)


def _grouped(rows: Sequence[Row], batch_tokens: int) -> Iterator[list[Row]]:
    """Split sequences, sorted by length, into groups of at most `batch_tokens` after padding."""
    group: list[Row] = []
    for row in rows:
        if group and len(row.token_ids) * (len(group) + 1) > batch_tokens:
            yield group
            group = []
        group.append(row)
    if group:
        yield group
