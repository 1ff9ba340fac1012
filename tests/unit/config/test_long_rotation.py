"""Which of two lists of factors a longrope config is served with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from antiphon.model_card.config_json import longrope_factors, with_factors

if TYPE_CHECKING:
    from antiphon.model_card.config_json import Factors

LISTS = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [4.0]}
NEW = {"rope_parameters": LISTS | {"original_max_position_embeddings": 64}}
OLD = {
    "rope_scaling": {name: LISTS[name] for name in LISTS if name != "rope_type"} | {"type": "su"},
    "original_max_position_embeddings": 64,
}


def fields(config: object) -> dict[str, msgspec.Raw]:
    return msgspec.json.decode(msgspec.json.encode(config), type=dict[str, msgspec.Raw])


@pytest.mark.parametrize("config", [NEW, OLD], ids=["new names", "old names"])
@pytest.mark.parametrize(
    ("context_tokens", "factors"),
    [(None, "long"), (63, "short"), (64, "short"), (65, "long"), (1000, "long")],
)
def test_served_context_chooses_one_list_for_both(
    config: dict[str, object], context_tokens: int | None, factors: Factors
) -> None:
    made = fields({"max_position_embeddings": 256} | config)
    assert longrope_factors(made, context_tokens) == factors
    (place,) = [name for name in config if name.startswith("rope_")]
    rope = msgspec.json.decode(with_factors(made, factors)[place])
    assert rope["short_factor"] == rope["long_factor"] == LISTS[f"{factors}_factor"]


def test_model_that_was_not_stretched_has_short_factors() -> None:
    assert longrope_factors(fields({"max_position_embeddings": 64} | NEW), None) == "short"


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"rope_parameters": None},
        {"rope_parameters": {"rope_type": "yarn"}},
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        {"rope_parameters": LISTS | {"original_max_position_embeddings": "many"}},
    ],
)
def test_other_and_malformed_configs_stay_as_they_are(config: dict[str, object]) -> None:
    made = fields({"max_position_embeddings": 256} | config)
    assert longrope_factors(made, 8) is None
    assert with_factors(made, None) is made


def test_chosen_list_that_is_missing_is_not_replaced_by_the_other() -> None:
    lone = {name: LISTS[name] for name in LISTS if name != "short_factor"}
    made = fields({"max_position_embeddings": 64, "rope_parameters": lone})
    assert msgspec.json.decode(with_factors(made, "short")["rope_parameters"])["long_factor"] == []
