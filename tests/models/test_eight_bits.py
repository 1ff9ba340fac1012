"""Caches in eight bits: every family against transformers whose keys and values are rounded alike.

Where a key lies near the border between two codes, their sums and ours, which differ in the last
bits and from processor to processor, may fall on either side of it: one number of the cache is off
by a step, and all tokens after it: in one text of six, of the family that is worst. So one of some
texts must agree as a whole within `LIMIT`; without the rounding each is off by several times that.
"""

from __future__ import annotations

import shutil
import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from tests.kernels.rows import ISAS
from tests.models import families, families_moe
from tests.models.parity import Saved, error, opened, save, texts
from tests.models.specs import BY_NAME
from tests.models.stepper import Stepper, logits_of, spy_on_logits
from tests.support.models import change_tensors, load, open_model
from torch import Tensor

from antiphon.kernels.kv import KvScales, quantize_fp8, read_keys, read_values
from antiphon.kernels.op import KernelUnavailable
from antiphon.model_worker.cache.groups import GroupKind
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.model.load import CACHE_DTYPES, scales_digest
from antiphon.model_worker.runner.model_runner import ModelRunner
from antiphon.model_worker.runner.opening import OpenModel
from antiphon.model_worker.runner.pools import cache_groups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

LIMIT = 0.01
"""Greatest difference of logits, in their standard deviations: of all but a few rows it is 1e-5."""
MISSED = 1.5
"""Times the limit by which a model that rounds nothing is off at least."""
TURNS = 4
"""Texts that are tried, until one agrees."""
ROWS = families.ROWS + families_moe.ROWS

needs_kernels = pytest.mark.skipif(not ISAS, reason="the CPU's own kernels are not built")


@dataclass(frozen=True)
class Rounding:
    """What keys and values of a reference become on their way.

    Attributes:
        grown: What its keys are multiplied by before they are kept, where ours multiply scores.
    """

    format: torch.dtype
    scales: Mapping[int, KvScales]
    grown: float = 1.0

    def of(self, kept: Tensor, layer: int, which: int) -> Tensor:
        scale = self.scales.get(layer, KvScales())[which] * (1.0 if which else self.grown)
        return quantize_fp8(kept, self.format, scale).to(kept.dtype) * scale


@contextmanager
def rounding(model: Any, how: Rounding) -> Iterator[None]:
    """Let a model of transformers round what a cache would keep.

    A latent is rounded as it leaves its norm; of its keys only what is rotated then.
    """
    module = sys.modules[type(model).__module__]
    eager: Callable[..., Any] = module.eager_attention_forward
    turned: int = getattr(model.config, "qk_rope_head_dim", 0)

    def attend(layer: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **said: Any):
        index = layer.layer_idx
        if turned:
            parts = key.split((key.shape[-1] - turned, turned), dim=-1)
            key = torch.cat((parts[0], how.of(parts[1], index, 0)), dim=-1)
        else:
            key, value = how.of(key, index, 0), how.of(value, index, 1)
        return eager(layer, query, key, value, *rest, **said)

    hooks = [
        layer.kv_a_layernorm.register_forward_hook(
            lambda _, __, out, index=layer.layer_idx: how.of(out, index, 0)
        )
        for layer in model.modules()
        if hasattr(layer, "kv_a_layernorm")
    ]
    module.eager_attention_forward = attend  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        module.eager_attention_forward = eager  # pyright: ignore[reportAttributeAccessIssue]
        for hook in hooks:
            hook.remove()


@torch.inference_mode()
def reference(
    saved: Saved, ids: list[int], format_: str, scales: Mapping[int, KvScales] | None = None
) -> Tensor:
    model: Any = saved.model
    how = Rounding(
        CACHE_DTYPES[format_], scales or {}, getattr(model.config, "key_multiplier", 1.0)
    )
    with rounding(model, how):
        return saved.logits(ids)


@pytest.fixture(scope="module", params=ROWS, ids=str)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save(BY_NAME["llama"], tmp_path_factory.mktemp("llama"))


def turns() -> Iterator[list[int]]:
    """The longest text, beginning at one of its tokens."""
    longest = texts()[-1]
    return (longest[first:] + longest[:first] for first in range(TURNS))


@pytest.mark.parametrize("format_", CACHE_DTYPES)
def test_logits_are_those_of_a_model_that_rounds_alike(saved: Saved, format_: str) -> None:
    def agrees(ids: list[int]) -> bool:
        ours = logits_of(opened(saved, cache_dtype=format_), ids, chunk=23)
        assert error(ours, saved.logits(ids)) > MISSED * LIMIT
        return error(ours, reference(saved, ids, format_)) < LIMIT

    assert any(map(agrees, turns()))


