"""A draft model drafts what it would say alone, whatever it reads in one pass and however often."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.kernels.rows import ISAS
from tests.models.specs import BY_NAME, windowed
from tests.models.stepper import stepper
from tests.models.test_states_with_model import write_row
from tests.models.tiny import QWEN2, VOCABULARY, write_llama, write_qwen2
from tests.support.kv_cache import stored
from tests.support.models import load, open_model, with_spec

from antiphon import embedded
from antiphon.config.settings import Settings
from antiphon.config.speculation import SpeculationConfig
from antiphon.config.worker import CacheConfig
from antiphon.model_worker.cache.groups import GroupKind
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.runner.context import ForwardContexts
from antiphon.model_worker.runner.draft_model import DraftModel
from antiphon.model_worker.startup.engine import open_engine
from antiphon.service.startup import CannotStart

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from antiphon.model_worker.batching.plan import Ints

PAGE_TOKENS = 4
PAGES = 512
COMPILED = pytest.mark.skipif(not ISAS, reason="the CPU's own kernels are not built")
WAYS: Mapping[str, Mapping[str, Any]] = {
    "fused": {"linear": "packed", "fused": True},
    "by layer": {"linear": "packed", "fused": False},
    "torch": {"linear": "plain", "fused": True},
}
EVERY_WAY = [
    pytest.param(way, marks=() if name == "torch" else COMPILED, id=name)
    for name, way in WAYS.items()
]


def open_draft(folder: Path, *, linear: str, fused: bool = True) -> DraftModel:
    model = load(folder, dtype="float32", linear=linear)
    return DraftModel(model, page_tokens=PAGE_TOKENS, pages=PAGES, fused=fused)


@dataclass
class DraftRows:
    """Texts with pages of a draft model, in a shuffled order."""

    model: DraftModel
    seed: int = 0
    texts: list[list[int]] = field(default_factory=list[list[int]])
    read: list[int] = field(default_factory=list[int])
    """The tokens of each text that the model has read."""
    tables: list[list[int]] = field(default_factory=list[list[int]])

    def __post_init__(self) -> None:
        self._free = np.random.default_rng(self.seed).permutation(PAGES).tolist()

    def add(self, ids: Sequence[int]) -> int:
        self.texts.append(list(ids))
        self.read.append(0)
        self.tables.append([])
        return len(self.texts) - 1

    def draft(self, rows: Mapping[int, tuple[int, int]]) -> list[list[int]]:
        """Read each text up to a length, and draft so many tokens; `rows` has both by text."""
        ends = {number: end for number, (end, _) in rows.items()}
        counts = ints([count for _, count in rows.values()])
        tokens = [self.texts[number][self.read[number] : end] for number, end in ends.items()]
        for number, (end, count) in rows.items():
            pages = -(-(end + max(0, count - 1)) // PAGE_TOKENS)
            while len(self.tables[number]) < pages:
                self.tables[number].append(self._free.pop())
        table = np.full((len(rows), max(len(self.tables[n]) for n in rows)), -1, np.int32)
        for row, number in enumerate(rows):
            table[row, : len(self.tables[number])] = self.tables[number]
        drafts = self.model.draft(
            ints([token for row in tokens for token in row]),
            ints([len(row) for row in tokens]),
            ints(list(ends.values())),
            table,
            counts,
        )
        self.read = [ends.get(number, read) for number, read in enumerate(self.read)]
        assert drafts.dtype == np.int32
        assert drafts.shape == (len(rows), counts.max())
        for row, count in zip(drafts, counts, strict=True):
            assert (row[count:] == -1).all()
        return [row[:count].tolist() for row, count in zip(drafts, counts, strict=True)]

    def cached(self, number: int) -> torch.Tensor:
        """Keys and values of what was read of a text, in all layers."""
        places = [
            page * PAGE_TOKENS + place
            for page in self.tables[number]
            for place in range(PAGE_TOKENS)
        ][: self.read[number]]
        return stored(self.model.pool, torch.tensor(places))


def ints(values: Sequence[int]) -> Ints:
    return np.array(values, np.int32)


def texts(*lengths: int) -> list[list[int]]:
    dice = np.random.default_rng(11)
    return [dice.integers(0, VOCABULARY, length).tolist() for length in lengths]


def alone(folder: Path, linear: str) -> Callable[[Sequence[int], int], list[int]]:
    """What the model says after a text when it is the served one."""
    model = open_model(folder, dtype="float32", linear=linear, page_tokens=PAGE_TOKENS, pages=PAGES)

    def continued(ids: Sequence[int], count: int) -> list[int]:
        if not count:
            return []
        model.runner._step = None
        one = stepper(model, [ids])
        one.prefill()
        one.decode(count - len(one.lines[0].ids) + len(ids))
        return one.lines[0].ids[len(ids) :]

    return continued


@pytest.fixture(scope="module", params=["llama", "qwen2", "olmo2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "llama":
        return write_llama(folder, seed=5)
    if request.param == "qwen2":
        return write_qwen2(folder, QWEN2, seed=6)
    # The residual connections differ from Llama's, so that it runs layer by layer.
    return write_row(folder, BY_NAME["olmo2"])


@pytest.mark.parametrize("way", EVERY_WAY)
def test_drafts_are_what_the_model_says_alone(folder: Path, way: Mapping[str, Any]) -> None:
    rows, said = DraftRows(open_draft(folder, **way)), alone(folder, way["linear"])
    first, second, third, fourth = (rows.add(ids) for ids in texts(9, 30, 1, 17))
    for step in (
        {first: (9, 5), second: (7, 0)},
        {second: (21, 0), third: (1, 1), fourth: (16, 7)},
        {second: (30, 3)},
        {fourth: (17, 4)},
    ):
        expected = [said(rows.texts[n][:end], count) for n, (end, count) in step.items()]
        assert rows.draft(step) == expected


@pytest.mark.parametrize("way", EVERY_WAY)
def test_rejected_drafts_leave_no_trace(folder: Path, way: Mapping[str, Any]) -> None:
    """Each round, some drafts are right, and the text goes on with another token."""
    rows, said = DraftRows(open_draft(folder, **way)), alone(folder, way["linear"])
    dice = np.random.default_rng(3)
    for ids in texts(6, 13, 22):
        rows.add(ids)
    for _ in range(6):
        counts = {number: int(dice.integers(0, 6)) for number in range(len(rows.texts))}
        step = {number: (len(rows.texts[number]), count) for number, count in counts.items()}
        drafts = rows.draft(step)
        expected = [said(rows.texts[number], count) for number, count in counts.items()]
        assert drafts == expected
        for text, drafted in zip(rows.texts, drafts, strict=True):
            right = drafted[: dice.integers(0, len(drafted) + 1)]
            text.extend([*right, int(dice.integers(0, VOCABULARY))])


@COMPILED
@pytest.mark.parametrize("fused", [True, False])
def test_bits_of_a_row_do_not_depend_on_the_others(llama: Path, fused: bool) -> None:
    long, *others = texts(40, 3, 12, 25)
    apart = DraftRows(open_draft(llama, linear="packed", fused=fused))
    one = apart.add(long)
    drafts = apart.draft({one: (40, 6)})
    together = DraftRows(open_draft(llama, linear="packed", fused=fused), seed=1)
    for ids in (*others, long):
        together.add(ids)
    together.draft({0: (3, 4), 3: (11, 0)})
    together.draft({1: (12, 2), 3: (12, 0)})
    assert together.draft({2: (25, 3), 3: (40, 6)})[1] == drafts[0]
    assert torch.equal(together.cached(3), apart.cached(one))


@pytest.mark.parametrize("way", EVERY_WAY)
def test_a_row_that_is_not_finite_has_no_drafts(
    llama: Path, tmp_path: Path, way: Mapping[str, Any]
) -> None:
    said = alone(llama, way["linear"])
    first, second, third = texts(9, 14, 6)
    bad = said(first, 3)[2]
    assert bad not in (*first, *second, *third, *said(first, 2), *said(second, 5))
    broken = DraftRows(open_draft(with_nan(llama, tmp_path, bad), **way))
    for ids in (first, second, [*third, bad]):
        broken.add(ids)
    # The first row drafts the token and cannot read it; the third cannot be read at all.
    drafts = broken.draft({0: (9, 6), 1: (14, 5), 2: (7, 2)})
    assert drafts == [[*said(first, 3), -1, -1, -1], said(second, 5), [-1, -1]]
    assert broken.model.pool.memory.data.view(broken.model.pool.dtype).isfinite().all()
    assert not broken.cached(2).any()
    # What is read again is as good as new, and so is what takes over the pages.
    broken.texts[2], broken.read[2] = [*third, *third], 0
    broken.texts[0].append(5)
    drafts = broken.draft({2: (12, 3), 0: (10, 1)})
    assert drafts == [said([*third, *third], 3), said([*first, 5], 1)]


def with_nan(source: Path, folder: Path, token: int) -> Path:
    """A copy of a model in which the embedding of a token is not finite."""
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if "model.embed_tokens.weight" in tensors:
            tensors["model.embed_tokens.weight"][token] = float("nan")
            save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("way", EVERY_WAY)
def test_a_pass_that_raises_leaves_no_number_behind(
    llama: Path, way: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class LateFault(Exception):
        pass

    rows, said = DraftRows(open_draft(llama, **way)), alone(llama, way["linear"])
    rows.add([3, 4, 5, 6, 9])
    rows.draft({0: (4, 1)})
    before = rows.cached(0)
    rows.add([7, 8, 9])
    run = ForwardContexts.score if way == WAYS["fused"] else ForwardContexts.score_by_layer

    def raises(*arguments: Any, **named: Any) -> None:
        run(*arguments, **named)
        raise LateFault

    with monkeypatch.context() as patched:
        patched.setattr(ForwardContexts, run.__name__, raises)
        with pytest.raises(LateFault):
            rows.draft({0: (5, 2), 1: (3, 1)})
    assert torch.equal(rows.cached(0), before)
    assert rows.model.pool.memory.data.view(torch.float32).count_nonzero() == before.count_nonzero()
    assert rows.draft({0: (5, 2), 1: (3, 1)}) == [said([3, 4, 5, 6, 9], 2), said([7, 8, 9], 1)]


def test_no_rows_and_rows_without_drafts(llama: Path) -> None:
    model = open_draft(llama, linear="plain")
    none = ints([])
    assert model.draft(none, none, none, np.empty((0, 0), np.int32), none).shape == (0, 0)
    rows = DraftRows(model)
    rows.add(range(10))
    assert rows.draft({0: (6, 0)}) == [[]]
    assert rows.draft({0: (10, 2)}) == [alone(llama, "plain")(range(10), 2)]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("falcon-h1", "without state layers"),
        ("deepseek-v2", "without latent layers"),
        ("gpt-oss", "without window layers"),
    ],
)
def test_a_model_that_caches_otherwise_cannot_draft(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        open_draft(write_row(tmp_path, BY_NAME[name]), linear="plain")


def test_a_model_with_windows_in_some_layers_cannot_draft(llama: Path) -> None:
    model = load(llama, dtype="float32", linear="plain")
    model = with_spec(llama, model, windowed(model.spec, (None, 20, None, 20)))
    with pytest.raises(ModelLoadError, match="without window layers"):
        DraftModel(model, page_tokens=PAGE_TOKENS, pages=PAGES)


@pytest.mark.parametrize(
    ("file", "change", "reason"),
    [
        (
            "config.json",
            lambda old: old.replace(b'"num_hidden_layers"', b'"gone"'),
            "num_hidden_layers missing",
        ),
        ("config.json", lambda old: old.replace(b"LlamaForCausalLM", b"NoForCausalLM"), "NoFor"),
        ("model.safetensors", lambda old: old.replace(b"layers.0.mlp", b"layers.0.mlq"), "mlq"),
        ("tokenizer.json", lambda old: old.replace(b'"a":', b'"zz_":'), "b'zz_'"),
    ],
    ids=["config", "architecture", "tensors", "tokenizer"],
)
def test_error_of_the_draft_model_names_its_setting(
    tmp_path: Path, file: str, change: Callable[[bytes], bytes], reason: str
) -> None:
    folder = tmp_path / "draft"
    shutil.copytree(embedded.path(), folder)
    changed = change((folder / file).read_bytes())
    assert changed != (folder / file).read_bytes()
    (folder / file).write_bytes(changed)
    settings = Settings(
        cache=CacheConfig(tokens_max=512),
        speculation=SpeculationConfig(algorithm="standalone", draft_model=str(folder)),
    )
    named = re.escape(f"speculation.draft_model = {folder}: ")
    with pytest.raises(CannotStart, match=f"^{named}.*{reason}"):
        open_engine(settings)


def test_the_engine_opens_both_models_with_pages_of_both() -> None:
    settings = Settings(
        cache=CacheConfig(tokens_max=512),
        speculation=SpeculationConfig(algorithm="standalone", draft_model="embedded"),
    )
    engine = open_engine(settings)
    target, draft = engine.core.pools.groups
    assert (target.kind, draft.kind) == (GroupKind.FULL, GroupKind.DRAFT)
    assert (target.layers, target.page_bytes) == (draft.layers, draft.page_bytes)
    assert (target.pages_total, draft.pages_total) == (8, 8)
    plan = engine.resolved
    assert plan is not None
    assert plan.cache_bytes.value == 8 * (target.page_bytes + draft.page_bytes)
    assert plan.draft.value is not None
    assert plan.draft.value.token_bytes.value * draft.page_tokens == draft.page_bytes
