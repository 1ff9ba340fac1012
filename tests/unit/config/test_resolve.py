"""Every decision follows from settings, card and device, and says why."""

from __future__ import annotations

import pytest

from antiphon.config.card import ModelCard, Sampling, Weights
from antiphon.config.device import Device
from antiphon.config.errors import ConfigError
from antiphon.config.load import load
from antiphon.config.model import Dtype
from antiphon.config.resolve import Plan, resolve, table

GIB = 1024**3
CARD = ModelCard(
    architecture="LlamaForCausalLM",
    hidden_size=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_size=32,
    vocabulary_size=100,
    context_tokens=512,
    dtype=Dtype.BFLOAT16,
    eos_ids=(2, 7),
    rope_theta=1e4,
    rope_kind="default",
    tied=True,
    sampling=Sampling(),
    weights=Weights(count=GIB // 2, bytes=GIB, dtype=Dtype.BFLOAT16),
)
DEVICE = Device(kind="cpu", cores=6, memory_bytes=5 * GIB)
PAGE_BYTES = 16 * 2 * 2 * 2 * 32 * 2


def decide(**said: str) -> Plan:
    return decide_on(DEVICE, **said)


def decide_on(device: Device, **said: str) -> Plan:
    environ = {f"ANTIPHON_{name.upper()}": value for name, value in said.items()}
    return resolve(load(environ=environ).settings, CARD, device)


def test_what_the_operator_left_open_is_decided() -> None:
    plan = decide()
    assert (plan.dtype.value, plan.dtype.reason) == (Dtype.BFLOAT16, "the checkpoint's")
    assert (plan.threads.value, plan.device.value) == (5, "cpu")
    assert plan.context_tokens.value == 512
    assert plan.eos_ids.value == (2, 7)
    assert plan.chunk_tokens.value == plan.step_tokens.value == 2048


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


def test_the_pool_holds_no_more_than_all_requests_at_full_length() -> None:
    plan = decide(batching__running_max="3")
    assert plan.cache_pages.value == 3 * 512 // 16
    assert plan.cache_pages.reason == "3 requests of full context"
    assert plan.cache_bytes.value == plan.cache_pages.value * PAGE_BYTES


def test_the_pool_is_a_share_of_what_the_weights_leave() -> None:
    plan = decide(batching__running_max="1000000000")
    assert plan.cache_pages.value == GIB // PAGE_BYTES
    assert (
        plan.cache_pages.reason == "cache.memory_ratio = 0.25 of 5.00 GiB free, 1.00 GiB of weights"
    )


def test_weights_in_a_wider_format_leave_less() -> None:
    plan = decide(batching__running_max="1000000000", model__dtype="float32")
    assert plan.cache_bytes.value == 3 * GIB // 4


def test_a_static_ratio_counts_weights_and_pool_together_and_knows_no_other_limit() -> None:
    plan = decide(batching__running_max="1000000000", cache__static_ratio="0.8")
    assert plan.cache_bytes.value == 3 * GIB
    assert plan.cache_pages.reason.startswith("cache.static_ratio = 0.8 of 5.00 GiB free")


def test_the_pool_has_a_limit_in_bytes() -> None:
    plan = decide(batching__running_max="1000000000", cache__bytes_max=str(GIB // 2))
    assert plan.cache_bytes.value == GIB // 2
    assert plan.cache_pages.reason.startswith("cache.bytes_max = 0.50 GiB")


def test_a_small_pool_shortens_the_context_and_the_batch() -> None:
    plan = decide(cache__tokens_max="160")
    assert plan.context_tokens.value == 160
    assert plan.context_tokens.reason.startswith("the pool holds no more of 512")
    assert (plan.running_max.value, plan.running_max.reason) == (10, "one page each")


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"model__context_tokens": "513"}, "513: the model was made for 512"),
        ({"cache__tokens_max": "15"}, "cache.tokens_max = 15: one page has 16 tokens"),
        ({"cache__static_ratio": "0.2"}, "no memory for one page"),
    ],
)
def test_what_cannot_be_is_refused(said: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decide(**said)


def test_weights_larger_than_memory_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no memory .* 0\.50 GiB free, 1\.00 GiB of weights"):
        decide_on(Device(kind="cpu", cores=1, memory_bytes=GIB // 2))


def test_the_table_gives_each_value_a_line_and_a_reason() -> None:
    plan = decide()
    lines = table(plan).splitlines()
    assert len(lines) == len(plan.__struct_fields__)
    by_name = {line.split()[0]: line for line in lines}
    assert by_name["eos_ids"].endswith("2 7  config.json and generation_config.json")
    assert by_name["dtype"].endswith("bfloat16  the checkpoint's")
