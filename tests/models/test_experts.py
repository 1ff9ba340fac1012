"""Experts cut over ranks, and what a config may not ask of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from tests.models.parity import check_logits, error, save, texts
from tests.models.quantization.made import Made
from tests.models.quantization.rows import BY_NAME as METHODS
from tests.models.rank import LoneRank
from tests.models.specs import BY_NAME
from tests.models.stepper import logits_of
from tests.support.models import change_config, change_tensors, load, open_model
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from antiphon.kernels.op import DeviceCapability
from antiphon.kernels.ops import select
from antiphon.kernels.routing import RoutingSpec
from antiphon.layers.context import AttentionParams, ForwardContext, LocalExperts
from antiphon.layers.methods import LinearMethod
from antiphon.layers.moe import (
    ClampedSwish,
    Experts,
    ExpertsSpec,
    MixtureOfExperts,
    SeparateExperts,
    StackedExperts,
)
from antiphon.layers.quantization.eight_bit import rounded_to_fp8
from antiphon.layers.sublayer import LayerBuildContext
from antiphon.layers.weights import BuildContext, SingleRank
from antiphon.model_card.card import read_card
from antiphon.model_worker.model.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

HIDDEN, COUNT, WIDTH = 24, 6, 20
SPECS = {
    "separate": ExpertsSpec(count=COUNT, width=WIDTH),
    "separate with biases": ExpertsSpec(count=COUNT, width=WIDTH, bias=True),
    "stacked": ExpertsSpec(
        count=COUNT,
        width=WIDTH,
        names=StackedExperts(),
        activation="gelu",
        apply_router_weight_on_input=True,
    ),
    "stacked in turn with biases": ExpertsSpec(
        count=COUNT,
        width=WIDTH,
        names=StackedExperts(interleaved=True),
        activation=ClampedSwish(alpha=1.7, limit=1.0),
        bias=True,
    ),
}


def no_attention(layer: int, heads: Tensor, params: AttentionParams) -> Tensor:
    raise AssertionError(f"experts do not attend: {layer}, {heads.shape}, {params}")


CONTEXT = ForwardContext(
    ops=select(DeviceCapability("cpu")),
    tp=SingleRank(),
    experts=LocalExperts(),
    attend=no_attention,
)


def site_of(rank: SingleRank, device: str, ep_ranks: int = 1) -> LayerBuildContext:
    build = BuildContext(rank, torch.float32, torch.device(device), ep_ranks=ep_ranks)
    method = LinearMethod.PLAIN
    return LayerBuildContext(layer=0, name="layer", hidden=HIDDEN, build=build, method=method)


def built(
    spec: ExpertsSpec, rank: int, ranks: int, tensors: Mapping[str, Tensor], ep_ranks: int = 1
) -> Experts:
    experts = Experts(site_of(LoneRank(rank, ranks), "cpu", ep_ranks), spec)
    taken = {source.name: source for source in experts.sources()}
    assert {name: source.shape for name, source in taken.items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    for name, source in taken.items():
        if source.load is not None:
            source.load(tensors[name])
    experts.pack()
    return experts


def drawn(spec: ExpertsSpec) -> dict[str, Tensor]:
    """Every tensor of a checkpoint of the spec."""
    site = site_of(SingleRank(), "meta")
    generator = torch.Generator().manual_seed(0)
    return {
        source.name: 0.3 * torch.randn(source.shape, generator=generator)
        for source in Experts(site, spec).sources()
    }


@pytest.mark.parametrize(("ranks", "ep_ranks"), [(2, 1), (2, 2), (4, 2), (3, 3)])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_what_ranks_make_sums_to_what_one_makes(
    spec: ExpertsSpec, ranks: int, ep_ranks: int
) -> None:
    tensors, generator = drawn(spec), torch.Generator().manual_seed(1)
    x = torch.randn(30, HIDDEN, generator=generator)
    scores = torch.randn(30, COUNT, generator=generator)
    chosen, shares = CONTEXT.ops.route(scores, None, RoutingSpec(top_k=2))
    alone = built(spec, 0, 1, tensors)(CONTEXT, x, chosen, shares)
    parts = [
        built(spec, rank, ranks, tensors, ep_ranks)(CONTEXT, x, chosen, shares)
        for rank in range(ranks)
    ]
    assert float(alone.std()) > 0.1
    torch.testing.assert_close(sum(parts), alone)
    assert not torch.allclose(parts[0], alone)


def test_a_rank_reads_its_own_experts_alone() -> None:
    site = site_of(LoneRank(1, 2), "meta", ep_ranks=2)
    read = [source.name for source in Experts(site, SPECS["separate"]).sources() if source.load]
    assert len(read) == 3 * COUNT // 2
    assert {int(name.split(".")[3]) for name in read} == {3, 4, 5}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "kept", [{"linear": "packed"}, {"quantization": "fp8", "quantized": "fp8"}], ids=str
)
def test_whole_experts_of_ranks_sum_to_those_of_one(
    tmp_path: Path, kept: dict[str, Any], ranks: int
) -> None:
    """In one call of the kernels, and by the operation that multiplies by all of a rank."""
    row = BY_NAME["mixtral"]
    save(replace(row, fields={**row.fields, "num_local_experts": 8}), tmp_path)
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(2))

    def made(**said: Any) -> list[Tensor]:
        decoder = load(tmp_path, dtype="float32", **kept, **said).own_decoder
        layers = [layer._feed_forward for layer in decoder.layers]
        return [layer(CONTEXT, x) for layer in layers if isinstance(layer, MixtureOfExperts)]

    alone, parts = made(), [made(tp=LoneRank(rank, ranks), ep_ranks=ranks) for rank in range(ranks)]
    for whole, *each in zip(alone, *parts, strict=True):
        torch.testing.assert_close(sum(each), whole)


@pytest.mark.parametrize(
    ("family", "ep_ranks", "message"),
    [("mixtral", 4, "6 are not divisible by 4 expert-parallel"), ("qwen2", 2, "has no experts")],
)
def test_experts_that_cannot_be_spread_are_refused(
    tmp_path: Path, family: str, ep_ranks: int, message: str
) -> None:
    save(BY_NAME[family], tmp_path)
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path, tp=LoneRank(0, ep_ranks), ep_ranks=ep_ranks)


def test_separate_and_stacked_tensors_are_the_same_experts() -> None:
    separate = SPECS["separate"]
    tensors = drawn(separate)
    names = SeparateExperts()

    def of(name: str, number: int) -> Tensor:
        return tensors[f"layer.{name.format(number)}.weight"].T

    fused = {
        "layer.mlp.experts.gate_up_proj": torch.stack(
            [torch.cat((of(names.gate, n), of(names.up, n)), dim=1) for n in range(COUNT)]
        ),
        "layer.mlp.experts.down_proj": torch.stack([of(names.down, n) for n in range(COUNT)]),
    }
    x, chosen = torch.randn(9, HIDDEN), torch.arange(9)[:, None] % COUNT
    one = built(separate, 0, 1, tensors)(CONTEXT, x, chosen, torch.ones(9, 1))
    other = built(replace(separate, names=StackedExperts()), 0, 1, fused)
    assert torch.equal(one, other(CONTEXT, x, chosen, torch.ones(9, 1)))


@pytest.mark.parametrize("linear", sorted({*LinearMethod} - {LinearMethod.TILED}))
def test_experts_are_kept_in_every_way(tmp_path: Path, linear: str) -> None:
    saved = save(BY_NAME["deepseek-v3"], tmp_path)
    if linear in ("plain", "packed", "grouped", "fp8"):  # none of these weights is stored in fp8
        check_logits(saved, linear)
    else:
        with pytest.raises(AssertionError):
            check_logits(saved, linear)


@pytest.mark.parametrize("name", ["glm4-moe", "deepseek-v3"])
def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path, name: str) -> None:
    saved = save(BY_NAME[name], tmp_path)
    card = read_card(tmp_path)
    further = {"model.layers.3.eh_proj.weight": torch.ones(64, 128)}
    change_tensors(tmp_path, lambda tensors: tensors | further)
    check_logits(saved, "plain")
    assert read_card(tmp_path).weights.count == card.weights.count


BLOCK = (16, 32)
"""Of fp8 weights: nothing here is as long as the usual 128."""


def says(folder: Path) -> Tensor:
    model = open_model(folder, dtype="float32")
    return logits_of(model, texts()[-1], chunk=23)


def rewrite(folder: Path, tensors: dict[str, Tensor], quantization: object) -> None:
    change_tensors(folder, lambda _: {n: tensor.contiguous() for n, tensor in tensors.items()})
    if quantization is not None:
        change_config(folder, quantization_config=quantization)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def made_by(
    make: Callable[[Tensor], Made], folder: Path
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a model with linears of a method, and plain ones of the same numbers."""
    plain: dict[str, Tensor] = {}
    stored: dict[str, Tensor] = {}
    for name, weight in tensors_of(folder).items():
        exact = ("embed_tokens.weight", "lm_head.weight", "gate.weight")
        if weight.dim() != 2 or name.endswith(exact):
            plain[name] = stored[name] = weight
            continue
        made, linear = make(weight.float()), name.removesuffix(".weight")
        plain[name] = made.whole
        stored |= {linear + suffix: part for suffix, part in made.stored.items()}
    return stored, plain


MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        *("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
    ],
}


def in_mxfp4(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of gpt-oss with other experts: as every published one has them, and plain."""
    tensors, generator = tensors_of(folder), torch.Generator().manual_seed(0)
    stored: dict[str, Tensor] = {}
    plain = dict(tensors)
    for name, dense in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = dense
            continue
        count, inputs, outputs = dense.shape
        shape = (count, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 126, shape, dtype=torch.uint8, generator=generator)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        assert plain[name].shape == dense.shape
    return stored, plain


def test_stacked_experts_in_mxfp4(tmp_path: Path) -> None:
    save(BY_NAME["gpt-oss"], tmp_path)
    stored, plain = in_mxfp4(tmp_path)
    rewrite(tmp_path, plain, None)
    want = says(tmp_path)
    rewrite(tmp_path, stored, MXFP4)
    assert torch.equal(says(tmp_path), want)


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_experts_are_rounded_to_fp8_while_loading(tmp_path: Path, name: str) -> None:
    """Separate or stacked, an expert's outputs have a scale each; where they stay so, too."""
    save(BY_NAME[name], tmp_path)
    stored = tensors_of(tmp_path)
    converted = open_model(tmp_path, dtype="float32", quantization="fp8")
    kept = open_model(tmp_path, dtype="float32", quantization="fp8", quantized="fp8")
    got, narrow = (logits_of(model, texts()[-1], chunk=23) for model in (converted, kept))
    plain = dict(stored)
    exact = ("embed_tokens.weight", "lm_head.weight", "gate.weight", "router.weight", "bias")
    for tensor, weight in stored.items():
        if weight.dim() < 2 or tensor.endswith(exact):
            continue
        outputs = weight if weight.dim() == 2 else weight.mT
        codes, scales = rounded_to_fp8(outputs.flatten(0, -2))
        rounded = (codes.float() * scales).view(outputs.shape)
        plain[tensor] = rounded if weight.dim() == 2 else rounded.mT
    rewrite(tmp_path, plain, None)
    want = says(tmp_path)
    assert error(got, want) < 1e-6
    for layer in kept.runner._model.own_decoder.layers:
        block = layer._feed_forward
        assert isinstance(block, MixtureOfExperts)
        stack = block._experts._stack
        assert stack is not None
        assert [matrix[0].dtype for matrix in stack] == [torch.float8_e4m3fn] * 2
    # Some tokens are routed elsewhere.
    assert 0 < float(((narrow - want).std(dim=-1) / want.std()).median()) < 0.2


@pytest.mark.parametrize("name", ["deepseek-v3", "mixtral"])
def test_separate_experts_and_latents_in_blocks_of_fp8(tmp_path: Path, name: str) -> None:
    """As DeepSeek V3 is published: routers stay in plain numbers without a word in the config."""
    save(BY_NAME[name], tmp_path)

    def make(weight: Tensor) -> Made:
        high, wide = (-(-size // block) for size, block in zip(weight.shape, BLOCK, strict=True))
        scales = 0.5 + torch.rand(high, wide, generator=torch.Generator().manual_seed(1))
        each = scales.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
        each = each[: weight.shape[0], : weight.shape[1]]
        rounded = (weight / each).to(torch.float8_e4m3fn)
        return Made({".weight": rounded, ".weight_scale_inv": scales}, rounded.float() * each)

    stored, plain = made_by(make, tmp_path)
    rewrite(tmp_path, plain, None)
    want = says(tmp_path)
    quantization = {"quant_method": "fp8", "weight_block_size": list(BLOCK)}
    rewrite(tmp_path, stored, {**quantization, "activation_scheme": "dynamic", "fmt": "e4m3"})
    assert error(says(tmp_path), want) < 1e-6


NVFP4 = {tool: METHODS[f"nvfp4 of {tool}"] for tool in ("ModelOpt", "compressed-tensors")}


def in_nvfp4(folder: Path, tool: str = "ModelOpt") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Write a model with the numbers of NVFP4; the same as a tool stores it, and its config."""
    row = NVFP4[tool]
    stored, plain = made_by(row.make, folder)
    rewrite(folder, plain, None)
    assert row.config is not None
    return stored, {**row.config, row.skipped: ["lm_head"]}


@pytest.mark.parametrize("tool", NVFP4)
def test_separate_experts_in_nvfp4(tmp_path: Path, tool: str) -> None:
    """Each linear of an expert has a scale of its tensor; those that run as one keep their own."""
    save(BY_NAME["mixtral"], tmp_path)
    stored, quantization = in_nvfp4(tmp_path, tool)
    want = says(tmp_path)
    rewrite(tmp_path, stored, quantization)
    assert torch.equal(says(tmp_path), want)
    in_groups = open_model(tmp_path, dtype="float32", quantized="grouped")
    # Sums of the CPU kernels run in another order than torch's.
    assert error(logits_of(in_groups, texts()[-1], chunk=23), want) < BY_NAME["mixtral"].limit


@pytest.mark.parametrize("ep_ranks", [1, 2])
def test_ranks_have_their_part_of_experts_in_nvfp4(tmp_path: Path, ep_ranks: int) -> None:
    save(BY_NAME["mixtral"], tmp_path)
    stored, quantization = in_nvfp4(tmp_path)
    rewrite(tmp_path, stored, quantization)
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(2))

    def made(**said: Any) -> list[Tensor]:
        decoder = load(tmp_path, dtype="float32", quantized="grouped", **said).own_decoder
        layers = [layer._feed_forward for layer in decoder.layers]
        return [layer(CONTEXT, x) for layer in layers if isinstance(layer, MixtureOfExperts)]

    parts = [made(tp=LoneRank(rank, 2), ep_ranks=ep_ranks) for rank in range(2)]
    for whole, *each in zip(made(), *parts, strict=True):
        torch.testing.assert_close(sum(each), whole)


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        ("weight_scale_2", lambda one: -one, "weight_scale_2 -.* is not a positive number"),
        ("weight_scale", lambda one: -one.float(), "weight_scale float32, not float8_e4m3fn"),
        ("weight_scale", lambda one: (-one.float()).to(one.dtype), "negative or no number"),
        ("weight_scale", lambda one: one[:-1], r"weight_scale \(\d+, \d+\), not"),
        ("weight_scale_2", None, "missing: .*weight_scale_2"),
    ],
)
def test_tensors_of_an_expert_in_nvfp4_that_do_not_fit_are_named(
    tmp_path: Path, suffix: str, change: Callable[[Tensor], Tensor] | None, message: str
) -> None:
    save(BY_NAME["mixtral"], tmp_path)
    stored, quantization = in_nvfp4(tmp_path)
    (name, *_) = sorted(each for each in stored if "experts.3." in each and each.endswith(suffix))
    tensor = stored.pop(name)
    rewrite(tmp_path, stored if change is None else stored | {name: change(tensor)}, quantization)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load(tmp_path)
    assert name.rpartition(".")[0] in str(caught.value)


def test_stacked_experts_in_nvfp4_are_refused(tmp_path: Path) -> None:
    save(BY_NAME["gpt-oss"], tmp_path)
    row = NVFP4["ModelOpt"]
    assert row.config is not None
    skipped = ["*self_attn*", "*router*", "lm_head"]
    change_config(tmp_path, quantization_config={**row.config, row.skipped: skipped})
    message = "mlp.experts.gate_up_proj: stacked experts are not read in NVFP4"
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path)
