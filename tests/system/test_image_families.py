"""Images of further families, asked by the OpenAI client, streamed, against transformers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import openai
import pytest
import torch
import transformers
from openai import AsyncOpenAI
from tests.support.gemma_vision import area_patches, write_gemma4, write_gemma_vision
from tests.support.internvl import write_internvl
from tests.support.kimi_k25 import write_kimi_k25
from tests.support.llama4 import write_llama4
from tests.support.llava import picture
from tests.support.llava_next import padded, write_llava_next
from tests.support.minicpm_v import slices_in_a_row, write_minicpm_v
from tests.support.phi4 import Phi4Reference, write_phi4
from tests.support.phi4 import batched as batched_grids
from tests.support.pixtral import batched, write_mistral3
from tests.support.qwen_vl import (
    patches,
    rows_of_patches,
    write_paddleocr_vl,
    write_qwen3_vl,
    write_qwen25_vl,
)
from tests.support.smolvlm import write_smolvlm
from tests.system.seeing import TOKENS, Seeing, answer, message, scored_answer
from tests.system.stack import serving

from antiphon.wire.claim import PixelLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

TILED = (picture(1), picture(2, 200, 31))
"""Two pictures, of odd sizes: they have other numbers of tiles."""


def tiles(images: Sequence[Tensor], placeholders: Tensor) -> dict[str, Tensor]:
    del placeholders
    return {"pixel_values": torch.cat([*images])[None]}


def grids(images: Sequence[Tensor], placeholders: Tensor) -> dict[str, Tensor]:
    return {**patches(images), "mm_token_type_ids": placeholders.int()}


def rows_of_grids(images: Sequence[Tensor], placeholders: Tensor) -> dict[str, Tensor]:
    return {**rows_of_patches(images), "mm_token_type_ids": placeholders.int()}


def slices(images: Sequence[Tensor], placeholders: Tensor) -> dict[str, Tensor]:
    del placeholders
    return slices_in_a_row(images)


def lines_of_grids(images: Sequence[Tensor], placeholders: Tensor) -> dict[str, Tensor]:
    del placeholders
    return rows_of_patches(images)


def frames(images: Sequence[Tensor], placeholders: Tensor) -> dict[str, Tensor]:
    """Images whose tokens are causal."""
    del placeholders
    return {"pixel_values": torch.cat([*images])}


def padded_tiles(images: Sequence[Tensor], placeholders: Tensor) -> dict[str, Tensor]:
    """Images whose sizes follow from their numbers of tiles, in this test."""
    del placeholders
    sizes = {5: (40, 33), 4: (200, 31)}  # of `TILED`, by tiles
    return padded(images, [sizes[len(image)] for image in images])


def grids_of_tiles(images: Sequence[Tensor], placeholders: Tensor) -> dict[str, Tensor]:
    """Images of which one has a tile beside all of it, as the other one has in low detail.

    Of that most is padding, which is white.
    """
    del placeholders
    tall = [len(image) == 2 and bool((image[1] < 1).float().mean() > 0.5) for image in images]
    return batched_grids(images, [(40, 33) if each else (200, 31) for each in tall])


def rows(images: Sequence[Tensor], placeholders: Tensor) -> dict[str, Tensor]:
    """Images whose rows of tokens have ends."""
    del placeholders
    return batched(images)


def spans(images: Sequence[Tensor], placeholders: Tensor) -> dict[str, Tensor]:
    return {"pixel_values": torch.cat([*images]), "token_type_ids": placeholders.long()}


def areas(images: Sequence[Tensor], placeholders: Tensor) -> dict[str, Tensor]:
    return {**area_patches(images), "mm_token_type_ids": placeholders.int()}


def causal_areas(images: Sequence[Tensor], placeholders: Tensor) -> dict[str, Tensor]:
    """Images whose tokens are causal."""
    del placeholders
    return area_patches(images)


@dataclass(frozen=True)
class Family:
    """`mutant` are inputs of which transformers makes something else; `limits` change pixels.

    Without `one_tile` transformers takes no image of low detail.
    """

    write: Callable[[Path], Path]
    architecture: type[transformers.PreTrainedModel]
    inputs: Callable[[Sequence[Tensor], Tensor], dict[str, Tensor]]
    arguments: tuple[str, ...]
    mutant: Callable[[Sequence[Tensor], Tensor], dict[str, Tensor]] | None = None
    limits: PixelLimits | None = None
    one_tile: bool = True


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
        # A window of 16 rows of 32 numbers: each image is fetched in several.
        ("--batching-chunk-tokens", "24", "--batching-media-window-bytes", "2048"),
        limits=PixelLimits(least=300, most=512),
    ),
    "qwen3-vl": Family(
        write_qwen3_vl,
        transformers.Qwen3VLForConditionalGeneration,
        grids,
        ("--batching-chunk-tokens", "24"),
        limits=PixelLimits(least=300, most=512),
    ),
    "paddleocr-vl": Family(
        write_paddleocr_vl,
        transformers.PaddleOCRVLForConditionalGeneration,
        rows_of_grids,
        ("--batching-chunk-tokens", "24"),
        limits=PixelLimits(least=300, most=512),
    ),
    "kimi-k2.5": Family(
        write_kimi_k25,
        transformers.Kimi_K25ForConditionalGeneration,
        lines_of_grids,
        ("--batching-chunk-tokens", "24"),
    ),
    "minicpm-v": Family(
        write_minicpm_v,
        transformers.MiniCPMV4_6ForConditionalGeneration,
        slices,
        ("--batching-chunk-tokens", "24"),
    ),
    "phi4-multimodal": Family(
        write_phi4, Phi4Reference, grids_of_tiles, ("--batching-chunk-tokens", "24")
    ),
    "internvl": Family(
        write_internvl,
        transformers.InternVLForConditionalGeneration,
        frames,
        ("--batching-chunk-tokens", "24"),
    ),
    "llama4": Family(
        write_llama4,
        transformers.Llama4ForConditionalGeneration,
        frames,
        ("--batching-chunk-tokens", "24"),
    ),
    "llava-next": Family(
        write_llava_next,
        transformers.LlavaNextForConditionalGeneration,
        padded_tiles,
        ("--batching-chunk-tokens", "24"),
        one_tile=False,
    ),
    "mistral3": Family(
        write_mistral3,
        transformers.Mistral3ForConditionalGeneration,
        rows,
        ("--batching-chunk-tokens", "24"),
    ),
    "gemma3": Family(
        write_gemma_vision,
        transformers.Gemma3ForConditionalGeneration,
        spans,
        ("--batching-chunk-tokens", "24"),
        mutant=frames,
    ),
    "gemma4": Family(
        write_gemma4,
        transformers.Gemma4ForConditionalGeneration,
        areas,
        ("--batching-chunk-tokens", "80"),
        mutant=causal_areas,
    ),
}
LONG = (
    *("internvl", "kimi-k2.5", "llama4", "llava-next", "minicpm-v", "mistral3", "paddleocr-vl"),
    *("phi4-multimodal", "qwen3-vl", "gemma4"),
)
"""Those whose tiles and rows other tests compare, below the services that are the same for all.

