"""What all ways to take images, and all ways to choose frames of videos, must say."""

from __future__ import annotations

import pytest

from antiphon.model_card.vision.base import VisionBase
from antiphon.model_card.vision.videos import _Sampling


def test_a_way_to_take_images_cannot_be_made_without_what_stands_for_one() -> None:
    class Silent(VisionBase, frozen=True, kw_only=True):
        pass

    with pytest.raises(TypeError, match="pieces"):
        Silent(placeholder=1, processing=b"")  # pyright: ignore[reportAbstractUsage]


def test_a_way_to_choose_frames_cannot_be_made_without_the_choice() -> None:
    class Blind(_Sampling, frozen=True, kw_only=True):
        pass

    with pytest.raises(TypeError, match="spread"):
        Blind(fps=1.0, most=2)  # pyright: ignore[reportAbstractUsage]
