"""What the tests of all image families do: show pictures, change models, and compare both sides."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tests.support.llava import picture
from tests.support.models import change_config
from tests.support.towers import check_rows, embedding, opened

from antiphon.config.errors import ConfigError
from antiphon.model_card.vision.base import Pieces, VisionBase
from antiphon.model_card.vision.vision_card import read_vision
from antiphon.wire.claim import PixelLimits
from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from antiphon.encoder.model import VisionModel
    from antiphon.encoder.preprocess import DecodedImage

Card = TypeVar("Card", bound=VisionBase)
PROCESSOR_FILE = "preprocessor_config.json"
LOW = PixelLimits(low=True)
WIDE = (200, 31)
"""Width and height of an image that all ways to cut images cut."""


def card_of(folder: Path, kind: type[Card]) -> Card:
    """How a model takes images, which is of this kind."""
    card = read_vision(folder)
    assert isinstance(card, kind)
    return card


def reference(folder: Path) -> Any:
    """The model as transformers runs it."""
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(transformers, architecture).from_pretrained(folder).eval()


def shown(data: bytes) -> Image.Image:
    """The picture of a file."""
    return Image.open(io.BytesIO(data))


def processed(processor: Any, data: bytes) -> Any:
    """What transformers' processor makes of a picture alone."""
    return processor([shown(data)], return_tensors="np")


def written(pieces: Pieces, placeholder: str) -> str:
    """What stands for an image, as a text."""
    return "".join(placeholder * each if isinstance(each, int) else each for each in pieces)


def drawn_sizes(
    most: int, count: int, *known: tuple[int, int], seed: int = 3
) -> list[tuple[int, int]]:
    """Widths and heights below `most` pixels, and known ones."""
    drawn = np.random.default_rng(seed).integers(1, most, (count, 2)).tolist()
    return [*((width, height) for width, height in drawn), *known]


def check_batch(
    folder: Path, model: VisionModel, sizes: Sequence[tuple[int, int]], inputs: Mapping[str, Tensor]
) -> None:
    """Pictures of these sizes have the rows that transformers makes of its inputs.

    There they are one batch, where ours are alone.
    """
    with torch.inference_mode():
        features = reference(folder).model.get_image_features(**inputs).pooler_output
    for size, right in zip(sizes, features, strict=True):
        check_rows(embedding(model, picture(1, *size)), right)


def check_low_detail(model: VisionModel, card: VisionBase, pieces: Pieces) -> DecodedImage:
    """An image of low detail has these pieces, and a key of its own; the decoded image."""
    low = card.within(LOW)
    assert low.pieces(*WIDE) == pieces != card.pieces(*WIDE)
    assert low.processing != card.processing
    with pytest.raises(InvalidRequest, match="no min_pixels and max_pixels"):
        card.within(PixelLimits(most=500))
    return model.preprocess.decoded(picture(1, *WIDE), 0, 0, LOW)


def changed(
    folder: Path, place: Path, recipe: Mapping[str, Any] | None = None, **fields: Any
) -> Path:
    """A copy of a model, with other fields in its config.json and another preprocessor.

    Fields of a part, as `vision_config`, are beside those that it has.
    """
    for file in folder.iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    for name, each in fields.items():
        if isinstance(each, dict) and isinstance(own := config.get(name), dict):
            fields[name] = own | each
    change_config(place, **fields)
    if recipe is not None:
        (place / PROCESSOR_FILE).write_text(json.dumps(dict(recipe)))
    return place


def check_refused(
    folder: Path,
    place: Path,
    complaint: str,
    recipe: Mapping[str, Any] | None = None,
    **fields: Any,
) -> None:
    """A model that is changed so is not opened, and the reason is named."""
    changed(folder, place, recipe, **fields)
    with pytest.raises(ConfigError, match=complaint):
        opened(place)
