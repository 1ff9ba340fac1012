"""Every family against transformers, and every feature of it against its absence.

The rows are in `families`: nothing here knows a family.
"""

from __future__ import annotations

import pytest
from tests.models import families, families_judges, families_moe
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

from antiphon.model_worker.model import registry

ROWS = families.ROWS + families_moe.ROWS


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


@pytest.mark.parametrize("architecture", registry.FAMILIES)
def test_every_family_has_a_row_and_every_feature_a_mutant(architecture: str) -> None:
    every = ROWS + families_judges.ROWS
    rows = [row for row in every if row.architecture.__name__ == architecture]
    shown = {feature for row in rows for feature in row.mutants}
    assert rows, "no row"
    assert set(registry.find_family((architecture,)).features) <= shown
