"""Which model can draft for another, where its files are, and what both take of the memory."""

from __future__ import annotations

import json
import re
import shutil
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.arguments import settings_of
from tests.unit.config.test_resolve import CARD, DEVICE, GIB, PAGE_BYTES, STEP_BYTES

from antiphon import embedded
from antiphon.config.errors import ConfigError
from antiphon.config.model import CacheDtype, Dtype
from antiphon.model_card.card import LatentCard, ModelCard, RecurrentStates, Weights
from antiphon.model_card.config_json import Task
from antiphon.model_card.served_model import draft_files, draft_settings, hub_models
from antiphon.resolve.draft import DraftCard, check_draft_tokenizer
from antiphon.resolve.resolved_config import ResolvedConfig, resolve, table
from antiphon.resolve.resolved_value import ResolvedValue

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MIB = 1024**2
DRAFT = replace(CARD, layers=1, weights=Weights(50 * MIB, 100 * MIB, Dtype.BFLOAT16))
HEAD = replace(
    DRAFT,
    architecture="LlamaForCausalLMEagle3",
    task=Task.DRAFT,
    target_hidden_size=CARD.hidden_size,
    context_tokens=64,
)
EAGLE3 = ("--speculative-algorithm", "EAGLE3")
OWN = ResolvedValue("antiphon", "a family of Antiphon's")


PAGES = ("--page-size", "16")


def decide(*arguments: str, draft: ModelCard = DRAFT, card: ModelCard = CARD) -> ResolvedConfig:
    line = ("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", "small")
    settings = settings_of(*line, *PAGES, *arguments)
    return resolve(settings, card, DEVICE, draft=DraftCard(draft, OWN))


def test_both_models_have_weights_activations_and_pages() -> None:
    alone = resolve(settings_of(*PAGES), CARD, DEVICE)
    plan = decide()
    draft = plan.draft.value
    assert draft is not None
    assert draft.model == ResolvedValue("small", "speculation.draft_model")
    assert (draft.dtype.value, draft.cache_dtype.value) == ("bfloat16", "bfloat16")
    assert draft.implementation == OWN
    assert (draft.weight_bytes.value, plan.weight_bytes.value) == (100 * MIB, GIB)
    assert draft.activation_bytes.value == plan.activation_bytes.value - STEP_BYTES == STEP_BYTES
    assert draft.token_bytes.value == PAGE_BYTES // 16 // 2
    assert alone.cache_bytes.value == alone.cache_pages.value * PAGE_BYTES
    assert plan.cache_bytes.value == plan.cache_pages.value * PAGE_BYTES * 3 // 2
    assert "512 bytes per token, and 256 of the draft model" in plan.cache_bytes.reason


def test_pages_of_both_share_the_memory() -> None:
    said = ("--mem-fraction-static", "0.3", "--max-running-requests", "100000")
    alone = resolve(settings_of(*PAGES, *said), CARD, DEVICE).cache_pages.value
    pages = decide(*said).cache_pages.value
    pool = int(5 * GIB * 0.3) - GIB
    assert alone == pool // PAGE_BYTES
    assert pages == (pool - 100 * MIB) // (PAGE_BYTES * 3 // 2)


def test_draft_model_that_does_not_fit_beside_the_model_is_refused() -> None:
    large = replace(DRAFT, weights=Weights(3 * GIB, 6 * GIB, Dtype.BFLOAT16))
    with pytest.raises(ConfigError, match="not enough memory for the weights"):
        decide(draft=large)


def test_draft_model_has_number_formats_of_its_own() -> None:
    single = replace(DRAFT, dtype=Dtype.FLOAT32)
    draft = decide(draft=single).draft.value
    assert draft is not None
    assert (draft.dtype.value, draft.cache_dtype.value) == (Dtype.FLOAT32, CacheDtype.FLOAT32)
    draft = decide("--kv-cache-dtype", "fp8_e4m3", "--quantization", "fp8").draft.value
    assert draft is not None
    assert draft.cache_dtype.value is CacheDtype.FP8_E4M3
    assert draft.quantization.value == "none"


