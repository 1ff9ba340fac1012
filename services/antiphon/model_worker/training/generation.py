"""Who answers the evaluation's prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from antiphon.model_worker.training.dialogue import Message

if TYPE_CHECKING:
    from pathlib import Path

Chat = Sequence[Message]


class Generate(Protocol):
    """Answers chats: one text a chat, in order. Each chat ends in a question."""

    def __call__(self, chats: Sequence[Chat], tokens_max: int) -> list[str]:
        """Answer greedily, with at most `tokens_max` tokens a chat."""
        ...


class LocalModel:
    """Answers with transformers, in this process: the measure for the served model."""

    def __init__(self, folder: Path, rows_max: int = 128) -> None:
        # transformers leaves these classes largely untyped; nothing of them leaves this one.
        self._tokenizer = cast("Any", AutoTokenizer).from_pretrained(folder, padding_side="left")
        self._model = cast("Any", LlamaForCausalLM).from_pretrained(folder, dtype=torch.float32)
        self._rows_max = rows_max

    def __call__(self, chats: Sequence[Chat], tokens_max: int) -> list[str]:
        """Answer in batches of chats of about the same length, so that padding stays small."""
        prompts = [self._prompt(chat) for chat in chats]
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        answers = [""] * len(prompts)
        for start in range(0, len(order), self._rows_max):
            chosen = order[start : start + self._rows_max]
            texts = self._batch([prompts[index] for index in chosen], tokens_max)
            for index, text in zip(chosen, texts, strict=True):
                answers[index] = text
        return answers

    def _prompt(self, chat: Chat) -> str:
        messages = [{"role": message.role, "content": message.content} for message in chat]
        return self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )

    def _batch(self, prompts: list[str], tokens_max: int) -> list[str]:
        inputs = self._tokenizer(
            prompts, return_tensors="pt", padding=True, add_special_tokens=False
        )
        with torch.inference_mode():
            outputs = self._model.generate(
                inputs.input_ids,
                attention_mask=inputs.attention_mask,
                max_new_tokens=tokens_max,
                do_sample=False,
                temperature=None,
                top_p=None,
            )
        new_ids = outputs[:, inputs.input_ids.shape[1] :]
        return self._tokenizer.batch_decode(new_ids, skip_special_tokens=True)
