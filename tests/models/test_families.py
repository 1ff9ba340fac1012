"""Every family against transformers, and every feature of it against its absence.

The rows are in `families`: nothing here knows a family.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.models.families import LENGTHS, ROWS, Mutant, Row
from tests.models.stepper import Line, Stepper
from tests.models.test_llama_parity import prompts, spy_on_logits
from torch import Tensor

from antiphon.kernels.cpu.extension import lacking
from antiphon.layers.methods import METHODS
from antiphon.model_worker.model import registry
from antiphon.model_worker.model.decoder import Decoder
from antiphon.model_worker.model.load import Model, load
from antiphon.model_worker.model.weights import Checkpoint
from antiphon.model_worker.runner.forward import Runner
from antiphon.model_worker.runner.memory import cache_groups
from antiphon.model_worker.runner.open import OpenModel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


STEPS = 32
NEAR_TIE = 1e-4
"""Standard deviations between the two likeliest tokens, below which either may be said."""
LINEARS = ["plain"] if lacking() else ["plain", "packed"]


def draw(model: torch.nn.Module) -> None:
    """Give every parameter and buffer a value that shows when it is not used."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            if parameter.dim() > 1:
                parameter.copy_(0.12 * noise)
            elif name.endswith("norm.weight") or "layernorm" in name or "ln_" in name:
                parameter.copy_(1 + 0.3 * noise)
            else:
                parameter.copy_(0.3 * noise)


@dataclass(frozen=True)
class Saved:
    """A tiny model as transformers wrote it, and what it says of some texts."""

    row: Row
    folder: Path
    model: Callable[..., Any]

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> Tensor:
        """Of every token, (T, V), without a cache."""
        return self.model(torch.tensor([ids])).logits[0]

    @cached_property
    def of_prompt(self) -> Tensor:
        """Of every token of the longest prompt."""
        return self.logits(texts()[-1])


def texts() -> list[list[int]]:
    return prompts(128, LENGTHS)


@pytest.fixture(scope="module", params=ROWS, ids=str)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    row: Row = request.param
    config = row.made()
    config._attn_implementation = "eager"
    model = row.architecture(config).eval()
    draw(model)
    folder = tmp_path_factory.mktemp(row.name.replace(" ", "-"))
    model.save_pretrained(folder)
    return Saved(row, folder, model)


def opened(saved: Saved, linear: str = "plain", mutant: Mutant | None = None) -> OpenModel:
    """The model as we load it; a mutant does without the tensors of what it has not."""
    model = load(saved.folder, dtype="float32", linear=linear)
    spec = model.spec
    if mutant is not None:
        spec = mutant(spec)
        decoder = Decoder(spec, model.build, method=METHODS[linear])
        Checkpoint.open(saved.folder).load(decoder.sources())
        decoder.pack()
        model = Model(spec, decoder, model.build)
    groups = cache_groups(spec, model.build, page_tokens=4, pages=128)
    return OpenModel(Runner(model, groups), groups, spec)


def written(model: OpenModel, chunk: int) -> list[Line]:
    """Prompts of several lengths in chunks, then decoded side by side."""
    batch = Stepper(model.runner, model.groups)
    for ids in texts():
        batch.add(ids)
    batch.prefill(chunk)
    batch.decode(STEPS)
    return list(batch.lines.values())


def logits_of(model: OpenModel, ids: list[int], chunk: int) -> Tensor:
    """Of every token, computed in chunks."""
    seen = spy_on_logits(model.runner)
    batch = Stepper(model.runner, model.groups)
    batch.add(ids)
    for start in range(0, len(ids), chunk):
        batch.step({0: min(chunk, len(ids) - start)}, all_logits=True)
    return torch.cat(seen)


def error(ours: Tensor, theirs: Tensor) -> float:
    """The greatest difference, in standard deviations."""
    return float((ours - theirs).abs().max() / theirs.std())


@pytest.mark.parametrize("linear", LINEARS)
def test_logits_are_those_of_transformers(saved: Saved, linear: str) -> None:
    ours = logits_of(opened(saved, linear), texts()[-1], chunk=23)
    assert error(ours, saved.of_prompt) < saved.row.limit


@pytest.mark.parametrize("linear", LINEARS)
def test_greedy_text_is_that_of_transformers(saved: Saved, linear: str) -> None:
    for ids, line in zip(texts(), written(opened(saved, linear), chunk=17), strict=True):
        said = line.ids[len(ids) :]
        assert len(said) >= STEPS
        theirs = saved.logits(line.ids[:-1])[len(ids) - 1 :]
        for token, scores in zip(said, theirs, strict=True):
            gap = scores.max() - scores[token]
            assert gap < NEAR_TIE * scores.std(), f"{token} instead of {scores.argmax()}"


def test_a_cached_prefix_changes_nothing(saved: Saved) -> None:
    """Two texts with one beginning, whose pages the second takes from the first."""
    ids, model = texts()[-1], opened(saved)
    seen = spy_on_logits(model.runner)
    batch = Stepper(model.runner, model.groups)
    first, second = batch.add(ids[:40]), batch.add(ids)
    batch.step({0: 40})
    for own, theirs in zip(second.pages, first.pages, strict=True):
        own.extend(theirs[:9])
    second.computed = 36
    batch.step({1: len(ids) - 36}, all_logits=True)
    assert error(seen[-1], saved.of_prompt[36:]) < saved.row.limit


def test_every_feature_that_is_switched_off_is_missed(saved: Saved) -> None:
    for feature, mutant in saved.row.mutants.items():
        ours = logits_of(opened(saved, mutant=mutant), texts()[-1], chunk=64)
        missed = error(ours, saved.of_prompt)
        assert missed > 10 * saved.row.limit, f"nobody misses {feature}: {missed:.1e}"


@pytest.mark.parametrize("architecture", registry.FAMILIES)
def test_every_family_has_a_row_and_every_feature_a_mutant(architecture: str) -> None:
    rows = [row for row in ROWS if row.architecture.__name__ == architecture]
    shown = {feature for row in rows for feature in row.mutants}
    assert rows, "no row"
    assert set(registry.find_family((architecture,)).features) <= shown