def test_table_shows_the_draft_model() -> None:
    rows = {line.split()[0]: line.split()[1] for line in table(decide()).splitlines()}
    assert (rows["draft_model"], rows["draft_dtype"]) == ("small", "bfloat16")
    assert int(rows["draft_weight_bytes"]) == 100 * MIB
    rows = {line.split()[0]: line.split()[1] for line in table(of_none()).splitlines()}
    assert rows["draft"] == "None"


def of_none() -> ResolvedConfig:
    return resolve(settings_of(), CARD, DEVICE)


def test_draft_model_is_loaded_by_a_plan_of_its_own() -> None:
    single = replace(DRAFT, dtype=Dtype.FLOAT32)
    plan = decide("--model-impl", "transformers", draft=single)
    own = plan.of_draft()
    assert (own.dtype.value, own.implementation) == (Dtype.FLOAT32, OWN)
    assert (own.page_tokens, own.cache_pages) == (plan.page_tokens, plan.cache_pages)
    assert own.draft.value is None


def test_ranks_divide_the_experts_of_a_draft_model_by_width() -> None:
    line = ("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", "small")
    own = draft_settings(settings_of(*line, "--tp-size", "2", "--ep-size", "2"))
    assert own is not None
    assert (own.parallel.tp_size, own.parallel.ep_size) == (2, 1)
    assert decide("--tp-size", "2", "--ep-size", "2").of_draft().ep_ranks.value == 1


def test_plan_with_a_draft_model_survives_a_recording() -> None:
    plan = decide()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=ResolvedConfig) == plan


STATES = RecurrentStates(
    layers=1, attending=1, convolved=10, matrices=100, channels=10, parameters=10
)
LATENT = LatentCard(latent=8, content=8, position=8, value=8, query=None)


@pytest.mark.parametrize(
    ("draft", "reason"),
    [
        (replace(DRAFT, vocabulary_size=99), "its vocabulary has 99 tokens and that of the served"),
        (replace(DRAFT, states=STATES), "it has recurrent layers"),
        (replace(DRAFT, latent=LATENT), "latent attention (MLA) is not supported"),
        (replace(DRAFT, causal=False), "LlamaForCausalLM does not generate text token by token"),
        (replace(DRAFT, task=Task.SCORE), "LlamaForCausalLM does not generate text"),
        (
            replace(DRAFT, context_tokens=300),
            "its context of 300 tokens is shorter than the 512 that are served; set "
            "model.context_tokens (--context-length) to 300",
        ),
    ],
)
def test_draft_model_that_cannot_draft_is_refused(draft: ModelCard, reason: str) -> None:
    said = re.escape("speculation.draft_model = small: ") + ".*" + re.escape(reason)
    with pytest.raises(ConfigError, match=said):
        decide(draft=draft)


def test_draft_head_may_have_been_trained_on_shorter_texts() -> None:
    plan = decide(*EAGLE3, draft=HEAD)
    assert plan.context_tokens.value == decide().context_tokens.value > HEAD.context_tokens
    draft, own = plan.draft.value, decide().draft.value
    assert draft is not None
    assert own is not None
    assert draft.token_bytes == own.token_bytes
    assert draft.activation_bytes.value > own.activation_bytes.value


@pytest.mark.parametrize(
    ("arguments", "draft", "reason"),
    [
        ((), HEAD, "is a draft head; set speculation.algorithm = eagle3"),
        (EAGLE3, DRAFT, "LlamaForCausalLM is no draft head of EAGLE-3"),
        (EAGLE3, replace(HEAD, target_hidden_size=8), "a model with hidden states of 8 elements"),
        (EAGLE3, replace(HEAD, vocabulary_size=99), "its vocabulary has 99 tokens"),
    ],
)
def test_draft_head_that_does_not_fit_is_refused(
    arguments: tuple[str, ...], draft: ModelCard, reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"^speculation.draft_model = small: .*{reason}"):
        decide(*arguments, draft=draft)


