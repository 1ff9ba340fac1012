"""Tiny CLIP and SigLIP models with random weights, and what transformers makes of their inputs."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import torch
import transformers
from PIL import Image
from tests.support.llava import write_random, write_tokenizer
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

BEGIN, END = "<|startoftext|>", "<|endoftext|>"
PADDING = "<pad>"
IMAGE_SIZE = 32
TEXT: Mapping[str, int] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
VISION: Mapping[str, int] = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": IMAGE_SIZE,
    "patch_size": 8,
}
CLIP_TOKENS, SIGLIP_TOKENS = 77, 64
"""Of texts, at most."""
PROJECTION = 40


def write_clip(folder: Path) -> Path:
    """Write a model whose vectors have another width than either tower."""
    tokenizer = _write_tokenizer(folder, f"{BEGIN} $A {END}", BEGIN, END)
    config = transformers.CLIPConfig(
        text_config=_text(tokenizer, CLIP_TOKENS),
        vision_config=dict(VISION),
        projection_dim=PROJECTION,
    )
    edges = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    processor = CLIPImageProcessorPil(size={"shortest_edge": IMAGE_SIZE}, crop_size=edges)
    processor.save_pretrained(folder)
    return write_random(folder, transformers.CLIPModel(config))


def write_siglip(folder: Path) -> Path:
    """Write a model of texts that are padded."""
    tokenizer = _write_tokenizer(folder, f"$A {END}", END, PADDING)
    config = transformers.SiglipConfig(
        text_config={**_text(tokenizer, SIGLIP_TOKENS), "projection_size": VISION["hidden_size"]},
        vision_config=dict(VISION),
    )
    edges = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    SiglipImageProcessorPil(size=edges).save_pretrained(folder)
    return write_random(folder, transformers.SiglipModel(config))


def _write_tokenizer(folder: Path, template: str, *special: str) -> Tokenizer:
    """The embedded model's tokenizer, which writes these tokens around a text."""
    tokenizer = write_tokenizer(folder, special, "")
    tokens = [(each, tokenizer.token_to_id(each)) for each in special if each in template]
    tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=tokens)
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {"pad_token": special[-1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return tokenizer


def _text(tokenizer: Tokenizer, tokens: int) -> dict[str, Any]:
    end = tokenizer.token_to_id(END)
    return {
        **TEXT,
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": tokens,
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": tokenizer.token_to_id(PADDING) or end,
    }


class TwoTowers:
    """What transformers makes of texts and images: vectors of length 1."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = transformers.AutoModel.from_pretrained(folder).eval()
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        kind = CLIPImageProcessorPil if self._is_clip else SiglipImageProcessorPil
        self._processor: Any = kind.from_pretrained(folder)

    @property
    def _is_clip(self) -> bool:
        return isinstance(self.model, transformers.CLIPModel)

    def ids(self, text: str) -> list[int]:
        """The tokens of a text, padded as the model was trained."""
        ids = self.all_ids(text)
        padding = self._tokenizer.token_to_id(PADDING) or 0
        return ids if self._is_clip else ids + [padding] * (SIGLIP_TOKENS - len(ids))

    def all_ids(self, text: str) -> list[int]:
        """The tokens of a text, however many."""
        return self._tokenizer.encode(text).ids

    @torch.inference_mode()
    def of_ids(self, ids: list[int]) -> Tensor:
        return _unit(self.model.get_text_features(torch.tensor([ids])))

    def of_text(self, text: str) -> Tensor:
        return self.of_ids(self.ids(text))

    @torch.inference_mode()
    def of_image(self, data: bytes) -> Tensor:
        with Image.open(io.BytesIO(data)) as image:
            pixels = self._processor(image.convert("RGB"), return_tensors="pt")["pixel_values"]
        return _unit(self.model.get_image_features(pixels))


def _unit(features: Any) -> Tensor:
    return torch.nn.functional.normalize(features.pooler_output[0], dim=0)
