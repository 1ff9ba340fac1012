"""Every family against transformers, and every feature of it against its absence.

The rows are in `families`: nothing here knows a family.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
from tests.models import families, families_moe
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

from antiphon.config.card import read_card
from antiphon.config.loading import LoadFormat
from antiphon.config.memory import weight_bytes
from antiphon.config.model import Dtype, Linear
from antiphon.config.model_files import find_files
from antiphon.layers.mla import LatentSpec
from antiphon.model_worker.cache.groups import GroupKind
from antiphon.model_worker.model import registry
from antiphon.model_worker.model.load import load
from antiphon.model_worker.runner.memory import cache_groups

if TYPE_CHECKING:
    from antiphon.model_worker.model.spec import MixerSpec

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
    model, card = load(saved.folder, dtype="float32"), read_card(saved.folder)
    taken = {source.name: source.shape for source in model.own.sources()}
    tensors = {name: _numbers(shape) for name, shape in taken.items()}
    copied = sum(_copied(layer.mixer) for layer in model.spec.layers)
    numbers = sum(tensors.values()) + copied
    plain = Linear.PLAIN
    counted = weight_bytes(card, Dtype.FLOAT32, plain, quantized=plain, count=0)
    assert counted == 4 * numbers
    pages, states = 0, 0
    for group in cache_groups(model.spec, model.build, page_tokens=16, pages=1):
        if group.kind is GroupKind.STATE:
            states += group.page_bytes
        else:
            pages += group.page_bytes
    assert 16 * card.kv_bytes(Dtype.FLOAT32) == pages
    assert card.state_bytes(Dtype.FLOAT32) == states
    assert card.context_tokens == model.spec.context_tokens
    assert card.vocabulary_size == model.spec.vocabulary
    assert card.tied is model.spec.head.tied


def test_a_model_without_weights_is_counted_nearly(saved: Saved) -> None:
    """Norms and biases are left out, which are a greater part of a tiny model than of any other."""
    card = read_card(find_files(saved.folder, LoadFormat.DUMMY))
    sources = {source.name: source.shape for source in load(saved.folder).own.sources()}
    matrices = sum(
        _numbers(shape)
        for name, shape in sources.items()
        if len(shape) > 1 and not name.endswith("bias")
    )
    assert card.weights.count == matrices


@pytest.mark.parametrize("architecture", registry.FAMILIES)
def test_every_family_has_a_row_and_every_feature_a_mutant(architecture: str) -> None:
    rows = [row for row in ROWS if row.architecture.__name__ == architecture]
    shown = {feature for row in rows for feature in row.mutants}
    assert rows, "no row"
    assert set(registry.find_family((architecture,)).features) <= shown


def _numbers(shape: tuple[int, ...]) -> int:
    return math.prod(shape)


def _copied(mixer: MixerSpec) -> int:
    """Numbers that a layer keeps twice."""
    if not isinstance(mixer, LatentSpec):
        return 0
    sizes = mixer.sizes
    return sizes.heads * (sizes.content + sizes.value) * sizes.latent
