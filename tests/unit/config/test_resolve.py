"""Every decision follows from settings, card and device, and says why."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from antiphon.config.cluster import differing
from antiphon.config.errors import ConfigError
from antiphon.config.load import load
from antiphon.config.model import CacheDtype, Dtype, LinearFormat
from antiphon.model_card.card import LatentCard, ModelCard, RecurrentStates, Weights
from antiphon.model_card.config_json import Task
from antiphon.model_card.layer_heads import LayerHeads
from antiphon.model_card.pooling import Pooling, PoolMode
from antiphon.resolve.device import HostDevice, PlanMemory, detect_device
from antiphon.resolve.memory import NO_PLANS, PROMPT_LOGITS_BYTES_MAX
from antiphon.resolve.resolved_config import ResolvedConfig, resolve, table
from antiphon.resolve.resolved_value import ResolvedValue
from antiphon.wire.sampling import SamplingDefaults
from antiphon.wire.tokenize import PoolingCard

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


GIB = 1024**3
CARD = ModelCard(
    architecture="LlamaForCausalLM",
    hidden_size=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_size=32,
    mlp_width=256,
    vocabulary_size=100,
    context_tokens=512,
    dtype=Dtype.BFLOAT16,
    eos_ids=(2, 7),
    rope_theta=1e4,
    rope_kind="default",
    tied=True,
    sampling=SamplingDefaults(),
    weights=Weights(count=GIB // 2, bytes=GIB, dtype=Dtype.BFLOAT16),
)
DEVICE = HostDevice(kind="cpu", cores=6, memory_bytes=5 * GIB)
UNCOMPILED = replace(DEVICE, lacking="there is no compiler")
PAGE_BYTES = 16 * 2 * 2 * 2 * 32 * 2
STEP_BYTES = 2048 * 2 * (3 * 64 + 16 * 32 + 4 * 256)
"""Activations of a step of the default size."""


def decide(device: HostDevice = DEVICE, card: ModelCard = CARD, /, **said: str) -> ResolvedConfig:
    said = {"cluster__page_tokens": "16", **said}
    environ = {f"ANTIPHON_{name.upper()}": value for name, value in said.items()}
    return resolve(load(environ=environ).settings, card, device)


def decide_with_eyes(device: HostDevice = DEVICE, /, **said: str) -> ResolvedConfig:
    said = {"cluster__page_tokens": "16", **said}
    environ = {f"ANTIPHON_{name.upper()}": value for name, value in said.items()}
    return resolve(load(environ=environ).settings, CARD, device, sees=True)


def test_what_the_operator_left_open_is_decided() -> None:
    plan = decide()
    assert plan.dtype == ResolvedValue(Dtype.BFLOAT16, "the checkpoint's")
    assert (plan.threads.value, plan.device.value, plan.context_tokens.value) == (6, "cpu", 512)
    assert (plan.eos_ids.value, plan.step_tokens.value) == ((2, 7), 2048)
    assert (plan.chunk_tokens.value, plan.fill_tokens.value) == (512, 256)
    assert (plan.mixed.value, plan.whole_prompts.value) == (True, False)
    assert (plan.cache_states.value, plan.state_bytes.value) == (0, 0)
    assert plan.pooling == ResolvedValue(None, "a generative model")
    assert plan.prefix == ResolvedValue(value=True, reason="cache.prefix")
    assert not decide(cache__prefix="0").prefix.value


def test_processor_with_tiles_takes_more_prompts_at_once() -> None:
    device = replace(DEVICE, arithmetic={"isa": "amx"})
    assert decide(device).fill_tokens.value == 1024
    assert decide(device).chunk_tokens.value == 1024
    assert decide(device, batching__tokens_max="300").chunk_tokens.value == 300
    assert decide(device).alone_tokens.value == 2048
    assert decide(device, batching__chunk_tokens="512").alone_tokens.value == 512
    assert decide(device, batching__chunk_tokens="-1").alone_tokens.value == 512, "the context"
    assert decide().alone_tokens == ResolvedValue(512, "as beside other requests")
    assert decide(device, batching__fill_tokens="100").fill_tokens.value == 100
    assert decide(device, batching__tokens_max="300").fill_tokens.value == 300
    floats = decide(device, model__dtype="float32")
    assert (floats.chunk_tokens.value, floats.fill_tokens.value) == (512, 256)
    assert floats.alone_tokens.value == 512


def test_core_is_left_to_the_others_where_threads_spin_or_steps_are_short() -> None:
    assert decide().threads.reason.startswith("all cores")
    why = "one fewer than the 6 cores: torch threads spin while waiting"
    assert decide(model__linear="plain").threads == ResolvedValue(5, why)
    small = replace(CARD, weights=Weights(1 << 20, 2 << 20, Dtype.BFLOAT16))
    short = decide(DEVICE, small).threads
    why = "one fewer than the 6 cores: steps of this model are short"
    assert short == ResolvedValue(5, why)
    alone = replace(DEVICE, cores=1)
    assert decide(alone, small).threads.value == 1


def test_linears_are_packed_where_the_kernels_run_but_not_in_float16() -> None:
    assert decide().linear.value is LinearFormat.PACKED
    plain = ResolvedValue(LinearFormat.PLAIN, "there is no compiler")
    assert decide(UNCOMPILED).linear == plain
    with pytest.raises(ConfigError, match="int8: there is no compiler"):
        decide(UNCOMPILED, model__linear="int8")
    assert decide(UNCOMPILED, model__linear="plain").linear.reason == "model.linear"
    assert decide(model__dtype="float16").linear.value is LinearFormat.PLAIN
    with pytest.raises(ConfigError, match=r"packed: .* float16"):
        decide(model__dtype="float16", model__linear="packed")


def test_what_bits_depend_on_is_named_part_by_part() -> None:
    device = replace(DEVICE, arithmetic={"isa": "avx2", "kernels": "1a"})
    assert decide(device).bits.value == "dtype:bfloat16,linear:packed,isa:avx2,kernels:1a"
    other = decide(device, model__linear="int8", model__dtype="float32").bits.value
    assert differing(decide(device).bits.value, other) == ("dtype", "linear")


def test_deterministic_inference_is_refused_where_torch_multiplies() -> None:
    assert decide().deterministic.value is False
    assert decide(model__deterministic="true").deterministic.value is True
    assert decide(model__deterministic="true", model__linear="int8").deterministic.value is True
    for device, said, reason in (
        (DEVICE, {"model__linear": "plain"}, "model.linear"),
        (DEVICE, {"model__dtype": "float16"}, "float16"),
        (UNCOMPILED, {}, "there is no compiler"),
    ):
        with pytest.raises(ConfigError, match=rf"model.deterministic: results of torch.*{reason}"):
            decide(device, model__deterministic="true", **said)


def test_rounded_weights_take_a_byte_each() -> None:
    assert decide(model__linear="int8").weight_bytes.value == GIB // 2
    assert decide(model__linear="packed").weight_bytes.value == GIB
    untied = replace(CARD, tied=False)
    plan = decide(DEVICE, untied, model__linear="int8_dynamic")
    assert plan.weight_bytes.value == GIB // 2 + 100 * 64


def test_what_the_operator_said_is_taken_and_named() -> None:
    plan = decide(
        model__dtype="float32",
        model__threads="2",
        model__context_tokens="100",
        batching__chunk_tokens="64",
        cache__tokens_max="1000",
    )
    assert (plan.dtype.value, plan.dtype.reason) == (Dtype.FLOAT32, "model.dtype")
    assert (plan.threads.value, plan.threads.reason) == (2, "model.threads")
    assert (plan.context_tokens.value, plan.chunk_tokens.value) == (100, 64)
    assert (plan.cache_pages.value, plan.cache_pages.reason) == (62, "cache.tokens_max = 1000")
    assert plan.cache_tokens == 992


def test_prompts_that_are_never_cut_have_steps_for_the_longest_or_for_several() -> None:
    plan = decide(batching__chunk_tokens="-1", batching__tokens_max="100")
    assert plan.whole_prompts.value
    assert plan.step_tokens.value == plan.chunk_tokens.value == 512
    assert plan.activation_bytes.reason == "512 tokens per step"
    plan = decide(batching__chunk_tokens="-1", batching__fill_tokens="4000")
    assert (plan.step_tokens.value, plan.step_tokens.reason) == (4000, "batching.fill_tokens")
    assert plan.chunk_tokens.value == 512


def test_everybody_who_runs_fits_in_a_step() -> None:
    plan = decide(batching__running_max="100", batching__tokens_max="10")
    assert plan.running_max.value == plan.chunk_tokens.value == plan.fill_tokens.value == 10


def test_pool_is_bounded_by_bytes_and_by_all_requests_at_full_length() -> None:
    plan = decide(batching__running_max="3")
    why = "enough for 3 requests of full context length"
    assert plan.cache_pages == ResolvedValue(3 * 512 // 16, why)
    assert plan.cache_bytes.value == plan.cache_pages.value * PAGE_BYTES
    plan = decide(batching__running_max="1000000000", cache__bytes_max=str(GIB // 2))
    assert plan.cache_bytes.value == GIB // 2
    assert plan.cache_pages.reason.startswith("cache.bytes_max = 0.50 GiB")


def test_pool_is_a_share_of_what_weights_and_the_largest_step_leave() -> None:
    plan = decide(batching__running_max="1000000000")
    logits = 3 * 2048 * 100 * 4
    assert (plan.memory_bytes.value, plan.weight_bytes.value) == (5 * GIB, GIB)
    assert (plan.activation_bytes.value, plan.logit_bytes.value) == (STEP_BYTES, logits)
    assert plan.scored_bytes.value == logits, "all tokens of a step may be a prompt's"
    rest = 5 * GIB - GIB - STEP_BYTES - 2 * logits
    assert plan.cache_pages.value == rest // 4 // PAGE_BYTES
    assert plan.cache_pages.reason == (
        "cache.memory_ratio = 0.25 of 5.00 GiB free, weights 1.00 GiB, "
        "activations 0.01 GiB, logits 0.00 GiB, prompt logits 0.00 GiB"
    )
    plan = decide(batching__running_max="1000000000", model__dtype="float32")
    logits = plan.logit_bytes.value + plan.scored_bytes.value
    rest = 5 * GIB - 2 * GIB - 2 * STEP_BYTES - logits
    assert plan.cache_pages.value == rest // 4 // (2 * PAGE_BYTES)


def test_embeddings_of_images_are_counted_beside_the_pool() -> None:
    many = {"batching__running_max": "1000000000"}
    plan, media = decide(**many), decide_with_eyes(**many)
    assert plan.media_bytes == ResolvedValue(0, "the model takes no images")
    assert media.media_bytes.reason == "a quarter of 3.99 GiB, what is left"
    less = plan.cache_pages.value - media.cache_pages.value
    assert less == pytest.approx(media.media_bytes.value / 4 / PAGE_BYTES, abs=1)
    assert "embeddings of images" in media.cache_pages.reason
    few = decide_with_eyes(batching__media_bytes_max="1000")
    assert few.media_bytes == ResolvedValue(1000, "batching.media_bytes_max")
    device = HostDevice(kind="cuda", cores=6, memory_bytes=80 * GIB, lacking="it is a GPU")
    beside = decide_with_eyes(device, model__device="cuda")
    assert beside.media_bytes == ResolvedValue(
        GIB, "batching.media_bytes_max, in the memory of the machine"
    )
    assert beside.cache_pages == decide(device, model__device="cuda").cache_pages


def test_logits_are_counted_for_the_rows_and_the_prompt_pieces_of_a_step() -> None:
    assert decide(batching__running_max="7").logit_bytes.value == 3 * 7 * 100 * 4
    plan = decide(batching__running_max="99", batching__tokens_max="10")
    assert plan.logit_bytes.value == 3 * 10 * 100 * 4
    device = replace(DEVICE, memory_bytes=50 * GIB)
    card = replace(CARD, vocabulary_size=128 * 1024)
    scored = decide(device, card).scored_bytes.value
    assert scored == 3 * PROMPT_LOGITS_BYTES_MAX == 96 * 1024**2


def test_static_ratio_counts_weights_and_pool_and_leaves_room_for_a_step() -> None:
    plan = decide(batching__running_max="3", cache__bytes_max="1000", cache__static_ratio="0.8")
    assert plan.cache_bytes.value == 3 * GIB
    assert plan.cache_pages.reason.startswith("cache.static_ratio = 0.8 of 5.00 GiB free")
    with pytest.raises(ConfigError) as caught:
        decide(cache__static_ratio="1")
    assert str(caught.value).startswith(
        "cache.static_ratio = 1.0 (--mem-fraction-static): its pool of 4.00 GiB exceeds the "
        "3.99 GiB left by weights and the largest step; lower it: 5.00 GiB free, weights 1.00 GiB"
    )


def test_pool_of_a_gpu_is_most_of_what_weights_and_a_step_leave() -> None:
    device = HostDevice(kind="cuda", cores=6, memory_bytes=80 * GIB, lacking="it is a GPU")
    said = {"model__device": "cuda", "batching__running_max": "1000000000"}
    plan = decide(device, **said)
    left = 80 * GIB - plan.weight_bytes.value - plan.activation_bytes.value
    left -= plan.logit_bytes.value + plan.scored_bytes.value
    pages = int(left * 0.9) // PAGE_BYTES
    assert plan.cache_pages.value == pages
    assert plan.cache_pages.reason.startswith("cache.memory_ratio = 0.9 of 80.00 GiB free, weights")
    assert plan.memory_bytes == ResolvedValue(80 * GIB, "free memory of cuda")
    limited = decide(device, cache__bytes_max=str(GIB), **said)
    assert limited.cache_bytes.value == GIB
    static = decide(device, cache__static_ratio="0.5", **said)
    assert static.cache_bytes.value == 40 * GIB - plan.weight_bytes.value
    with pytest.raises(ConfigError, match=r"static\): its pool of 79.00 GiB exceeds"):
        decide(device, cache__static_ratio="1", **said)


def test_workspaces_of_attention_are_counted_beside_the_pool() -> None:
    """Those of FlashInfer, unless the settings name another backend."""
    without = HostDevice(kind="cuda", cores=6, memory_bytes=80 * GIB, lacking="it is a GPU")
    device = replace(without, plan_memory=PlanMemory(3 * GIB, GIB // 8))
    said = {"model__device": "cuda", "batching__running_max": "1000000000"}
    reason = "workspace and plans of FlashInfer, which attends if it has the modules"
    none, plan = decide(without, **said), decide(device, **said)
    assert (none.plan_bytes, plan.plan_bytes) == (NO_PLANS, ResolvedValue(3 * GIB, reason))
    less = none.cache_pages.value - plan.cache_pages.value
    assert less == pytest.approx(0.9 * 3 * GIB / PAGE_BYTES, abs=1)
    assert ", plans of attention 3.00 GiB" in plan.cache_pages.reason
    assert "plans of attention" not in none.cache_pages.reason
    named = decide(device, model__attention_backend="flashinfer", **said)
    assert named.cache_pages == plan.cache_pages
    triton = decide(device, model__attention_backend="triton", **said)
    assert (triton.plan_bytes, triton.cache_pages) == (NO_PLANS, none.cache_pages)


def test_each_graph_with_latent_attention_has_a_plan_of_its_own() -> None:
    device = HostDevice(kind="cuda", cores=6, memory_bytes=80 * GIB, lacking="it is a GPU")
    device = replace(device, plan_memory=PlanMemory(3 * GIB, GIB // 8))
    latent = LatentCard(latent=16, content=8, position=8, value=8, query=None)
    card, said = replace(CARD, latent=latent), {"model__device": "cuda"}
    plan = decide(device, card, batching__graph_sizes="1 2 4 8", **said)
    assert plan.plan_bytes.value == 3 * GIB + GIB // 2
    assert plan.plan_bytes.reason.endswith("; of 4 graphs 0.50 GiB")
    assert decide(device, card, batching__graphs="0", **said).plan_bytes.value == 3 * GIB


def test_what_runs_on_the_cpu_only_is_refused_by_its_setting() -> None:
    device = replace(DEVICE, kind="interpreter", lacking="model.device is interpreter")
    with pytest.raises(ConfigError) as caught:
        decide(device, model__device="interpreter", model__implementation="transformers")
    assert str(caught.value) == (
        "model.device = interpreter: model.implementation = transformers runs on cpu only"
    )


def test_experts_are_spread_over_ranks_on_every_device() -> None:
    said = {"parallel__tp_size": "4", "parallel__ep_size": "2"}
    assert decide(DEVICE, **said).ep_ranks == ResolvedValue(2, "parallel.ep_size")
    device = HostDevice(kind="cuda", cores=8, memory_bytes=80 * GIB, lacking="it is a GPU")
    reason = "parallel.ep_size; each with a slice of the experts: not yet run on a GPU"
    assert decide(device, model__device="cuda", **said).ep_ranks == ResolvedValue(2, reason)
    one = decide(device, model__device="cuda", parallel__tp_size="4")
    assert one.ep_ranks == ResolvedValue(1, "parallel.ep_size")
    shared = replace(device, kind="interpreter")
    plan = decide(shared, model__device="interpreter", **said)
    assert plan.ep_ranks == ResolvedValue(2, "parallel.ep_size")


def test_a_gpu_captures_no_decode_steps_of_a_model_that_pools() -> None:
    device = HostDevice(kind="cuda", cores=6, memory_bytes=80 * GIB, lacking="it is a GPU")
    settings = load(environ={"ANTIPHON_MODEL__DEVICE": "cuda"}).settings
    card = PoolingCard(width=64)
    pooling = Pooling(task=Task.EMBED, mode=PoolMode.LAST, normalize=True, card=card)
    plan = resolve(settings, CARD, device, pooling)
    assert plan.graph_sizes == ResolvedValue((), "nothing is generated")


def test_a_gpu_drafts_in_turn() -> None:
    device = HostDevice(kind="cuda", cores=6, memory_bytes=80 * GIB, lacking="it is a GPU")
    said = {"model__device": "cuda", "speculation__draft_model": "small"}
    plan = decide(device, **said, speculation__algorithm="standalone")
    assert plan.overlap == ResolvedValue(value=False, reason="a draft model follows each step")
    assert plan.graph_sizes.value
    plan = decide(device, **said, speculation__algorithm="eagle3")
    reason = "a draft head reads what enters single layers"
    assert plan.graph_sizes == ResolvedValue((), reason)
    plan = decide(device, **said, speculation__algorithm="standalone", parallel__tp_size="2")
    assert (plan.ranks.value, plan.overlap.value) == (2, False)
    assert plan.graph_sizes.value


def test_ranks_on_gpus_have_the_memory_of_one_each() -> None:
    device = HostDevice(kind="cuda", cores=8, memory_bytes=80 * GIB, lacking="it is a GPU")
    said = {"model__device": "cuda:2", "parallel__tp_size": "2", "batching__running_max": "2"}
    plan = decide(device, **said)
    assert plan.memory_bytes == ResolvedValue(80 * GIB, "free memory of cuda:2")
    assert plan.threads.value == 4
    assert plan.ranks.value == 2
    assert plan.ranks.reason.endswith("which sum by NCCL: not yet run on a GPU")
    inside = "up to 2 running requests; sums over ranks inside: not yet run on a GPU"
    assert plan.graph_sizes == ResolvedValue((1, 2), inside)
    assert plan.prefill_graph_sizes.reason == "batching.prefill_graph_sizes: none are listed"
    said["batching__prefill_graph_sizes"] = "64 9999 32"
    plan = decide(device, **said)
    assert plan.prefill_graph_sizes == ResolvedValue((32, 64), "batching.prefill_graph_sizes")
    for off in ("graphs", "decode_graphs", "prefill_graphs"):
        plan = decide(device, **said, **{f"batching__{off}": "0"})
        none = ResolvedValue[tuple[int, ...]]((), f"batching.{off}")
        assert (plan.graph_sizes == none) == (off != "prefill_graphs")
        assert (plan.prefill_graph_sizes == none) == (off != "decode_graphs")
    staged = decide(device, **said | {"parallel__pp_size": "2"})
    assert staged.stages.reason.endswith("linked by NCCL: not yet run on a GPU")
    for sizes in (staged.graph_sizes, staged.prefill_graph_sizes):
        assert sizes == ResolvedValue((), "stages are launched layer by layer")
    grouped = decide(device, **said | {"parallel__attn_dp_size": "2"})
    for sizes in (grouped.graph_sizes, grouped.prefill_graph_sizes):
        assert sizes == ResolvedValue((), "attention groups are launched layer by layer")
    limited = decide(device, **said, model__memory_bytes=str(20 * GIB))
    assert limited.memory_bytes.value == 10 * GIB
    shared = replace(device, kind="interpreter")
    plan = decide(shared, **said | {"model__device": "interpreter"})
    assert plan.memory_bytes.value == 40 * GIB
    assert plan.ranks.reason.endswith("which sum by gloo")


def test_layers_that_read_what_another_stage_has_are_not_staged() -> None:
    shared = LayerHeads(kv_heads=2, head_size=32, kv_layer=0)
    sharing = replace(CARD, layer_heads=(replace(shared, kv_layer=None), shared))
    for card in (sharing, replace(CARD, per_layer_width=16, per_layer_vocabulary=100)):
        with pytest.raises(ConfigError, match=r"parallel\.pp_size: a model with per-layer"):
            decide(DEVICE, card, parallel__pp_size="2")
        assert decide(DEVICE, card, parallel__tp_size="2").ranks.value == 2


def test_deterministic_inference_on_a_gpu_multiplies_in_tiles() -> None:
    gpu = replace(DEVICE, kind="interpreter", lacking="model.device is interpreter")
    gpu = replace(gpu, lacking_fp8=None)
    asked = {"model__device": "interpreter", "model__deterministic": "1"}
    plan = decide(gpu, **asked)
    assert (plan.linear.value, plan.quantized.value) == (LinearFormat.TILED, LinearFormat.TILED)
    assert plan.deterministic.value
    assert decide(gpu, model__device="interpreter", model__linear="tiled").linear.value == "tiled"
    for linear in ("plain", "fp8"):
        with pytest.raises(ConfigError, match=r"model\.linear is plain"):
            decide(gpu, **asked, model__linear=linear)
    with pytest.raises(ConfigError, match="tiled: runs on a GPU only; packed is the same"):
        decide(model__linear="tiled")
    ranked = decide(gpu, **asked, parallel__tp_size="2")
    assert ranked.deterministic.value
    assert ranked.ranks.reason.endswith("which add in their order what they gather by gloo")
    assert decide(gpu, **asked, parallel__pp_size="2").deterministic.value


def test_phases_of_attention_have_one_backend() -> None:
    both = {"prefill_attention_backend": "triton", "decode_attention_backend": "triton"}
    plan = decide(**{f"model__{name}": value for name, value in both.items()})
    assert plan.forced == {"attention.paged": "triton"}
    assert decide().forced == {}
    with pytest.raises(ConfigError) as caught:
        decide(model__attention_backend="torch", model__decode_attention_backend="cpu")
    assert str(caught.value) == (
        "model.attention_backend = torch, model.decode_attention_backend = cpu: prefills and "
        "decodes are rows of one pass, which one kernel attends in"
    )


def test_small_pool_shortens_the_context_and_the_batch() -> None:
    plan = decide(cache__tokens_max="160")
    assert plan.context_tokens.value == 160
    assert plan.context_tokens.reason.startswith("limited by the KV cache pool, of 512")
    assert plan.running_max == ResolvedValue(10, "at least one page per request")


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            {"model__context_tokens": "513"},
            r"513 \(--context-length\): must not exceed the model's 512",
        ),
        (
            {"cache__tokens_max": "15"},
            "cache.tokens_max = 15: must be at least one page, 16 tokens",
        ),
        ({"cache__static_ratio": "0.2"}, "not enough memory for one page"),
        ({"cache__scales": "s.json"}, r"cache\.scales = s\.json: only fp8 has scales"),
        (
            {"cache__tokens_max": "100000000"},
            r"tokens_max = 100000000: 47.68 GiB do not fit: 5.00 GiB free, weights 1.00 GiB",
        ),
    ],
)
def test_what_cannot_be_is_refused(said: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decide(**said)


def test_weights_larger_than_memory_are_refused() -> None:
    numbers = r"not enough memory .* 0\.50 GiB free, weights 1\.00 GiB"
    with pytest.raises(ConfigError, match=numbers):
        decide(HostDevice(kind="cpu", cores=1, memory_bytes=GIB // 2))


def test_worker_takes_no_more_cores_and_memory_than_it_may() -> None:
    plan = decide(model__cores="2", model__memory_bytes=str(2 * GIB))
    assert (plan.threads.value, plan.memory_bytes.value) == (2, 2 * GIB)
    assert plan.memory_bytes.reason == "model.memory_bytes, of 5.00 GiB free"
    beyond = decide(model__cores="99", model__memory_bytes=str(99 * GIB))
    assert (beyond.threads.value, beyond.memory_bytes.value) == (6, 5 * GIB)
    with pytest.raises(ConfigError, match=r"0\.50 GiB free.*; model\.memory_bytes = 536870912"):
        decide(model__memory_bytes=str(GIB // 2))


def test_table_gives_each_value_a_line_and_a_reason() -> None:
    plan = decide()
    lines = table(plan).splitlines()
    assert len(lines) == len(plan.__struct_fields__)
    by_name = {line.split()[0]: line for line in lines}
    assert by_name["eos_ids"].endswith("2 7  config.json, generation_config.json and the tokenizer")
    assert by_name["dtype"].endswith("bfloat16  the checkpoint's")


STATES = RecurrentStates(
    layers=3, attending=1, convolved=96, matrices=1000, channels=32, parameters=5000
)
HYBRID = replace(CARD, layers=4, states=STATES)
STATE_BYTES = 3 * (96 * 2 + 1000 * 4)


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_cache_in_eight_bits_holds_twice_the_tokens(dtype: str) -> None:
    room = {"cache__bytes_max": str(40 * PAGE_BYTES)}
    wide, plan = decide(**room), decide(**room, cache__dtype=dtype)
    assert (wide.cache_dtype.value, wide.cache_pages.value) == (CacheDtype.BFLOAT16, 40)
    assert (plan.cache_dtype.value, plan.cache_pages.value) == (dtype, 80)
    assert plan.cache_bytes == ResolvedValue(40 * PAGE_BYTES, "256 bytes per token")
    assert plan.cache_dtype.reason == "cache.dtype; converted as attention reads it"
    assert plan.cache_scales.reason == "from the checkpoint; 1.0 for layers without one"
    assert f",cache:{dtype}" in plan.bits.value
    assert "cache:" not in wide.bits.value
    assert decide(cache__dtype=dtype, cache__scales="s.json").cache_scales.value == "s.json"


def test_a_page_of_an_odd_number_of_tokens_takes_the_room_of_one_more() -> None:
    room = {"cache__bytes_max": str(40 * PAGE_BYTES), "batching__running_max": "1000"}
    plan = decide(**room, cluster__page_tokens="5")
    assert plan.cache_pages.value == 40 * 16 // 6
    assert plan.cache_bytes.value == plan.cache_pages.value * PAGE_BYTES * 6 // 16


def test_states_do_not_shrink_with_a_cache_in_eight_bits() -> None:
    plain, plan = decide(DEVICE, HYBRID), decide(DEVICE, HYBRID, cache__dtype="fp8_e5m2")
    each = [one.state_bytes.value // one.cache_states.value for one in (plain, plan)]
    assert each[0] == each[1] == STATE_BYTES


def test_cache_dtype_is_the_models_or_one_that_the_kernels_read() -> None:
    assert decide(cache__dtype="bfloat16").cache_dtype.value is CacheDtype.BFLOAT16
    allowed = r"cache\.dtype = bfloat16: must be auto, fp8 or the model's float32"
    with pytest.raises(ConfigError, match=allowed):
        decide(cache__dtype="bfloat16", model__dtype="float32")
    lacking = "cache.dtype = fp8_e4m3: needs .*: there is no compiler"
    with pytest.raises(ConfigError, match=lacking):
        decide(UNCOMPILED, cache__dtype="fp8_e4m3")
    with pytest.raises(ConfigError, match="do not support float16"):
        decide(cache__dtype="fp8_e5m2", model__dtype="float16")
    gpu = replace(DEVICE, kind="cuda", lacking="model.device is cuda")
    assert decide(gpu, model__device="cuda", cache__dtype="fp8_e4m3").cache_dtype.value.eight_bits
    both_ways = replace(CARD, causal=False)
    with pytest.raises(ConfigError, match="no KV cache"):
        decide(DEVICE, both_ways, cache__dtype="fp8_e4m3")


def test_states_share_the_pool_with_pages_unless_the_operator_says_how_many() -> None:
    plan = decide(
        DEVICE, HYBRID, cache__bytes_max=str(19 * STATE_BYTES * 10), cache__states_ratio="0.9"
    )
    assert (plan.cache_states.value, plan.state_bytes.value) == (90, 90 * STATE_BYTES)
    pages = 100 * STATE_BYTES // (PAGE_BYTES // 2)  # one layer of the two that CARD has
    assert plan.cache_pages.value == pages
    assert plan.running_max == ResolvedValue(30, "3 states per request")
    plan = decide(DEVICE, HYBRID, cache__states_max="9")
    assert plan.cache_states == ResolvedValue(9, "cache.states_max = 9")
    assert plan.running_max.value == 3
    assert decide(DEVICE, HYBRID, cache__states_max="2").running_max.value == 1
    in_turn = decide(DEVICE, HYBRID, cache__states_max="9", batching__overlap="false")
    assert in_turn.running_max == ResolvedValue(4, "2 states per request")


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"cache__states_max": "1"}, "a request needs 2 states"),
        ({"cache__states_max": "9999999"}, "a request needs 2 states"),
        ({"cache__bytes_max": str(STATE_BYTES)}, "not enough memory for the 2 states"),
        ({"cache__checkpoint_tokens": "100"}, "must be a multiple of cluster.page_tokens = 16"),
    ],
)
def test_states_that_cannot_be_are_refused(said: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decide(DEVICE, HYBRID, **said)


def test_model_that_looks_ahead_takes_whole_prompts_and_keeps_nothing() -> None:
    encoder = replace(
        CARD, architecture="BertModel", causal=False, context_tokens=4096, task=Task.EMBED
    )
    plan = decide(DEVICE, encoder, batching__chunk_tokens="64")
    both_ways = "attention is bidirectional"
    assert (plan.whole_prompts.value, plan.whole_prompts.reason) == (True, both_ways)
    assert plan.step_tokens.value == plan.chunk_tokens.value == 4096
    assert not plan.prefix.value
    assert plan.prefix.reason.startswith(both_ways)
    assert plan.cache_bytes.value == 0
    assert plan.cache_tokens == 4096 * load(environ={}).settings.batching.running_max
    assert "only count tokens" in plan.cache_pages.reason
    assert (plan.logit_bytes.value, plan.scored_bytes.value) == (0, 0)
    assert decide(DEVICE, encoder, model__deterministic="1").deterministic.value


@pytest.mark.parametrize(
    ("mode", "cached"), [("last", True), ("cls", False), ("mean", False), ("end", False)]
)
def test_cache_is_of_use_where_the_last_token_stands_for_a_text(mode: str, cached: bool) -> None:
    pooling = Pooling(
        task=Task.EMBED, mode=PoolMode(mode), normalize=True, card=PoolingCard(width=64)
    )
    plan = resolve(load(environ={}).settings, CARD, DEVICE, pooling)
    assert plan.prefix.value is cached
    assert plan.pooling.value == pooling
    assert plan.fill_tokens.value == 1024  # no decode waits for its steps
    assert plan.grammar == ResolvedValue("none", "nothing is generated")
    assert f"{mode}, normalised" in table(plan)


MIB = 1024**2


def machine(tmp_path: Path, *folders: str, cgroup: str) -> Path:
    """A machine with 100 MiB available, and a process in these groups."""
    for folder in ("proc/self", *(f"groups/{folder}" for folder in folders)):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemFree: 1 kB\nMemAvailable: 102400 kB\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text(cgroup)
    return tmp_path


@pytest.fixture
def nested(tmp_path: Path) -> Path:
    """A container in a container."""
    return machine(tmp_path, "outer/inner", cgroup="0::/outer/inner\n")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Version 1 of cgroups, where a container names its path on the host."""
    lines = "9:name=systemd:/docker/a\n4:memory:/docker/a\n1:cpu,cpuacct:/docker/a\n0::/docker/a\n"
    return machine(tmp_path, "memory", "cpu,cpuacct", cgroup=lines)