def test_draft_head_is_not_served_alone() -> None:
    with pytest.raises(ConfigError, match=r"only drafts .* \(--speculative-draft-model-path\)"):
        resolve(settings_of(), HEAD, DEVICE)


@pytest.mark.parametrize(
    ("arguments", "draft", "reason"),
    [
        (("--model-linear", "packed"), replace(DRAFT, dtype=Dtype.FLOAT16), "float16"),
        (("--speculative-draft-model-quantization", "awq"), DRAFT, "awq"),
    ],
)
def test_format_that_only_the_draft_model_cannot_have_is_refused_by_its_name(
    arguments: tuple[str, ...], draft: ModelCard, reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"^speculation.draft_model = small: .*{reason}"):
        decide(*arguments, draft=draft)


def with_tokenizer(folder: Path, change: Callable[[dict[str, Any]], object]) -> str:
    """The embedded model with another tokenizer."""
    shutil.copytree(embedded.path(), folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_bytes())
    change(tokenizer)
    file.write_text(json.dumps(tokenizer))
    return str(folder)


def check_tokenizer(draft: str) -> None:
    line = ("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", draft)
    check_draft_tokenizer(settings_of(*line))


def test_draft_model_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    def swap(tokenizer: dict[str, Any]) -> None:
        vocabulary = tokenizer["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    draft = with_tokenizer(tmp_path / "swapped", swap)
    said = re.escape(f"speculation.draft_model = {draft}: ")
    with pytest.raises(ConfigError, match=f"{said}token .* of its tokenizer is b'b' and .* b'a'"):
        check_tokenizer(draft)


def test_tokenizer_of_the_draft_model_may_have_other_special_tokens(tmp_path: Path) -> None:
    def rename(tokenizer: dict[str, Any]) -> None:
        tokenizer["added_tokens"][0] |= {"content": "<|reserved|>", "special": True}

    def append(tokenizer: dict[str, Any]) -> None:
        vocabulary = tokenizer["model"]["vocab"]
        vocabulary["one more"] = max(vocabulary.values()) + 1_000

    check_tokenizer("embedded")
    check_tokenizer(with_tokenizer(tmp_path / "renamed", rename))
    check_tokenizer(with_tokenizer(tmp_path / "longer", append))


def test_draft_model_without_a_tokenizer_is_taken_by_its_vocabulary_size(tmp_path: Path) -> None:
    draft = with_tokenizer(tmp_path / "bare", lambda _: None)
    (tmp_path / "bare" / "tokenizer.json").unlink()
    check_tokenizer(draft)


def test_draft_model_may_be_as_short_as_what_is_served() -> None:
    short = replace(DRAFT, context_tokens=300)
    assert decide("--context-length", "300", draft=short).context_tokens.value == 300
    assert decide("--max-total-tokens", "256", draft=short).context_tokens.value == 256


@pytest.mark.parametrize(
    ("card", "arguments"), [(replace(CARD, task=Task.EMBED), ()), (CARD, ("--is-embedding",))]
)
def test_nothing_is_drafted_for_a_model_that_pools(
    card: ModelCard, arguments: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError, match="the served model generates no tokens"):
        decide(*arguments, card=card)


def test_files_of_the_draft_model_are_found_as_those_of_the_model(tmp_path: Path) -> None:
    line = ("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path")
    assert draft_files(settings_of()) is None
    overrides = ("--json-model-override-args", '{"rope_theta": 5}')
    files = draft_files(settings_of(*line, "embedded", *overrides))
    assert files is not None
    assert files.folder == embedded.path()
    assert not files.overridden
    with pytest.raises(ConfigError, match=f"speculation.draft_model: {tmp_path} has no config"):
        draft_files(settings_of(*line, str(tmp_path)))
    with pytest.raises(ConfigError, match=r"speculation.draft_model: .* no such file"):
        draft_files(settings_of(*line, str(tmp_path / "a.gguf")))
    assert hub_models(settings_of(*line, "owner/small")) == ("owner/small",)
