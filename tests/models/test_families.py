"""Every family against transformers, and every feature of it against its absence.

The rows are in `families`: nothing here knows a family.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest
from tests.models import families, families_judges, families_moe, families_seeing
from tests.models.derived import derived, unclassified
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
from antiphon.model_worker.model.config_file import read_config
from antiphon.model_worker.model.llama_parts import read_spec

if TYPE_CHECKING:
    from tests.models.families import Row

    from antiphon.model_worker.model.spec import ModelSpec

ROWS = families.ROWS + families_moe.ROWS + families_seeing.ROWS
EVERY = ROWS + families_judges.ROWS


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


def spec_of(row: Row) -> ModelSpec:
    """As the row's config is declared; nothing is loaded."""
    with TemporaryDirectory() as folder:
        config = row.made()
        config.architectures = [row.architecture.__name__]
        config.save_pretrained(folder)
        read = read_config(Path(folder))
    return read_spec(registry.find_family(read.architectures), read)


@pytest.mark.parametrize("row", EVERY, ids=str)
def test_every_field_of_a_spec_is_a_size_a_name_or_a_feature(row: Row) -> None:
    assert not unclassified(spec_of(row))


@pytest.mark.parametrize("architecture", registry.FAMILIES)
def test_every_family_has_rows_that_show_what_it_says_it_has(architecture: str) -> None:
    rows = [row for row in EVERY if row.architecture.__name__ == architecture]
    assert rows, "no row"
    family = registry.find_family((architecture,))
    layers = family.layers_of or family
    shown = {feature for row in rows for feature in derived(spec_of(row))}
    assert set(family.features) <= shown, "said, and not shown"
    assert shown <= {*family.features, *layers.features}, "shown, and not said"
