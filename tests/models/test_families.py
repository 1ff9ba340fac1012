"""Every family against transformers, and every feature of it against its absence.

The rows are in `families`: nothing here knows a family.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.models.derived import unclassified
from tests.models.parity import (
    LINEARS,
    Saved,
    check_logits,
    check_mutants,
    check_prefix,
    check_tensors,
    check_text,
    save,
)
from tests.models.planned import check_counted, check_counted_nearly
from tests.models.specs import EVERY, ROWS, spec_of

from antiphon.model_worker.model.registry import FAMILIES

if TYPE_CHECKING:
    from tests.models.families import Row


@pytest.fixture(scope="module", params=ROWS, ids=str)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save(request.param, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("linear", LINEARS)
def test_logits_are_those_of_transformers(saved: Saved, linear: str) -> None:
    check_logits(saved, linear)


@pytest.mark.parametrize("linear", LINEARS)
def test_greedy_text_is_that_of_transformers(saved: Saved, linear: str) -> None:
    check_text(saved, linear)


def test_a_cached_prefix_changes_nothing(saved: Saved) -> None:
    check_prefix(saved)


def test_every_feature_that_is_switched_off_is_missed(saved: Saved) -> None:
    check_mutants(saved)


def test_every_tensor_that_is_zero_is_missed(saved: Saved) -> None:
    check_tensors(saved)


def test_the_plan_counts_the_bytes_that_the_decoder_takes(saved: Saved) -> None:
    check_counted(saved)


def test_a_model_without_weights_is_counted_nearly(saved: Saved) -> None:
    check_counted_nearly(saved)


@pytest.mark.parametrize("row", EVERY, ids=str)
def test_every_field_of_a_spec_is_a_size_a_name_or_a_feature(row: Row) -> None:
    assert not unclassified(spec_of(row))


def test_every_family_has_rows() -> None:
    assert FAMILIES.keys() == {row.architecture.__name__ for row in EVERY}