def test_a_cached_prefix_and_other_texts_change_nothing(saved: Saved) -> None:
    assert any(agrees_behind_a_cached_prefix(saved, ids) for ids in turns())


def agrees_behind_a_cached_prefix(saved: Saved, ids: list[int]) -> bool:
    model = opened(saved, cache_dtype="fp8_e4m3")
    seen = spy_on_logits(model.runner)
    batch = Stepper(model.runner, model.groups)
    first, second, _ = batch.add(ids[:40]), batch.add(ids), batch.add(texts()[1])
    batch.step({0: 36})
    batch.step({0: 4, 2: 11})
    batch.share(first, second, 36)
    batch.step({2: 7, 1: len(ids) - 36}, all_logits=True)
    return error(seen[-1][7:], reference(saved, ids, "fp8_e4m3")[36:]) < LIMIT


@pytest.mark.parametrize("linear", ["plain", "packed"] if ISAS else ["plain"])
@pytest.mark.parametrize("forced", [{}, {"attention.paged": "torch", "attention.heads": "torch"}])
@pytest.mark.parametrize("format_", CACHE_DTYPES)
def test_every_way_to_run_it_agrees(
    llama: Saved, linear: str, forced: dict[str, str], format_: str
) -> None:
    model = load(llama.folder, dtype="float32", linear=linear, cache_dtype=format_)
    groups = cache_groups(model.spec, model.build, page_tokens=4, pages=128)
    run = OpenModel(ModelRunner(model, groups, forced=forced), groups, model.spec)
    ours = logits_of(run, texts()[-1], chunk=17)
    assert error(ours, reference(llama, texts()[-1], format_)) < LIMIT


# Scales

SPELLINGS: dict[str, tuple[str, str | None]] = {
    "beside attention": ("self_attn.k_scale", "self_attn.v_scale"),
    "of attention's own": ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
    "of projections": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    "as what they give": ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    "one for both": ("self_attn.kv_scale", None),
}


def scaled(saved: Saved, folder: Path, names: tuple[str, str | None], *values: Tensor) -> Path:
    """A copy of a checkpoint with scales of each layer, of as many layers as there are values."""
    shutil.copytree(saved.folder, folder)
    tensors: dict[str, Tensor] = {}
    for layer, value in enumerate(values):
        for at, name in enumerate(names):
            if name is not None:
                one = value[at] if value.dim() else value
                tensors[f"model.layers.{layer}.{name}"] = one.clone()
    change_tensors(folder, lambda whole: whole | tensors)
    return folder


def opened_at(
    folder: Path, cache_dtype: str = "auto", *, scales: str = "", implementation: str = "auto"
) -> OpenModel:
    return open_model(
        folder,
        dtype="float32",
        implementation=implementation,
        cache_dtype=cache_dtype,
        cache_scales=scales,
    )


@needs_kernels
@pytest.mark.parametrize("names", SPELLINGS.values(), ids=SPELLINGS.keys())
def test_scales_are_those_of_the_checkpoint(
    llama: Saved, tmp_path: Path, names: tuple[str, str | None]
) -> None:
    # Far from one, so that small keys fall below the least number of the format without them.
    each = [torch.tensor([1e-3 * (layer + 1), 3e-4 * (layer + 2)]) for layer in range(3)]
    if names[1] is None:
        each = [pair[:1].repeat(2) for pair in each]
    folder = scaled(llama, tmp_path / "scaled", names, *each)
    model = opened_at(folder, cache_dtype="fp8_e4m3")
    scales = {layer: KvScales(*pair.tolist()) for layer, pair in enumerate(each)}
    ours = logits_of(model, texts()[-1], chunk=23)
    assert error(ours, reference(llama, texts()[-1], "fp8_e4m3", scales)) < LIMIT
    assert error(ours, reference(llama, texts()[-1], "fp8_e4m3")) > LIMIT
    assert model.kv_scales == scales_digest(scales) != ""
    # Who keeps the model's own numbers passes them over.
    plain = opened_at(folder)
    assert error(logits_of(plain, texts()[-1], chunk=23), llama.of_prompt) < llama.row.limit
    assert plain.kv_scales == ""