Limit = tuple[str, int | str, int, int]
"""A group, its limit, what it uses, and how much of that is reclaimable."""


def memory_bytes(at: Path, limits: Sequence[Limit], names: tuple[str, str, str]) -> int:
    limit_file, used_file, stat = names
    for group, limit, used_bytes, reclaimable_bytes in limits:
        folder = at / "groups" / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / limit_file).write_text(f"{limit}\n")
        (folder / used_file).write_text(f"{used_bytes}\n")
        (folder / "memory.stat").write_text(f"{stat} {reclaimable_bytes}\n")
    return detect_device(at / "proc", at / "groups").memory_bytes


@pytest.mark.parametrize(
    ("limits", "free"),
    [
        pytest.param([("", "max", 1, 0)], 100 * MIB, id="no limit"),
        pytest.param(
            [("outer", 50 * MIB, 30 * MIB, 4 * MIB), ("outer/inner", 90 * MIB, MIB, 0)],
            24 * MIB,
            id="the tightest, without its file cache",
        ),
        pytest.param([("outer", MIB, 2 * MIB, 0)], 0, id="over its limit"),
    ],
)
def test_memory_is_what_tightest_group_leaves(nested: Path, limits: list[Limit], free: int) -> None:
    names = ("memory.max", "memory.current", "anon 1\ninactive_file")
    assert memory_bytes(nested, limits, names) == free


