from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.training.tokenizer import train_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A tokenizer as training makes it, from fewer conversations."""
    return train_tokenizer(seed=0, conversations_read=500)
