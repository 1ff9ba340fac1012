from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from tests.models.tiny import write_llama
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


class Reference:
    """A model as transformers runs it, in float32 and without a cache: nothing of ours is in it."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """Of every token, (T, V)."""
        return self._model(torch.tensor([list(ids)])).logits[0]

    def greedy_after(self, ids: Sequence[int], prompt_tokens: int) -> list[int]:
        """The likeliest token after each one from the prompt's last on.

        A text is the greedy one if and only if these are its own next tokens.
        """
        return self.logits(ids[:-1])[prompt_tokens - 1 :].argmax(dim=-1).tolist()


@pytest.fixture(scope="session")
def reference() -> Callable[[Path], Reference]:
    return lambda folder: Reference(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    )


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four query heads on two kv heads, four layers, untied."""
    return write_llama(tmp_path_factory.mktemp("llama"))
