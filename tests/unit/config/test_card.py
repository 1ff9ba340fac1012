"""A model card says what the files of a model do, and names what it cannot read."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.models.tiny import CONFIG as LLAMA
from tests.models.tiny import write_llama

from antiphon import embedded
from antiphon.config.errors import ConfigError
from antiphon.config.model import Dtype
from antiphon.model_card.card import ModelCard, read_card
from antiphon.model_card.config_json import (
    Factors,
    Task,
    head_parameters,
    is_bidirectional,
    longrope_factors,
    task_of,
    unused_prefixes,
    with_factors,
)
from antiphon.model_card.pooling import Dense, Pooling, PoolingActivation, PoolMode, read_pooling
from antiphon.model_card.vocabulary import tokenizer_eos_ids
from antiphon.wire.sampling import SamplingDefaults
from antiphon.wire.tokenize import PoolingCard

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "torch_dtype": "float16",
    "eos_token_id": 2,
}


def write_model(folder: Path, config: dict[str, object], **files: dict[str, object]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def write_weights(file: Path, **shapes: tuple[str, list[int], int]) -> None:
    """Write a header, and no tensors: nobody may read them."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape, size) in shapes.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text)


def test_card_holds_what_the_files_say(tmp_path: Path) -> None:
    write_model(
        tmp_path,
        CONFIG | {"head_dim": 32, "rope_scaling": {"rope_type": "llama3"}, "rope_theta": 5e5},
        generation_config={"eos_token_id": [2, 7], "temperature": 0.6, "top_k": 20},
    )
    write_weights(tmp_path / "a.safetensors", x=("F16", [100, 64], 12800), y=("F32", [8], 32))
    write_weights(tmp_path / "b.safetensors", z=("F16", [], 2))
    card = read_card(tmp_path)
    assert (card.layers, card.heads, card.kv_heads, card.head_size) == (2, 4, 2, 32)
    assert (card.vocabulary_size, card.context_tokens, card.dtype) == (100, 512, Dtype.FLOAT16)
    assert (card.eos_ids, card.rope_kind, card.rope_theta) == ((2, 7), "llama3", 5e5)
    assert card.sampling == SamplingDefaults(temperature=0.6, top_k=20)
    assert (card.weights.count, card.weights.bytes) == (6409, 12834)
    assert card.kv_bytes(Dtype.FLOAT32) == 2 * 2 * 2 * 32 * 4


def test_sampling_defaults_that_no_request_may_have_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path, CONFIG, generation_config={"repetition_penalty": 2.5})
    named = r"generation_config\.json: .* at `\$\.repetition_penalty`"
    with pytest.raises(ConfigError, match=named):
        read_card(tmp_path)


def test_encoder_keeps_nothing_and_its_positions_begin_behind_padding(tmp_path: Path) -> None:
    said = {
        "architectures": ["XLMRobertaForSequenceClassification"],
        "model_type": "xlm-roberta",
        "max_position_embeddings": 514,
        "id2label": {"0": "good", "1": "bad", "2": "odd"},
        "tie_word_embeddings": True,
    }
    card = read_card(write_model(tmp_path, {**CONFIG, **said}))
    assert (card.causal, card.kv_bytes(Dtype.FLOAT32), card.context_tokens) == (False, 0, 512)
    assert (card.task, card.labels, card.tied) == (Task.SCORE, ("good", "bad", "odd"), False)
    assert read_card(write_model(tmp_path, CONFIG)).causal


def test_labels_without_names_have_those_of_transformers(tmp_path: Path) -> None:
    classifier = {**CONFIG, "architectures": ["LlamaForSequenceClassification"]}
    card = read_card(write_model(tmp_path, {**classifier, "num_labels": 3}))
    assert card.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert len(read_card(write_model(tmp_path, classifier)).labels) == 2
    reward = {**CONFIG, "architectures": ["Qwen2ForRewardModel"]}
    assert read_card(write_model(tmp_path, reward)).labels == ("reward",)


def test_positions_and_masks_beside_plain_weights_are_none(tmp_path: Path) -> None:
    write_model(tmp_path, CONFIG)
    write_weights(tmp_path / "a.safetensors", x=("F32", [8], 32), position_ids=("I64", [4], 32))
    weights = read_card(tmp_path).weights
    assert (weights.count, weights.quantized) == (8, 0)


def test_what_a_config_leaves_out_has_its_usual_meaning(tmp_path: Path) -> None:
    left_out = ("num_key_value_heads", "torch_dtype", "eos_token_id")
    bare = {name: value for name, value in CONFIG.items() if name not in left_out}
    card = read_card(write_model(tmp_path, bare))
    assert (card.kv_heads, card.head_size, card.dtype, card.eos_ids) == (4, 16, Dtype.FLOAT32, ())
    assert card.weights.count == 0
    write_weights(tmp_path / "a.safetensors", x=("BF16", [2], 4))
    assert read_card(tmp_path).dtype is Dtype.BFLOAT16


