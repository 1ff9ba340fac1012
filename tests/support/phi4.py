"""A tiny Phi-4-multimodal with random weights, and what transformers makes of its images.

Its processor needs torchvision, which is not there: all of it runs but four functions, for which
Pillow and torch stand.
"""

from __future__ import annotations

import json
from functools import cache
from types import MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
import transformers
from PIL import Image
from tests.support.llava import TEXT, write_random, write_tokenizer
from tests.support.torchvision_names import image_processing
from torch import Tensor
from transformers.image_utils import SizeDict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


PLACEHOLDER, AUDIO = "<|image|>", "<|audio|>"
SPECIAL = (PLACEHOLDER, AUDIO, "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for content in message['content'] %}{% if content['type'] == 'image' %}"
    "{{ '<|image|>' }}{% elif content['type'] == 'audio' %}{{ '<|audio|>' }}"
    "{% else %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TILE, PATCH, MOST = 80, 8, 6
PROCESSOR: Mapping[str, Any] = {
    "size": {"height": TILE, "width": TILE},
    "patch_size": PATCH,
    "dynamic_hd": MOST,
    "image_processor_type": "Phi4MultimodalImageProcessorFast",
}
TOWER: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": TILE,
    "crop_size": TILE,
    "patch_size": PATCH,
}
HEARING: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_blocks": 1,
    "num_attention_heads": 2,
    "ext_pw_out_channel": 32,
    "depthwise_separable_out_channel": 32,
    "nemo_conv_channels": 8,
    "input_size": 16,
}


class Phi4Reference(transformers.Phi4MultimodalForCausalLM):
    """transformers' model, with its tower as it was trained: no attention of it is causal.

    By SDPA it is causal in transformers wherever no patch of a batch is padding.
    """

    @classmethod
    def from_pretrained(cls, *args: Any, **fields: Any) -> Any:
        return super().from_pretrained(*args, attn_implementation="eager", **fields)


def write_phi4(folder: Path, **tower: Any) -> Path:
    """Write a model whose images have up to six tiles of ten patches an edge."""
    tokenizer = write_tokenizer(folder, SPECIAL, TEMPLATE)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    places = {name: tokenizer.token_to_id(name) or 0 for name in (PLACEHOLDER, AUDIO)}
    fields: dict[str, Any] = {
        **{name: value for name, value in TEXT.items() if name != "model_type"},
        "vision_config": {**TOWER, "image_token_id": places[PLACEHOLDER], **tower},
        "audio_config": {**HEARING, "audio_token_id": places[AUDIO]},
        "vocab_size": tokenizer.get_vocab_size(),
        "original_max_position_embeddings": TEXT["max_position_embeddings"],
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id("<|end|>"),
        "pad_token_id": 0,
    }
    config = transformers.Phi4MultimodalConfig(**fields)
    return write_random(folder, transformers.Phi4MultimodalForCausalLM(config))


@cache
def _processor() -> Any:
    """transformers' processor, without torchvision's functions."""
    module = image_processing("phi4_multimodal")
    theirs = module.Phi4MultimodalImageProcessor

    def resize(image: Tensor, size: Sequence[int]) -> Tensor:
        if not any(image.stride()):  # one pixel, everywhere: that of `grid_of`
            return image[:, :1, :1].expand(-1, *size)
        pixels = Image.fromarray(image.permute(1, 2, 0).numpy())
        made = pixels.resize((size[1], size[0]), Image.Resampling.BILINEAR)
        return torch.from_numpy(np.array(made)).permute(2, 0, 1)

    def pad(image: Tensor, margins: Sequence[int], fill: Sequence[int]) -> Tensor:
        assert (*margins[:2], *fill) == (0, 0, 255, 255, 255)
        return F.pad(image, (0, margins[2], 0, margins[3]), value=255)

    module.tvF.resize, module.tvF.pad = resize, pad

    def whole(
        self: Any, image: Tensor, size: SizeDict, resample: int, *, antialias: bool
    ) -> Tensor:
        del self
        assert (resample, antialias) == (3, False)
        edges: Any = size.height, size.width
        return F.interpolate(image[None], edges, mode="bicubic", align_corners=False)[0]

    def normalize(self: Any, image: Tensor, *steps: Any) -> Tensor:
        _, factor, _, mean, std = steps
        middle, spread = (torch.tensor(each)[:, None, None] for each in (mean, std))
        return (image.float() * factor - middle) / spread

    made = SimpleNamespace()
    for name in (
        *("dynamic_preprocess", "find_closest_aspect_ratio"),
        *("pad_to_max_num_crops", "pad_mask_to_max_num_crops"),
    ):
        setattr(made, name, MethodType(getattr(theirs, name), made))
    made.resize, made.rescale_and_normalize = MethodType(whole, made), MethodType(normalize, made)
    made.preprocess = MethodType(theirs._preprocess, made)
    return made


def processed(
    *images: Image.Image, tile: int = TILE, patch: int = PATCH, most: int = MOST
) -> dict[str, Any]:
    """What transformers' processor makes of images, whose pixels are padded to as many tiles."""
    pixels = [torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1) for image in images]
    made = _processor().preprocess(
        pixels,
        do_resize=True,
        size=SizeDict(height=tile, width=tile),
        resample=3,
        do_rescale=True,
        rescale_factor=1 / 255,
        do_normalize=True,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
        patch_size=patch,
        dynamic_hd=most,
        return_tensors=None,
    )
    return dict(made)


def grid_of(
    width: int, height: int, tile: int = TILE, patch: int = PATCH, most: int = MOST
) -> tuple[int, int, Tensor]:
    """Width and height of the padded image in transformers, in pixels, and the patches' mask.

    Raises:
        ValueError: The image is too narrow.
    """
    blank = torch.zeros((), dtype=torch.uint8).expand(3, height, width)
    theirs = _processor()
    padded, mask = theirs.dynamic_preprocess(blank, tile, patch, tile // patch, max_num=most)
    return padded.shape[-1], padded.shape[-2], mask


def batched(images: Sequence[Tensor], sizes: Sequence[tuple[int, int]]) -> dict[str, Tensor]:
    """What transformers is given of images (F, 3, S, S), of these sizes in pixels.

    An image of one tile beside all of it was not cut, whatever its size.
    """
    most = max(map(len, images))
    pixels, masks, edges = list[Tensor](), list[Tensor](), list[list[int]]()
    for frames, size in zip(images, sizes, strict=True):
        width, height, mask = grid_of(*size, most=MOST if len(frames) > 2 else 1)
        side = TILE // PATCH
        cut = mask.view(height // TILE, side, width // TILE, side).transpose(1, 2)
        every = torch.cat((torch.ones(1, side, side), cut.reshape(-1, side, side)))
        assert len(every) == len(frames)
        rest = most - len(frames)
        pixels.append(torch.cat((frames, frames.new_zeros((rest, *frames.shape[1:])))))
        masks.append(torch.cat((every, torch.ones(rest, side, side))))
        edges.append([height, width])
    return {
        "image_pixel_values": torch.stack(pixels),
        "image_attention_mask": torch.stack(masks),
        "image_sizes": torch.tensor(edges),
    }
