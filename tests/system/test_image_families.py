"""Images of further families, asked by the OpenAI client, streamed, against transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
import transformers
from openai import AsyncOpenAI
from tests.support.llava import picture
from tests.support.qwen_vl import PLACEHOLDER_ID, patches, write_qwen25_vl
from tests.support.smolvlm import write_smolvlm
from tests.system.seeing import TOKENS, Seeing, answer, message
from tests.system.stack import serving

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

TILED = (picture(1), picture(2, 200, 31))
"""Two pictures, of odd sizes: they have other numbers of tiles."""


def tiles(images: Sequence[Tensor], ids: Tensor) -> dict[str, Tensor]:
    del ids
    return {"pixel_values": torch.cat([*images])[None]}


def grids(images: Sequence[Tensor], ids: Tensor) -> dict[str, Tensor]:
    return {**patches(images), "mm_token_type_ids": (ids == PLACEHOLDER_ID).int()}


@dataclass(frozen=True)
class Family:
    write: Callable[[Path], Path]
    architecture: type[transformers.PreTrainedModel]
    inputs: Callable[[Sequence[Tensor], Tensor], dict[str, Tensor]]
    arguments: tuple[str, ...]


FAMILIES = {
    "smolvlm": Family(
        write_smolvlm,
        transformers.SmolVLMForConditionalGeneration,
        tiles,
        ("--batching-chunk-tokens", "24"),
    ),
    "qwen2.5-vl": Family(
        write_qwen25_vl,
        transformers.Qwen2_5_VLForConditionalGeneration,
        grids,
        ("--batching-chunk-tokens", "24"),
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
async def test_answers_are_those_of_transformers_and_are_cached(name: str, tmp_path: Path) -> None:
    """Two pictures, and text before, between and behind them."""
    family = FAMILIES[name]
    folder = family.write(tmp_path)
    model = ("--model-path", str(folder), "--served-model-name", "tiny", "--dtype", "float32")
    with serving(*model, *family.arguments) as stack:
        seeing = Seeing(stack, folder, family.architecture, family.inputs)
        async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none") as client:
            one, two = TILED
            asked = message("Look at ", one, ", then at ", two, ". Which is larger, and why?")
            stream = await client.chat.completions.create(
                model="tiny",
                messages=asked,
                temperature=0,
                max_tokens=TOKENS,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            text = "".join(
                [each.choices[0].delta.content or "" async for each in stream if each.choices]
            )
            assert seeing.worked() == (2, 2)
            cached = seeing.metric("gateway-0", "cached_tokens_total")
            prompt, output = await answer(client, asked)
            seeing.check(prompt, output, [one, two])
            assert stack.post("/detokenize", {"model": "tiny", "tokens": output})["text"] == text
            assert seeing.worked() == (2, 2), "no encoder is called for what is cached"
            found = seeing.metric("gateway-0", "cached_tokens_total") - cached
            assert found >= len(prompt) - 16
            other = await answer(client, message("Look at ", two, ", then at ", one, "."))
            seeing.check(*other, [two, one])
            # A text alone is a conversation, too.
            plain, output = await answer(client, [{"role": "user", "content": "Who is larger?"}])
            assert len(plain) > len("Who is larger?") // 4
            ids = torch.tensor([plain + output])
            logits = seeing.reference(input_ids=ids).logits[0]
            assert logits[len(plain) - 1].argmax() == output[0]