def test_newer_names_are_read_too(tmp_path: Path) -> None:
    newer = {"dtype": "bfloat16", "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}
    card = read_card(write_model(tmp_path, CONFIG | {"torch_dtype": None} | newer))
    assert (card.dtype, card.rope_theta, card.rope_kind) == (Dtype.BFLOAT16, 1e6, "default")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": "64"}, "Expected `int`, got `str` - at `$.hidden_size`"),
        ({"architectures": []}, "architectures names none"),
        ({"torch_dtype": "float8"}, "dtype = 'float8': must be one of bfloat16, float16, float32"),
    ],
)
def test_meaningless_config_is_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: " + re.escape(message)):
        read_card(write_model(tmp_path, CONFIG | change))


def test_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: No such file"):
        read_card(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, (5).to_bytes(8, "little") + b"{}"])
def test_weights_that_are_none_are_refused(tmp_path: Path, content: bytes) -> None:
    write_model(tmp_path, CONFIG)
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"a\.safetensors: (not a safetensors file|cut short)"):
        read_card(tmp_path)


def test_embedded_model_has_a_card_and_a_tokenizer_of_the_same_ends() -> None:
    card: ModelCard = read_card(embedded.path())
    assert card.architecture == "LlamaForCausalLM"
    assert card.context_tokens >= 2048
    assert card.eos_ids
    assert set(tokenizer_eos_ids(embedded.path())) == set(card.eos_ids)


@pytest.mark.parametrize(
    "said",
    [
        {"per_layer_config": {"1": {"head_dim": 32, "num_key_value_heads": 1}}},
        {
            "layer_types": ["sliding_attention", "full_attention"],
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
        },
        # The last layer sees all, where the file names no types of layers.
        {"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    ],
)
def test_layers_with_other_heads_are_all_counted(tmp_path: Path, said: dict[str, object]) -> None:
    config = CONFIG | {"model_type": "gemma4_text", "num_hidden_layers": 2, "head_dim": 16} | said
    write_model(tmp_path, config)
    kv_heads = 2
    card = read_card(tmp_path)
    assert card.kv_bytes(Dtype.BFLOAT16) == 2 * (2 * kv_heads * 16 + 2 * 32)
    # Each of two ranks has a copy of the only head of the second layer.
    assert card.kv_bytes(Dtype.BFLOAT16, 2) == 2 * (kv_heads * 16 + 2 * 32)


def test_layers_that_share_keys_and_values_are_counted_once(tmp_path: Path) -> None:
    said = {"global_head_dim": 32, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
    config = CONFIG | {"model_type": "gemma4_text", "num_hidden_layers": 4, "head_dim": 16}
    config |= {"layer_types": ["sliding_attention", "full_attention"] * 2} | said
    write_model(tmp_path, config)
    card, own = read_card(tmp_path), 2 * (2 * 2 * 16 + 2 * 2 * 32)
    assert [each.kv_layer for each in card.layer_heads] == [None, None, 0, 1]
    assert card.kv_bytes(Dtype.BFLOAT16) == own
    assert card.with_full_heads().kv_bytes(Dtype.BFLOAT16) == 2 * own
    assert card.per_layer_width == 4 * 256


def test_keys_and_values_that_no_layer_reads_are_not_counted(tmp_path: Path) -> None:
    config = CONFIG | {"model_type": "gemma3n_text", "num_hidden_layers": 7, "head_dim": 16}
    write_model(tmp_path, config | {"num_kv_shared_layers": 2})
    own, shared = (f"model.language_model.layers.{n}.self_attn.k_proj.weight" for n in (4, 5))
    write_weights(tmp_path / "a.safetensors", **{own: ("F16", [8], 16), shared: ("F16", [9], 18)})
    assert read_card(tmp_path).weights.count == 8


def test_gemma3n_ends_in_a_layer_of_any_type(tmp_path: Path) -> None:
    config = CONFIG | {"model_type": "gemma3n_text", "num_hidden_layers": 7, "head_dim": 16}
    write_model(tmp_path, config | {"num_kv_shared_layers": 2})
    card = read_card(tmp_path)
    assert [each.kv_layer for each in card.layer_heads] == [None] * 5 + [3, 3]
    write_model(tmp_path, config | {"num_kv_shared_layers": 3})
    with pytest.raises(ConfigError, match="num_kv_shared_layers = 3: no layer before them"):
        read_card(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("LlamaForCausalLM", Task.GENERATE),
        ("GPT2LMHeadModel", Task.GENERATE),
        ("MistralModel", Task.EMBED),
        ("XLMRobertaModel", Task.EMBED),
        ("Qwen2ForRewardModel", Task.SCORE),
        ("BertForSequenceClassification", Task.SCORE),
    ],
)
def test_name_ends_in_its_task(architecture: str, task: Task) -> None:
    assert task_of(architecture) is task


def test_architecture_implies_attention_unused_prefixes_and_head_parameters() -> None:
    encoders = ("BertModel", "RobertaModel", "XLMRobertaModel", "ModernBertModel")
    assert all(map(is_bidirectional, encoders))
    assert not is_bidirectional("LlamaForSequenceClassification")
    assert "pooler." in unused_prefixes("BertModel")
    assert unused_prefixes("BertForSequenceClassification") == ()
    assert unused_prefixes("LlamaModel") == ()
    assert head_parameters("LlamaForCausalLM", 8, 2) == 0
    assert head_parameters("LlamaForSequenceClassification", 8, 3) == 24
    assert head_parameters("BertForSequenceClassification", 8, 3) == 64 + 24
    assert head_parameters("Qwen2ForRewardModel", 8, 1) == 64 + 8


TOKENS = ["<s>", "</s>", "<|eom_id|>", "<tool>"]


def write(folder: Path, card: dict[str, object] | None, tokens: list[str] = TOKENS) -> Path:
    added = [{"id": 100 + index, "content": name} for index, name in enumerate(tokens)]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added, "model": {}}))
    if card is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(card))
    return folder


