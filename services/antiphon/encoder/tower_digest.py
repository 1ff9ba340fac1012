"""The digest of the model that an encoder has loaded: it stands for the tower in keys of pages."""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

import torch

from antiphon.config.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from torch import Tensor

_SETTINGS: Final = (
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


class TowerDigest:
    """SHA-256 of the tensors that were read, and of the files that say how they are used.

    The folder of a model of text and images has many times as many tensors that no encoder reads:
    those are not in it. It depends neither on the order in which tensors are read, nor on the files
    that they are in, nor on how this machine stores and multiplies them.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, str] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor as it is stored. One that is read again counts once."""
        if name not in self._tensors:
            content = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
            content.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            self._tensors[name] = content.hexdigest()

    def hexdigest(self, folder: Path) -> str:
        """Return the digest of the tensors so far, with the settings in their folder.

        Raises:
            ConfigError: A file cannot be read.
        """
        parts = dict(self._tensors)
        for file in (folder / name for name in _SETTINGS):
            if file.exists():
                try:
                    parts[f"/{file.name}"] = hashlib.sha256(file.read_bytes()).hexdigest()
                except OSError as error:
                    raise ConfigError(f"{file}: {error.strerror}") from error
        lines = (f"{name}\0{digest}\n" for name, digest in sorted(parts.items()))
        return hashlib.sha256("".join(lines).encode()).hexdigest()


_RECORDING: ContextVar[TowerDigest | None] = ContextVar("tower_digest", default=None)


@contextmanager
def recorded() -> Generator[TowerDigest]:
    """The digest of all tensors that this thread reads within."""
    digest = TowerDigest()
    token = _RECORDING.set(digest)
    try:
        yield digest
    finally:
        _RECORDING.reset(token)


def record(name: str, tensor: Tensor) -> None:
    """Add a tensor that was read to the digest that is being recorded, if there is one."""
    if (digest := _RECORDING.get()) is not None:
        digest.add(name, tensor)