Qwen3-VL sees videos through the services, too."""
CUT = ("smolvlm", "internvl", "llama4", "llava-next", "minicpm-v", "phi4-multimodal")
"""Those that cut images to tiles: of low detail they are one."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in FAMILIES],
)
async def test_answers_are_those_of_transformers_and_are_cached(name: str, tmp_path: Path) -> None:
    """Two pictures, and text before, between and behind them."""
    family = FAMILIES[name]
    folder = family.write(tmp_path)
    model = ("--model-path", str(folder), "--served-model-name", "tiny", "--dtype", "float32")
    pages = ("--page-size", "16")
    with serving(*model, *pages, *family.arguments) as stack:
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
            calls, embedded = seeing.worked()
            assert embedded == 2
            assert (calls > 2) == ("--batching-media-window-bytes" in family.arguments)
            cached = seeing.metric("gateway-0", "cached_tokens_total")
            prompt, output, logprobs = await scored_answer(client, asked)
            seeing.check(prompt, output, [one, two])
            right = seeing.logprobs(prompt, output, [one, two])
            torch.testing.assert_close(logprobs, right, rtol=0, atol=1e-3)
            assert stack.post("/detokenize", {"model": "tiny", "tokens": output})["text"] == text
            assert seeing.worked() == (calls, 2), "no encoder is called for what is cached"
            found = seeing.metric("gateway-0", "cached_tokens_total") - cached
            assert found >= len(prompt) - 16
            if family.mutant is not None:
                mutant = replace(seeing, inputs=family.mutant)
                wrong = mutant.logprobs(prompt, output, [one, two])
                assert (wrong - right).abs().max() > 0.02, "the test would not notice the mutant"
            # The cached prefix ends in, or behind, the second picture; and another begins with it.
            for first, second, text in ((one, two, "!"), (two, one, ".")):
                other = await answer(client, message("Look at ", first, ", then at ", second, text))
                seeing.check(*other, [first, second])
            limits = family.limits or PixelLimits(most=512)
            fields = {"min_pixels": limits.least or 1, "max_pixels": limits.most}
            asked = message("Look at ", two, "!")
            full = len((await answer(client, asked))[0])
            if family.limits is None:
                with pytest.raises(openai.BadRequestError, match="has no min_pixels") as caught:
                    await answer(client, asked, mm_processor_kwargs=fields)
                assert caught.value.param == "mm_processor_kwargs"
            else:
                prompt, output = await answer(client, asked, mm_processor_kwargs=fields)
                assert len(prompt) < full
                seeing.check(prompt, output, [two], limits)
            asked[0]["content"][1]["image_url"]["detail"] = "low"
            prompt, output = await answer(client, asked)
            if family.one_tile:
                seeing.check(prompt, output, [two], PixelLimits(low=True))
            assert (len(prompt) < full) == (name in CUT), "others have few pixels anyway"
            # A text alone is a conversation, too.
            question = "Which one is larger?"
            plain, output = await answer(client, [{"role": "user", "content": question}])
            shown = stack.post("/detokenize", {"model": "tiny", "tokens": plain})["text"]
            assert question in shown, "the template shows the text of a message"
            with torch.inference_mode():
                logits = seeing.reference(input_ids=torch.tensor([plain])).logits[0]
            assert logits[-1].argmax() == output[0]
