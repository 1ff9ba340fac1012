"""How a text becomes a vector, as a model's folder says it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.models.tiny import CONFIG, write_llama

from antiphon.config.errors import ConfigError
from antiphon.model_card.card import read_card
from antiphon.model_card.config_json import Task
from antiphon.model_card.pooling import Dense, Pooling, PoolingActivation, PoolMode, read_pooling
from antiphon.wire.tokenize import PoolingCard

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

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
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **fields}))
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


def test_a_model_that_answers_pools_nothing_unless_it_is_told_to(folder: Path) -> None:
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


def test_without_a_module_that_normalises_nothing_is_normalised(
    folder: Path, tmp_path: Path
) -> None:
    assert not pooling(described(folder, tmp_path, ("Pooling", LAST))).normalize


def test_a_config_says_where_a_vector_may_be_cut(folder: Path, tmp_path: Path) -> None:
    found = pooling(described(folder, tmp_path, matryoshka_dimensions=[32, 16]))
    assert (found.card.matryoshka, found.card.cuts) == (True, (16, 32))


def test_a_config_says_where_a_vector_may_be_cut_anywhere(folder: Path, tmp_path: Path) -> None:
    found = pooling(described(folder, tmp_path, is_matryoshka=True))
    assert (found.card.matryoshka, found.card.cuts) == (True, ())


def test_a_classifier_has_labels(folder: Path, tmp_path: Path) -> None:
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
def test_a_cross_encoder_says_what_its_score_goes_through(
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
    folder: Path,
    tmp_path: Path,
    modules: list[tuple[str, Mapping[str, object]]],
    complaint: str,
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        pooling(described(folder, tmp_path, *modules))


def test_a_model_below_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    at = described(folder, tmp_path)
    modules = [{"path": "0_Transformer", "type": "sentence_transformers.models.Transformer"}]
    (at / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ConfigError, match="0_Transformer"):
        pooling(at)
