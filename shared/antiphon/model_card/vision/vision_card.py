"""Reads how a model takes images and videos: its placeholders, and what stands for a medium.

Read by the tokenizer, which writes markers and repeats placeholders, and by the encoder, which must
come to the same number of rows; without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.model_card.config_json import read_json
from antiphon.model_card.processor_files import ModelKind
from antiphon.model_card.vision.areas import GEMMA4, AreaImages, read_area
from antiphon.model_card.vision.canvas_tiles import LLAMA4, SeparatedTiles, read_llama4
from antiphon.model_card.vision.compared import CLIP, SIGLIP, ComparedImages, read_clip, read_siglip
from antiphon.model_card.vision.frame_videos import INTERN, FrameVideos
from antiphon.model_card.vision.grid_fields import GRIDS
from antiphon.model_card.vision.grid_videos import GridVideos
from antiphon.model_card.vision.grids import GridImages, read_grid
from antiphon.model_card.vision.hd_tiles import PHI4, HdImages, read_hd
from antiphon.model_card.vision.padded_grids import KIMI_K25, PaddedImages, read_padded
from antiphon.model_card.vision.padded_tiles import ANYRES, PaddedTiles, read_llava_next
from antiphon.model_card.vision.rows import MISTRAL3, RowImages, has_rows, read_pixtral
from antiphon.model_card.vision.slices import MINICPM, SlicedImages, read_minicpm
from antiphon.model_card.vision.squares import GEMMA3, SquareImages, read_gemma3, read_llava
from antiphon.model_card.vision.stacked_tiles import StackedTiles, read_internvl
from antiphon.model_card.vision.tiles import IDEFICS, TiledImages, read_idefics

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

VisionCard = (
    SquareImages
    | TiledImages
    | StackedTiles
    | PaddedTiles
    | SeparatedTiles
    | SlicedImages
    | GridImages
    | RowImages
    | AreaImages
    | PaddedImages
    | HdImages
    | ComparedImages
)
"""How a model takes images."""
VideosCard = GridVideos | FrameVideos
"""How a model takes videos."""


def read_vision(folder: Path) -> VisionCard | None:
    """Read how a model takes images; None if it does not, or only its text part is served.

    Raises:
        ConfigError: config.json or the preprocessor's is malformed, or not supported.
    """
    file = folder / "config.json"
    if not file.is_file():
        return None
    read = _READERS.get(read_json(file, ModelKind).model_type)
    return None if read is None else read(folder)


def videos_of(card: VisionCard | None) -> VideosCard | None:
    """How a model takes videos; None if it takes none."""
    takes = isinstance(card, GridImages | TiledImages | StackedTiles | PaddedTiles)
    return card.videos if takes else None


def _read_any_llava(folder: Path) -> RowImages | SquareImages:
    """LLaVA's, and those of models with Pixtral's tower, some of which are LLaVAs by name."""
    return read_pixtral(folder) if has_rows(folder) else read_llava(folder)


_READERS: dict[str, Callable[[Path], VisionCard | None]] = {
    **dict.fromkeys(("llava", MISTRAL3), _read_any_llava),
    **dict.fromkeys(ANYRES, read_llava_next),
    GEMMA3: read_gemma3,
    GEMMA4: read_area,
    INTERN: read_internvl,
    LLAMA4: read_llama4,
    **dict.fromkeys(IDEFICS, read_idefics),
    **dict.fromkeys(GRIDS, read_grid),
    KIMI_K25: read_padded,
    MINICPM: read_minicpm,
    PHI4: read_hd,
    CLIP: read_clip,
    SIGLIP: read_siglip,
}
VISION_TYPES = tuple(_READERS)
"""Types of models whose images are served."""