@pytest.mark.parametrize("end", ["</s>", {"content": "</s>", "special": True}], ids=type)
def test_end_token_is_found_however_it_is_written(tmp_path: Path, end: object) -> None:
    assert tokenizer_eos_ids(write(tmp_path, {"eos_token": end}, TOKENS[:2])) == (101,)


@pytest.mark.parametrize(
    ("card", "ends"), [({"eos_token": "</s>"}, (101, 102)), (None, (102,))], ids=["card", "none"]
)
def test_end_of_a_message_that_calls_a_tool_is_an_end(tmp_path: Path, card, ends) -> None:
    assert tokenizer_eos_ids(write(tmp_path, card)) == ends


def test_ends_of_no_tokenizer_are_none_and_a_malformed_file_is_named(tmp_path: Path) -> None:
    assert tokenizer_eos_ids(tmp_path) == ()
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        tokenizer_eos_ids(tmp_path)


LISTS = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [4.0]}
NEW = {"rope_parameters": LISTS | {"original_max_position_embeddings": 64}}
OLD = {
    "rope_scaling": {name: LISTS[name] for name in LISTS if name != "rope_type"} | {"type": "su"},
    "original_max_position_embeddings": 64,
}


def fields(config: object) -> dict[str, msgspec.Raw]:
    return msgspec.json.decode(msgspec.json.encode(config), type=dict[str, msgspec.Raw])


@pytest.mark.parametrize("config", [NEW, OLD], ids=["new names", "old names"])
@pytest.mark.parametrize(
    ("context_tokens", "factors"),
    [(None, "long"), (63, "short"), (64, "short"), (65, "long"), (1000, "long")],
)
def test_served_context_chooses_one_list_for_both(
    config: dict[str, object], context_tokens: int | None, factors: Factors
) -> None:
    made = fields({"max_position_embeddings": 256} | config)
    assert longrope_factors(made, context_tokens) == factors
    (place,) = [name for name in config if name.startswith("rope_")]
    rope = msgspec.json.decode(with_factors(made, factors)[place])
    assert rope["short_factor"] == rope["long_factor"] == LISTS[f"{factors}_factor"]


def test_model_that_was_not_stretched_has_short_factors() -> None:
    assert longrope_factors(fields({"max_position_embeddings": 64} | NEW), None) == "short"


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"rope_parameters": None},
        {"rope_parameters": {"rope_type": "yarn"}},
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        {"rope_parameters": LISTS | {"original_max_position_embeddings": "many"}},
    ],
)
def test_other_and_malformed_configs_stay_as_they_are(config: dict[str, object]) -> None:
    made = fields({"max_position_embeddings": 256} | config)
    assert longrope_factors(made, 8) is None
    assert with_factors(made, None) is made


def test_chosen_list_that_is_missing_is_not_replaced_by_the_other() -> None:
    lone = {name: LISTS[name] for name in LISTS if name != "short_factor"}
    made = fields({"max_position_embeddings": 64, "rope_parameters": lone})
    assert msgspec.json.decode(with_factors(made, "short")["rope_parameters"])["long_factor"] == []


