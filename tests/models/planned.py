"""What the plan counts of a model before it is loaded, against what was loaded."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tests.support.models import load

from antiphon.config.model import Dtype, LinearFormat, LoadFormat
from antiphon.layers.mla import LatentSpec
from antiphon.model_card.card import read_card
from antiphon.model_card.files import find_files
from antiphon.model_worker.cache.groups import GroupKind
from antiphon.model_worker.runner.pools import cache_groups
from antiphon.resolve.memory import weight_bytes

if TYPE_CHECKING:
    from tests.models.parity import Saved

    from antiphon.model_worker.model.spec import MixerSpec


def check_counted(saved: Saved) -> None:
    """Weights, cache and states, to the byte."""
    model, card = load(saved.folder, dtype="float32"), read_card(saved.folder)
    taken = {source.name: source.shape for source in model.own_decoder.sources()}
    tensors = {name: math.prod(shape) for name, shape in taken.items()}
    copied = sum(_copied(layer.mixer) for layer in model.spec.layers)
    plain = LinearFormat.PLAIN
    counted = weight_bytes(card, Dtype.FLOAT32, plain, quantized=plain, count=0)
    assert counted == 4 * (sum(tensors.values()) + copied)
    pages, states = 0, 0
    for group in cache_groups(model.spec, model.build, page_tokens=4, pages=1):
        if group.kind is GroupKind.STATE:
            states += group.page_bytes
        else:
            pages += group.page_bytes
    assert 4 * card.kv_bytes(Dtype.FLOAT32) == pages
    assert card.state_bytes(Dtype.FLOAT32) == states
    assert card.context_tokens == model.spec.context_tokens
    assert card.vocabulary_size == model.spec.vocabulary
    assert card.tied is model.spec.tied
    assert card.causal is model.spec.causal


def check_counted_nearly(saved: Saved) -> None:
    """Without weights: norms and biases are left out, which are a part of tiny models only."""
    card = read_card(find_files(saved.folder, LoadFormat.DUMMY))
    sources = {source.name: source.shape for source in load(saved.folder).own_decoder.sources()}
    matrices = sum(
        math.prod(shape)
        for name, shape in sources.items()
        if len(shape) > 1 and not name.endswith("bias")
    )
    assert card.weights.count == matrices


def _copied(mixer: MixerSpec) -> int:
    """Numbers that a layer keeps twice."""
    if not isinstance(mixer, LatentSpec):
        return 0
    sizes = mixer.sizes
    return sizes.heads * (sizes.content + sizes.value) * sizes.latent
