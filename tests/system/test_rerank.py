"""Stacks with a cross-encoder and with a decoder: documents are ranked as transformers scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from tests.models.parity import draw
from tests.models.tiny import write_llama
from tests.system.stack import Stack, serving
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, BertConfig, BertForSequenceClassification

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

WORDS = [
    "yes",
    "no",
    "judge",
    "who",
    "what",
    "is",
    "a",
    "dog",
    "cat",
    "red",
    "the",
    "house",
    "sleeps",
]
QUERY = "who sleeps"
DOCUMENTS = ["a dog sleeps", "the house is red", "who is the cat", "a red dog", "what sleeps"]


TEMPLATE = """judge {{ instruct | default("the dog") }} : answer can only be "yes" or "no"
{{ messages[0].content }} : {{ messages[1].content }}"""


def words() -> Tokenizer:
    """Knows some words, and spells nothing."""
    special = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3}
    known = special | {word: 4 + index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(known, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT of one label, whose tokenizer knows ten words and distinguishes two texts."""
    folder = tmp_path_factory.mktemp("judge")
    tokenizer = words()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = BertConfig(
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=64,
        id2label={0: "LABEL_0"},
    )
    model = BertForSequenceClassification(config).eval()
    draw(model)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def stack(folder: Path) -> Iterator[Stack]:
    with serving("--model-path", str(folder), "--served-model-name", "judge") as running:
        yield running


@torch.inference_mode()
def expected(folder: Path) -> list[float]:
    """The score of each document through a sigmoid."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = BertForSequenceClassification.from_pretrained(folder)
    scores: list[float] = []
    for document in DOCUMENTS:
        pair = tokenizer.encode(QUERY, document)
        out = model(torch.tensor([pair.ids]), token_type_ids=torch.tensor([pair.type_ids]))
        scores.append(float(torch.sigmoid(out.logits[0, 0])))
    return scores


def test_documents_are_ranked_as_transformers_scores_them(stack: Stack, folder: Path) -> None:
    ranked = stack.post("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS})
    scores = expected(folder)
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    assert [one["index"] for one in ranked] == order
    assert [one["document"] for one in ranked] == [DOCUMENTS[index] for index in order]
    assert [one["score"] for one in ranked] == pytest.approx([scores[at] for at in order], rel=1e-3)
    assert ranked[0]["meta_info"]["prompt_tokens"] == 5 + len(DOCUMENTS[order[0]].split())
    best = stack.post("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS, "top_n": 1})
    assert [one["index"] for one in best] == order[:1]


def test_one_label_is_classified_and_told_as_it_is(stack: Stack) -> None:
    reply = stack.post("/v1/classify", {"input": ["a dog", "a cat"]})
    assert [one["label"] for one in reply["data"]] == ["LABEL_0", "LABEL_0"]
    raw = stack.post("/classify", {"text": ["a dog", "a cat"]})
    chances = [torch.sigmoid(torch.tensor(one["embedding"][0])).item() for one in raw]
    assert [one["probs"][0] for one in reply["data"]] == pytest.approx(chances)


def test_a_cross_encoder_neither_embeds_nor_generates(stack: Stack) -> None:
    for path, body in (
        ("/v1/embeddings", {"input": "a dog"}),
        ("/v1/completions", {"prompt": "a dog"}),
    ):
        assert "this model does not" in stack.refusal(path, body)


@pytest.mark.long  # whether yes or no is likelier is the gateway's to ask, and tested there
@torch.inference_mode()
def test_a_decoder_says_how_much_likelier_yes_is_than_no(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "decoder")
    tokenizer = words()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    body = {"query": QUERY, "documents": DOCUMENTS, "instruct": "a cat"}
    with serving("--model-path", str(folder)) as stack:
        ranked = stack.post("/v1/rerank", body)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    labels = [tokenizer.token_to_id(word) for word in ("yes", "no")]
    shown = TEMPLATE.partition("{{ m")[0].replace('{{ instruct | default("the dog") }}', "a cat")
    for one in ranked:
        ids = tokenizer.encode(f"{shown}{QUERY} : {DOCUMENTS[one['index']]}").ids
        chances = model(torch.tensor([ids])).logits[0, -1, labels].softmax(dim=0)
        assert one["score"] == pytest.approx(float(chances[0]), rel=1e-3)
    scores = [one["score"] for one in ranked]
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) == len(DOCUMENTS)
