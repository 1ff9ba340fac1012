"""Loads a vision model that maps encoded images to embeddings. Imports torch."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from antiphon.encoder.cache import CachedEmbedding
from antiphon.encoder.preprocess import Preprocessor, read_preprocessor_config
from antiphon.encoder.spec import read_spec
from antiphon.encoder.tower import VisionTower, read_weights
from antiphon.resolve.device import detect_device

if TYPE_CHECKING:
    from antiphon.config.settings import Settings


class VisionModel:
    """Preprocessor and vision tower. Blocks; must be used from one thread."""

    def __init__(self, preprocessor: Preprocessor, tower: VisionTower) -> None:
        self._preprocess = preprocessor
        self._tower = tower

    @property
    def embedding_bytes(self) -> int:
        """Size of an embedding, the same for all images."""
        return self._tower.spec.tokens * self._tower.spec.hidden * 4

    def embed(self, image: bytes | bytearray) -> CachedEmbedding:
        pixels = torch.as_tensor(self._preprocess(image))
        (embedding,) = self._tower(pixels[None])  # (T, C)
        data = embedding.numpy().astype("<f4", copy=False).tobytes()
        tokens, hidden = embedding.shape
        return CachedEmbedding(data, tokens, hidden, checksum=hashlib.sha256(data).digest())


def open_model(settings: Settings) -> VisionModel:
    """Load `encoder.model_path`, and set torch's threads as the worker does.

    Raises:
        ConfigError: The folder has no supported vision tower; the message names the file.
    """
    torch.set_num_threads(settings.model.threads or detect_device().cores)
    folder = Path(settings.encoder.model_path).expanduser()
    spec = read_spec(folder)
    recipe = read_preprocessor_config(folder, spec)
    tower = VisionTower(spec, read_weights(folder, spec))
    preprocessor = Preprocessor(recipe, pixels_max=settings.encoder.pixels_max)
    return VisionModel(preprocessor, tower)
