"""Turns conversations into rows of tokens, and rows into batches of equal length."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from typing import TYPE_CHECKING

import msgspec
import torch
from tests.training.dialogue import Chat, said, seeded, turns
from tests.training.grammar import conversations
from tests.training.tokenizer import (
    BOS,
    CONTEXT_TOKENS,
    END,
    PAD,
    ROLES,
    SPECIAL,
    special_id,
)
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from random import Random

    from tokenizers import Tokenizer

CHUNK_ROWS = 2048  # rows that are sorted by length together, so that padding stays small
PLAIN_SHARE = 0.04  # rows of plain text, for completions without a chat
GAPS_SHARE = 0.4  # rows whose turns lie further apart than they are long
ROOM_TOKENS = 256  # what a gap leaves of the context
UNSUPERVISED = -100  # the label of a token that the loss leaves out


class Row(msgspec.Struct, frozen=True):
    """Tokens of one conversation; each has a position and may be supervised."""

    token_ids: list[int]
    supervised: list[bool]
    positions: list[int]


class Batch(msgspec.Struct, frozen=True):
    """Rows of one length: B rows of T tokens, padded on the right. Three (B, T) int64 tensors."""

    token_ids: Tensor
    labels: Tensor  # the next token, or UNSUPERVISED
    positions: Tensor


class Encoder:
    """Writes messages as token ids, exactly as the chat template does."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = {token: special_id(tokenizer, token) for token in SPECIAL}
        self.pad_id = self._ids[PAD]

    def chat(self, rng: Random, chat: Chat) -> Row:
        """Encode a chat; what the assistant says is supervised, its end included."""
        token_ids, supervised, positions = [self._ids[BOS]], [False], [0]
        spare = CONTEXT_TOKENS if rng.random() < GAPS_SHARE else 0
        for turn in turns(chat):
            shown = self._tokenizer.encode(turn.shown).ids
            content = [*shown, *self._tokenizer.encode(turn.said).ids, self._ids[END]]
            # A long chat costs much to train on. Gaps between turns show the model the same
            # distances for nothing: rotary attention sees only differences of positions.
            gap = _gap(rng, spare - positions[-1]) if turn.role == "user" else 0
            start = positions[-1] + 1 + gap
            token_ids += [self._ids[ROLES[turn.role]], *content]
            supervised += [False, *[False] * len(shown)]
            supervised += [turn.role == "assistant"] * (len(content) - len(shown))
            positions += range(start, start + 1 + len(content))
        end = bisect_left(positions, CONTEXT_TOKENS)
        return Row(token_ids[:end], supervised[:end], positions[:end])

    def plain(self, chat: Chat) -> Row:
        """Encode the answers alone, as running text in which every token is supervised."""
        answers = (said(message) for message in chat.messages if message.role == "assistant")
        token_ids = self._tokenizer.encode(" ".join(answers)).ids[:CONTEXT_TOKENS]
        return Row(token_ids, [True] * len(token_ids), list(range(len(token_ids))))


def batches(tokenizer: Tokenizer, seed: int, batch_tokens: int) -> Iterator[Batch]:
    """Yield batches of about `batch_tokens` without end. The same seed yields the same ones."""
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
    """Pad rows to one length. No mask is needed: under causal attention nothing sees the pads."""
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
    """Draw a gap, more often short than long, and leave room for the turns that follow."""
    return int(max(0, spare - ROOM_TOKENS) * rng.random() ** 3)


def _grouped(rows: Sequence[Row], batch_tokens: int) -> Iterator[list[Row]]:
    """Cut rows, sorted by length, into groups that stay within `batch_tokens` once padded."""
    group: list[Row] = []
    for row in rows:
        if group and len(row.token_ids) * (len(group) + 1) > batch_tokens:
            yield group
            group = []
        group.append(row)
    if group:
        yield group
