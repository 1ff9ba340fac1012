"""Prompts whose images a client has embedded: those of the images, under keys of their own.

What a client embeds are the rows that the encoder makes of the image, of each family in its shape:
with marks of rows and columns between them, ends of rows, tiles, or parts for several layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.support.gemma_vision import write_gemma4, write_gemma_vision
from tests.support.internvl import write_internvl
from tests.support.kimi_k25 import write_kimi_k25
from tests.support.llama4 import write_llama4
from tests.support.llava import TEXT, picture, write_llava
from tests.support.llava_next import write_llava_next, write_llava_onevision
from tests.support.minicpm_v import write_minicpm_v
from tests.support.phi4 import write_phi4
from tests.support.pixtral import write_mistral3, write_pixtral
from tests.support.qwen_vl import (
    write_glm4v,
    write_paddleocr_vl,
    write_qwen2_vl,
    write_qwen3_vl,
    write_qwen25_vl,
    write_qwen35,
)
from tests.support.smolvlm import write_smolvlm
from tests.support.towers import embedding, opened

from antiphon.model_card.vision.vision_card import read_vision
from antiphon.tokenizer.encoding import EncodedPrompt, TextEncoder
from antiphon.tokenizer.model_tokenizer import read_model_tokenizer
from antiphon.wire.errors import InvalidRequest
from antiphon.wire.ids import ModelName, RequestId
from antiphon.wire.media import MediumHeader
from antiphon.wire.namespaces import PageOrigin
from antiphon.wire.tokenize import EncodeRequest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from antiphon.wire.media import MediumSpan

FAMILIES = {
    "llava": write_llava,
    "gemma3": write_gemma_vision,
    "gemma4": write_gemma4,
    "smolvlm": write_smolvlm,
    "internvl": write_internvl,
    "llava-next": write_llava_next,
    "llava-onevision": write_llava_onevision,
    "pixtral": write_pixtral,
    "mistral3": write_mistral3,
    "qwen2-vl": write_qwen2_vl,
    "qwen2.5-vl": write_qwen25_vl,
    "qwen3-vl": write_qwen3_vl,
    "qwen3.5": write_qwen35,
    "glm4v": write_glm4v,
    "paddleocr-vl": write_paddleocr_vl,
    "llama4": write_llama4,
    "kimi-k2.5": write_kimi_k25,
    "minicpm-v": write_minicpm_v,
    "phi4-multimodal": write_phi4,
}
GRIDS = ("qwen2-vl", "qwen2.5-vl", "qwen3-vl", "qwen3.5", "glm4v", "paddleocr-vl")
MARKED = ("smolvlm", "llama4", "pixtral", "mistral3", "minicpm-v")
"""Those with tokens of text among the placeholders of an image."""
WIDTH, HEIGHT = 200, 60


class Prompts:
    def __init__(self, folder: Path) -> None:
        card = read_vision(folder)
        assert card is not None
        self.card = card
        words = read_model_tokenizer(folder, vision=card)
        self._marker = words.image_marker
        origin = PageOrigin(model_digest="m")
        self._encoder = TextEncoder(words, origin, 10**6, context_tokens=10**6)

    def encode(self, width: int = 0, height: int = 0, **fields: Any) -> EncodedPrompt:
        header = MediumHeader(digest=bytes(32), width=width, height=height, **fields)
        request = EncodeRequest(
            request_id=RequestId("1"),
            model=ModelName("m"),
            prompt=f"Look {self._marker} now",
            media=(header,),
            deadline_unix_ms=0,
        )
        (result,) = self._encoder.encode([request])
        if isinstance(result, Exception):
            raise result
        return result

    def refusal(self, width: int = 0, height: int = 0, **fields: object) -> str:
        with pytest.raises(InvalidRequest) as caught:
            self.encode(width, height, **fields)
        assert caught.value.param == "media.0"
        return caught.value.message


def place(span: MediumSpan) -> tuple[int, ...]:
    return span.start, span.tokens, span.placeholders, span.columns


@pytest.mark.parametrize("name", FAMILIES)
def test_an_embedding_stands_where_its_image_would(name: str, tmp_path: Path) -> None:
    write: Callable[[Path], Path] = FAMILIES[name]
    folder = write(tmp_path)
    prompts = Prompts(folder)
    image = prompts.encode(WIDTH, HEIGHT)
    (span,) = image.media
    assert (span.tokens > span.rows) == (name in MARKED)
    rows = embedding(opened(folder), picture(1, WIDTH, HEIGHT))
    parts = 1 + prompts.card.deepstack
    assert (len(rows), rows.shape[1] / parts) == (span.rows, TEXT["hidden_size"])
    assert (parts > 1) == (name == "qwen3-vl")
    size = (WIDTH, HEIGHT) if prompts.card.SIZED else (0, 0)
    made = prompts.encode(*size, rows=span.rows)
    assert made.token_ids == image.token_ids
    (other,) = made.media
    assert place(other) == place(span)
    assert other.key != span.key
    wrong = prompts.refusal(*size, rows=span.rows + 1)
    assert f"has {span.rows + 1} rows; in this model such an image has {span.rows}" in wrong
    if prompts.card.SIZED:
        assert "requires image_grid_thw or image_sizes" in prompts.refusal(rows=span.rows)
    if name in MARKED:
        # The same numbers in other lines or tiles have other texts between them.
        across = prompts.encode(HEIGHT, WIDTH, rows=span.rows)
        assert across.token_ids != made.token_ids
        assert across.media[0].key != other.key
    if name not in GRIDS:
        assert "no grid of patches" in prompts.refusal(rows=span.rows, patches=(2, 2))
        return
    by_patches = prompts.encode(
        rows=span.rows, patches=(2 * span.rows // span.columns, 2 * span.columns)
    )
    assert by_patches.media == made.media
    # The same numbers in another grid have other positions.
    turned = prompts.encode(
        rows=span.rows, patches=(2 * span.columns, 2 * span.rows // span.columns)
    )
    assert turned.media[0].key != other.key