LAST: Mapping[str, object] = {"pooling_mode_lasttoken": True}
MEAN: Mapping[str, object] = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
DENSE: Mapping[str, object] = {
    "in_features": 48,
    "out_features": 8,
    "bias": False,
    "activation_function": "torch.nn.modules.activation.Tanh",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"))


def described(
    base: Path, tmp_path: Path, *modules: tuple[str, Mapping[str, object]], **fields: object
) -> Path:
    """The model of `base` with another config, and with modules of sentence-transformers."""
    for file in base.iterdir():
        if file.name != "config.json":
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **fields}))
    listed = [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}]
    for index, (kind, said) in enumerate(modules, start=1):
        path = f"{index}_{kind}"
        (tmp_path / path).mkdir()
        if said:
            (tmp_path / path / "config.json").write_text(json.dumps(said))
        listed.append({"idx": index, "path": path, "type": f"sentence_transformers.models.{kind}"})
    if modules:
        (tmp_path / "modules.json").write_text(json.dumps(listed))
    return tmp_path


def pooling(at: Path, *, embedding: bool = True) -> Pooling:
    found = read_pooling(at, read_card(at), embedding=embedding)
    assert found is not None
    return found


def test_model_that_answers_pools_nothing_unless_it_is_told_to(folder: Path) -> None:
    assert read_pooling(folder, read_card(folder)) is None
    found = pooling(folder)
    assert (found.task, found.mode, found.normalize) == (Task.EMBED, PoolMode.LAST, True)
    assert (found.card.width, found.card.matryoshka, str(found)) == (48, False, "last, normalised")


def test_modules_say_how_a_text_is_pooled(folder: Path, tmp_path: Path) -> None:
    at = described(folder, tmp_path, ("Pooling", MEAN), ("Dense", DENSE), ("Normalize", {}))
    assert pooling(at) == Pooling(
        task=Task.EMBED,
        mode=PoolMode.MEAN,
        dense=(
            Dense(
                folder="2_Dense", inputs=48, outputs=8, bias=False, squash=PoolingActivation.TANH
            ),
        ),
        normalize=True,
        card=PoolingCard(width=8),
    )


def test_without_a_module_nothing_is_normalised(folder: Path, tmp_path: Path) -> None:
    assert not pooling(described(folder, tmp_path, ("Pooling", LAST))).normalize


@pytest.mark.parametrize(
    ("said", "cuts"),
    [({"matryoshka_dimensions": [32, 16]}, (16, 32)), ({"is_matryoshka": True}, ())],
    ids=["there", "anywhere"],
)
def test_config_says_where_a_vector_may_be_cut(folder: Path, tmp_path: Path, said, cuts) -> None:
    card = pooling(described(folder, tmp_path, **said)).card
    assert (card.matryoshka, card.cuts) == (True, cuts)


def test_classifier_has_labels(folder: Path, tmp_path: Path) -> None:
    fields = {"architectures": ["LlamaForSequenceClassification"]}
    named = {"id2label": {"0": "bad", "1": "good"}, "problem_type": "multi_label_classification"}
    found = pooling(described(folder, tmp_path, **fields, **named), embedding=False)
    assert (found.task, found.card.labels, found.card.width) == (Task.SCORE, ("bad", "good"), 2)
    assert (found.mode, found.normalize, found.card.several) == (PoolMode.LAST, False, True)


@pytest.mark.parametrize(
    ("said", "plain"),
    [
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, True),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, True),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.Sigmoid"}},
            False,
        ),
        ({}, False),
    ],
)
def test_cross_encoder_says_what_its_score_goes_through(
    folder: Path, tmp_path: Path, said: Mapping[str, object], plain: bool
) -> None:
    fields = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    assert pooling(described(folder, tmp_path, **fields, **said)).card.plain_score is plain


@pytest.mark.parametrize(
    ("modules", "complaint"),
    [
        ([("Pooling", {"pooling_mode_max_tokens": True})], "max_tokens is not supported"),
        ([("Pooling", {**MEAN, **LAST})], "mean_tokens and lasttoken is not supported"),
        ([("Pooling", {})], "No such file"),
        ([("CNN", {})], "module CNN is not supported"),
        ([("Normalize", {}), ("Dense", DENSE)], "Dense after Normalize is not supported"),
        ([("Dense", {**DENSE, "in_features": 5})], "in_features = 5: must be 48"),
        ([("Dense", {**DENSE, "activation_function": "x.Swish"})], "swish is not supported"),
    ],
)
def test_what_is_not_built_is_refused_by_name(
    folder: Path, tmp_path: Path, modules: list[tuple[str, Mapping[str, object]]], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        pooling(described(folder, tmp_path, *modules))


def test_model_below_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    at = described(folder, tmp_path)
    modules = [{"path": "0_Transformer", "type": "sentence_transformers.models.Transformer"}]
    (at / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ConfigError, match="0_Transformer"):
        pooling(at)