@needs_kernels
def test_a_file_of_scales_goes_before_the_checkpoint(llama: Saved, tmp_path: Path) -> None:
    folder = scaled(llama, tmp_path / "scaled", SPELLINGS["one for both"], torch.tensor(7.0))
    factors = {str(layer): 0.002 * (layer + 1) for layer in range(3)}
    said = {"model_type": "llama", "kv_cache": {"dtype": "float8_e4m3fn"}}
    said["kv_cache"]["scaling_factor"] = {"0": factors}  # pyright: ignore[reportArgumentType]
    file = tmp_path / "scales.json"
    file.write_bytes(msgspec.json.encode(said))
    model = opened_at(folder, cache_dtype="fp8_e4m3", scales=str(file))
    scales = {layer: KvScales(*[factors[str(layer)]] * 2) for layer in range(3)}
    assert model.kv_scales == scales_digest(scales)
    file.write_bytes(msgspec.json.encode({"kv_cache": {"scaling_factor": {"0": {"0": 1.0}}}}))
    with pytest.raises(ModelLoadError, match="layer 1 has no scale"):
        opened_at(folder, cache_dtype="fp8_e4m3", scales=str(file))
    with pytest.raises(ModelLoadError, match="No such file"):
        opened_at(folder, cache_dtype="fp8_e4m3", scales=str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.tensor(0.0), "is 0.0; it must be positive"),
        (torch.tensor(torch.nan), "is nan; it must be positive"),
        (torch.ones(2, 2), "has 2 elements instead of one"),
    ],
    ids=["zero", "nan", "many"],
)
def test_what_is_no_scale_is_refused(
    llama: Saved, tmp_path: Path, value: Tensor, message: str
) -> None:
    folder = scaled(llama, tmp_path / "scaled", SPELLINGS["beside attention"], value)
    with pytest.raises(ModelLoadError, match=message):
        load(folder, cache_dtype="fp8_e4m3")


@needs_kernels
def test_layers_without_a_scale_are_logged(
    llama: Saved, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = scaled(llama, tmp_path / "scaled", SPELLINGS["one for both"], torch.tensor(0.5))
    opened_at(folder, cache_dtype="fp8_e5m2")
    assert [record.__dict__["layers_without"] for record in caplog.records] == [2]
    caplog.clear()
    opened_at(folder)
    assert not caplog.records


# Pages


@needs_kernels
@pytest.mark.parametrize("name", ["llama", "deepseek-v2"])
def test_a_page_has_a_quarter_of_the_bytes(tmp_path: Path, name: str) -> None:
    folder = save(BY_NAME[name], tmp_path).folder
    here, wide = (opened_at(folder, cache_dtype=kept) for kept in ("fp8_e4m3", "auto"))
    group = here.groups[0]
    assert 4 * group.page_bytes == wide.groups[0].page_bytes
    pool = here.runner.pools[0]
    assert pool.memory.data.nbytes == group.page_bytes * group.pages_total


def test_what_a_failed_row_wrote_is_forgotten(llama: Saved) -> None:
    model = opened(llama, cache_dtype="fp8_e4m3")
    pool = model.runner.pools[0]
    keys, values = pool.layer(0)
    nan = torch.tensor([torch.nan]).to(keys.dtype).view(torch.uint8)
    for kept in (keys, values):
        kept.view(torch.uint8).copy_(nan)
    pool.zero(torch.arange(8))
    slots = torch.arange(keys.shape[0] * keys.shape[3])
    for kept in (read_keys(keys, slots), read_values(values, slots)):
        numbers = kept.float()
        assert (numbers[:8] == 0).all()
        assert numbers[8:].isnan().all()


# Who runs it, and who refuses


@needs_kernels
def test_modules_of_transformers_keep_it_too(llama: Saved, tmp_path: Path) -> None:
    each = [torch.tensor([2e-3, 5e-4])] * 3
    folder = scaled(llama, tmp_path / "scaled", SPELLINGS["beside attention"], *each)
    model = opened_at(folder, cache_dtype="fp8_e4m3", implementation="transformers")
    scales = dict.fromkeys(range(3), KvScales(*each[0].tolist()))
    ours = logits_of(model, texts()[-1], chunk=23)
    assert error(ours, reference(llama, texts()[-1], "fp8_e4m3", scales)) < LIMIT


def test_what_only_torch_could_read_does_not_start(llama: Saved) -> None:
    with pytest.raises(KernelUnavailable, match=r"attention\.paged, which this model needs"):
        open_model(llama.folder, dtype="float16", cache_dtype="fp8_e4m3")


def test_recurrent_states_stay_as_they_are(tmp_path: Path) -> None:
    row = BY_NAME["falcon-h1"]
    kept = opened(save(row, tmp_path), cache_dtype="fp8_e5m2").groups
    plain = opened(save(replace(row), tmp_path)).groups
    for group, wide in zip(kept, plain, strict=True):
        times = 1 if group.kind is GroupKind.STATE else 4
        assert times * group.page_bytes == wide.page_bytes