@pytest.mark.parametrize(
    ("limits", "free"),
    [
        pytest.param([("memory", 50 * MIB, 30 * MIB, 5 * MIB)], 25 * MIB, id="its own limit"),
        pytest.param(
            [("memory", 2**63 - 4096, MIB, 0), ("memory/docker/a", 9 * MIB, 2 * MIB, 0)],
            7 * MIB,
            id="the tightest, where all are seen",
        ),
        pytest.param([("memory", 2**63 - 4096, MIB, 0)], 100 * MIB, id="a number beyond all"),
    ],
)
def test_memory_is_what_version_1_groups_leave(old: Path, limits: list[Limit], free: int) -> None:
    stat = "inactive_file 1\ntotal_inactive_file"
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", stat)
    assert memory_bytes(old, limits, names) == free


def test_cores_are_those_that_this_process_may_use(nested: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    assert detect_device(nested / "proc", nested / "groups").cores == cores
    (nested / "groups" / "outer" / "cpu.max").write_text("50000 100000\n")
    assert detect_device(nested / "proc", nested / "groups").cores == 1


@pytest.mark.parametrize(("quota_us", "limited"), [("100000", True), ("-1", False)])
def test_quota_of_version_1_limits_the_cores(old: Path, quota_us: str, limited: bool) -> None:
    cpu = old / "groups" / "cpu,cpuacct"
    (cpu / "cpu.cfs_quota_us").write_text(f"{quota_us}\n")
    (cpu / "cpu.cfs_period_us").write_text("100000\n")
    cores = detect_device(old / "proc", old / "groups").cores
    assert cores == (1 if limited else len(os.sched_getaffinity(0)))


def test_this_machine_has_something() -> None:
    device = detect_device()
    assert device.cores >= 1
    assert device.memory_bytes > 0
