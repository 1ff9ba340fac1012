"""A tiny random model of transformers, the same model as we load it, and what both say."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tests.models.derived import Mutant, derived
from tests.models.families import LENGTHS, VOCABULARY, Row
from tests.models.stepper import Stepper, logits_of, prompts, spy_on_logits
from tests.support.models import load
from torch import Tensor
from transformers import DynamicCache

from antiphon.config.model import Dtype, LinearFormat, LoadFormat
from antiphon.kernels.cpu.extension import unavailable_reason
from antiphon.layers.methods import LinearMethod
from antiphon.layers.mla import LatentSpec
from antiphon.model_card.card import read_card
from antiphon.model_card.files import find_files
from antiphon.model_worker.cache.groups import GroupKind
from antiphon.model_worker.model.decoder import Decoder
from antiphon.model_worker.model.load import LoadedModel
from antiphon.model_worker.model.weights import Checkpoint
from antiphon.model_worker.runner.model_runner import ModelRunner
from antiphon.model_worker.runner.opening import OpenModel
from antiphon.model_worker.runner.pools import cache_groups
from antiphon.resolve.memory import weight_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from antiphon.model_worker.model.spec import MixerSpec

STEPS = 32
NEAR_TIE = 1e-4
"""Standard deviations between the two likeliest tokens, below which either may be said."""
MISSED = 10.0
"""Times the limit of a row by which a mutant must be off at least."""
_NUMBER = re.compile(r"\d+")
LINEARS = ["plain"] if unavailable_reason() else ["plain", "packed"]


@dataclass(frozen=True)
class Saved:
    """A tiny model as transformers wrote it, and what it says of some texts."""

    row: Row
    folder: Path
    model: Callable[..., Any]

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> Tensor:
        """Of every token, (T, V), without a cache but where the row asks for one."""
        if not self.row.by_token:
            return self.model(torch.tensor([ids])).logits[0]
        cache, logits = DynamicCache(), list[Tensor]()
        for token in ids:
            step = self.model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            logits.append(step.logits[0])
        return torch.cat(logits)

    @cached_property
    def loaded(self) -> LoadedModel:
        """As we load it, in float32 and with plain linears."""
        return load(self.folder, dtype="float32")

    @cached_property
    def of_prompt(self) -> Tensor:
        """Of every token of the longest prompt."""
        return self.logits(texts()[-1])


def save(row: Row, folder: Path) -> Saved:
    """Make a row's model, give it weights that show, and write it down."""
    config = row.made()
    config._attn_implementation = "eager"
    model = row.architecture(config).eval()
    draw(model)
    (row.write or _write)(model, folder)
    if row.turned:
        file = folder / "model.safetensors"
        tensors = load_file(file)
        for name in (name for name in tensors if name.endswith(row.turned)):
            tensors[name] = tensors[name].mT.contiguous()
        save_file(tensors, file, metadata={"format": "pt"})
    return Saved(row, folder, model)


def _write(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)


def draw(model: torch.nn.Module) -> None:
    """Give every parameter and persistent buffer a value that shows when it is not used."""
    torch.manual_seed(0)
    norms = (torch.nn.LayerNorm,)
    with torch.no_grad():
        for module in model.modules():
            normalises = isinstance(module, norms) or "Norm" in type(module).__name__
            for name, tensor in _own(module):
                noise = torch.randn(tensor.shape)
                if isinstance(module, torch.nn.Conv1d) and name == "weight":
                    tensor.copy_(0.6 * noise)  # few taps, and what leaves them is multiplied
                elif name == "A_log":
                    tensor.copy_(noise - 2)  # remembers more than the last few tokens
                elif tensor.dim() > 1:
                    tensor.copy_(0.12 * noise)
                elif normalises and name == "weight":
                    tensor.copy_(1 + 0.3 * noise)
                else:
                    tensor.copy_(0.3 * noise)


def _own(module: torch.nn.Module) -> list[tuple[str, Tensor]]:
    """A module's parameters, and those of its buffers that a checkpoint keeps."""
    kept = module.state_dict()
    buffers = module.named_buffers(recurse=False)
    return [
        *module.named_parameters(recurse=False),
        *(
            (name, buffer)
            for name, buffer in buffers
            if name in kept and buffer.is_floating_point()
        ),
    ]


def texts() -> list[list[int]]:
    """The prompts of every test."""
    return prompts(VOCABULARY, LENGTHS)


def opened(
    saved: Saved, linear: str = "plain", mutant: Mutant | None = None, cache_dtype: str = "auto"
) -> OpenModel:
    """The model as we load it; a mutant does without the tensors of what it has not."""
    if mutant is None:
        model = load(saved.folder, dtype="float32", linear=linear, cache_dtype=cache_dtype)
        spec = model.spec
    else:
        assert (linear, cache_dtype) == ("plain", "auto"), "those of what is loaded already"
        model = saved.loaded
        spec = mutant(model.spec)
        decoder = Decoder(spec, model.build, LinearMethod(linear))
        checkpoint = Checkpoint.open(saved.folder)
        checkpoint.add_prefix(spec.prefix)
        checkpoint.unstack_experts(source.name for source in decoder.sources())
        checkpoint.load(decoder.sources())
        decoder.pack()
        model = LoadedModel(spec, decoder, model.build)
    groups = cache_groups(spec, model.build, page_tokens=4, pages=128, states=512)
    return OpenModel(ModelRunner(model, groups), groups, spec)


