"""A longrope model: the served context decides between its two lists of factors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import pytest
import transformers
from tests.models.families import SIZES, Row, long_rope
from tests.models.parity import Saved, error, logits_of, save, texts
from tests.support.models import open_model

from antiphon.config.model import ModelConfig
from antiphon.config.settings import Settings
from antiphon.config.worker import CacheConfig
from antiphon.model_card.served_model import model_files
from antiphon.model_worker.startup.checksums import content_digest
from antiphon.model_worker.startup.engine import open_engine

if TYPE_CHECKING:
    from antiphon.model_card.files import ModelFiles
    from antiphon.model_worker.runner.model_runner import OpenModel

TRAINED, LONGEST = 64, 256
"""Tokens that the model was trained with, and `max_position_embeddings`."""
TEXT = texts()[-1]
LONG_TEXT = (TEXT * 2)[:100]

Implementation = Literal["antiphon", "transformers"]
BOTH = pytest.mark.parametrize("implementation", ["antiphon", "transformers"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    row = Row(
        "phi3", transformers.Phi3ForCausalLM, {**long_rope(trained=TRAINED), "sliding_window": None}
    )
    assert row.sizes is SIZES
    return save(row, tmp_path_factory.mktemp("model"))


def settings(saved: Saved, context_tokens: int | None) -> Settings:
    model = ModelConfig(path=str(saved.folder), context_tokens=context_tokens)
    return Settings(model=model, cache=CacheConfig(tokens_max=512))


def files_of(saved: Saved, context_tokens: int | None) -> ModelFiles:
    return model_files(settings(saved, context_tokens))


def opened(
    saved: Saved, context_tokens: int | None, implementation: Implementation = "antiphon"
) -> OpenModel:
    return open_model(
        files_of(saved, context_tokens), pages=64, dtype="float32", implementation=implementation
    )


@BOTH
@pytest.mark.parametrize("context_tokens", [len(TEXT), TRAINED])
def test_context_up_to_the_trained_length_takes_the_short_factors(
    saved: Saved, context_tokens: int, implementation: Implementation
) -> None:
    ours = logits_of(opened(saved, context_tokens, implementation), TEXT, chunk=23)
    assert error(ours, saved.of_prompt) < saved.row.limit


@BOTH
@pytest.mark.parametrize("context_tokens", [None, 2 * TRAINED, TRAINED + 1])
def test_longer_context_takes_the_long_factors(
    saved: Saved, context_tokens: int | None, implementation: Implementation
) -> None:
    model = opened(saved, context_tokens, implementation)
    ours = logits_of(model, LONG_TEXT, chunk=23)
    assert error(ours, saved.logits(LONG_TEXT)) < saved.row.limit


@BOTH
def test_short_text_in_a_longer_context_differs_from_transformers(
    saved: Saved, implementation: Implementation
) -> None:
    """As docs/models.md states: transformers would take the short factors for this text."""
    ours = logits_of(opened(saved, None, implementation), TEXT, chunk=23)
    assert error(ours, saved.of_prompt) > 1000 * saved.row.limit
    # The text itself is the beginning of a longer one, whose keys transformers rotates alike.
    begun = saved.logits(LONG_TEXT)[: len(TEXT)]
    assert error(ours, begun) < saved.row.limit


def test_factors_in_use_are_part_of_the_digest_and_of_the_plan(saved: Saved) -> None:
    whole, short, longer = (content_digest(files_of(saved, n)) for n in (None, TRAINED, LONGEST))
    assert whole == longer != short
    for length, factors in ((TRAINED, "short"), (LONGEST, "long")):
        plan = open_engine(settings(saved, length)).resolved
        assert plan is not None
        assert f"rope:{factors}" in plan.bits.value
        assert f"{factors} rope factors" in plan.context_tokens.reason
