"""Image processors have their settings in a file of their own, or within their processor's."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.gemma_vision import write_gemma_vision
from tests.support.llava import TOWER, picture, write_llava
from tests.support.qwen_vl import PROCESSOR as GRID
from tests.support.qwen_vl import write_qwen2_vl
from tests.support.smolvlm import PROCESSOR as TILES
from tests.support.smolvlm import write_smolvlm
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from antiphon.config.errors import ConfigError
from antiphon.config.settings import Settings
from antiphon.encoder.model import open_model
from antiphon.model_card.processor_files import image_processor_file
from antiphon.model_card.vision.vision_card import read_vision

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

EDGE = TOWER["image_size"]
SQUARE = {"size": {"shortest_edge": EDGE + 5}, "crop_size": {"height": EDGE, "width": EDGE}}
COLOURS = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "resample": 2}
CASES: Mapping[str, tuple[Callable[[Path], Path], Any, Mapping[str, object]]] = {
    "llava": (write_llava, CLIPImageProcessorPil, SQUARE),
    "gemma3": (write_gemma_vision, Gemma3ImageProcessorPil, {"size": {"height": 56, "width": 56}}),
    "smolvlm": (write_smolvlm, Idefics3ImageProcessorPil, TILES),
    "qwen2-vl": (write_qwen2_vl, Qwen2VLImageProcessorPil, GRID),
}


@pytest.mark.parametrize("name", CASES)
def test_nested_settings_are_read_as_transformers_writes_them(name: str, tmp_path: Path) -> None:
    write, processor, fields = CASES[name]
    own, nesting = tmp_path / "preprocessor_config.json", tmp_path / "processor_config.json"
    write(tmp_path)
    own.write_text(json.dumps({**fields, **COLOURS}))
    data = picture(3, 120, 50)
    expected, by_default = open_model(Settings(), tmp_path), read_vision(tmp_path)
    assert by_default is not None
    pieces = by_default.pieces(120, 50)
    written = json.loads(processor(**{**fields, **COLOURS}).to_json_string())
    nesting.write_text(json.dumps({"image_processor": written, "processor_class": "A"}))
    own.write_text('{"do_resize": false}')
    found, card = open_model(Settings(), tmp_path), read_vision(tmp_path)
    assert found.preprocess.recipe == expected.preprocess.recipe
    assert (found.preprocess(data) == expected.preprocess(data)).all()
    assert card is not None
    assert card.pieces(120, 50) == pieces
    nesting.write_text('{"image_processor": {"image_mean": 3}}')
    with pytest.raises(ConfigError, match=r"processor_config.json: .*image_mean"):
        open_model(Settings(), tmp_path)


def test_a_processor_without_an_image_processor_says_nothing_of_it(tmp_path: Path) -> None:
    (tmp_path / "processor_config.json").write_text('{"image_seq_len": 64}')
    assert image_processor_file(tmp_path).content == b""
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert image_processor_file(tmp_path).content == b"{}"