class Received:
    """Texts that are computed side by side, and the logits that each step gave."""

    def __init__(self, model: OpenModel) -> None:
        self.seen = spy_on_logits(model.runner)
        self.batch = Stepper(model.runner, model.groups)

    def check(self, saved: Saved) -> None:
        """Hold all logits against the reference's, which sees each text at once."""
        for slot, by_position in self._by_slot().items():
            line = self.batch.lines[slot]
            theirs = saved.logits(line.ids[: line.computed])[list(by_position)]
            ours = torch.stack(list(by_position.values()))
            assert len(ours) > STEPS, "the steps were not received"
            assert error(ours, theirs) < saved.row.limit

    def _by_slot(self) -> dict[int, dict[int, Tensor]]:
        """Logits by slot and position."""
        found: dict[int, dict[int, Tensor]] = {slot: {} for slot in self.batch.lines}
        plans = [plan for plan in self.batch.plans if len(plan.logit_tokens)]
        seen = [logits for logits in self.seen if len(logits)]
        for plan, logits in zip(plans, seen, strict=True):
            rows = np.searchsorted(plan.query_start, plan.logit_tokens, side="right") - 1
            ends = plan.query_start + plan.query_len
            positions = plan.logit_tokens + (plan.kv_len - ends)[rows]
            places = zip(plan.slot[rows], positions, strict=True)
            for (slot, position), scores in zip(places, logits, strict=True):
                found[int(slot)][int(position)] = scores
        return found


def error(ours: Tensor, theirs: Tensor) -> float:
    """The greatest difference, in standard deviations."""
    return float((ours - theirs).abs().max() / theirs.std())


def check_logits(saved: Saved, linear: str) -> None:
    """A prompt in chunks, against transformers."""
    ours = logits_of(opened(saved, linear), texts()[-1], chunk=23)
    assert error(ours, saved.of_prompt) < saved.row.limit


def check_text(saved: Saved, linear: str) -> None:
    """Prompts of several lengths in chunks, then greedy text of all side by side.

    Logits of every step are the reference's of the same tokens, and each token is the one that the
    reference would say, or a near tie.
    """
    model = opened(saved, linear)
    received = Received(model)
    for ids in texts():
        received.batch.add(ids)
    received.batch.prefill(17)
    received.batch.decode(STEPS)
    received.check(saved)
    for ids, line in zip(texts(), received.batch.lines.values(), strict=True):
        said = line.ids[len(ids) :]
        assert len(said) >= STEPS
        theirs = saved.logits(line.ids[:-1])[len(ids) - 1 :]
        for token, scores in zip(said, theirs, strict=True):
            gap = scores.max() - scores[token]
            assert gap < NEAR_TIE * scores.std(), f"{token} instead of {scores.argmax()}"


def check_prefix(saved: Saved) -> None:
    """Two texts with one beginning, whose pages the second takes from the first.

    And the state that the first one left at the end of the pages, if it left any. Both go on side
    by side.
    """
    ids, model = texts()[-1], opened(saved)
    received = Received(model)
    batch = received.batch
    first, second = batch.add(ids[:40]), batch.add(ids)
    batch.step({0: 36})
    batch.step({0: 4})
    batch.share(first, second, 36)
    batch.step({1: len(ids) - 37}, all_logits=True)
    batch.step({1: 1})
    batch.decode(STEPS)
    received.check(saved)


def without_tensors(saved: Saved) -> Iterator[tuple[str, OpenModel]]:
    """The model with its tensors of one name zero, in all layers: by each name that shows."""
    names = {source.name for source in opened(saved).runner._model.own_decoder.sources()}
    for kind in sorted({_NUMBER.sub("*", name) for name in names}):
        if kind.endswith(saved.row.idle):
            continue
        model = opened(saved)
        decoder = model.runner._model.own_decoder
        for source in decoder.sources():
            if _NUMBER.sub("*", source.name) == kind:
                assert source.load is not None
                source.load(torch.zeros(source.shape))
        decoder.pack()
        yield kind, model


def check_tensors(saved: Saved) -> None:
    """A model whose tensors of one name are zero, in all layers, is far from what is said."""
    for kind, model in without_tensors(saved):
        missed = error(logits_of(model, texts()[-1], chunk=64), saved.of_prompt)
        assert not missed < MISSED * saved.row.limit, f"nothing misses {kind}: {missed:.1e}"


def mutants(saved: Saved) -> dict[str, Mutant]:
    """By feature: what its spec says it has, and the row's own ways of doing without."""
    return derived(saved.loaded.spec)


def check_mutants(saved: Saved) -> None:
    """Without any one of its features it is far from what transformers says."""
    for feature, mutant in mutants(saved).items():
        ours = logits_of(opened(saved, mutant=mutant), texts()[-1], chunk=64)
        missed = error(ours, saved.of_prompt)
        assert missed > MISSED * saved.row.limit, f"nothing misses {feature}: {missed:.1e}"


def check_counted(saved: Saved) -> None:
    """Weights, cache and states, to the byte."""
    model, card = saved.loaded, read_card(saved.folder)
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
