from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.models.tiny import write_llama

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"))
