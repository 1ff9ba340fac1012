"""From settings to an engine that is ready to run: the model, its limits and its page pools."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.config.card import read_card
from antiphon.config.device import this_device
from antiphon.config.errors import ConfigError
from antiphon.config.resolve import Plan as Resolved
from antiphon.config.resolve import resolve, table
from antiphon.model_worker.batching.admission import Limits
from antiphon.model_worker.batching.batching import Batching
from antiphon.model_worker.cache.table import CachePools
from antiphon.service.model import model_folder
from antiphon.service.sockets import CannotStart

if TYPE_CHECKING:
    from pathlib import Path

    from antiphon.config.settings import Settings
    from antiphon.model_worker.batching.runner import Runner

log = logging.getLogger(__name__)

_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Engine:
    """What the batching loop stands on."""

    batching: Batching
    runner: Runner


def open_engine(settings: Settings) -> Engine:
    """Load the model and make its page pools. Blocks for seconds.

    Raises:
        CannotStart: The settings, the folder or the memory do not allow it.
    """
    try:
        folder = model_folder(settings)
        verify(folder, settings.cluster.model_digest)
        resolved = resolve(settings, read_card(folder), this_device())
    except ConfigError as error:
        raise CannotStart(str(error)) from error
    log.info("resolved", extra={"plan": "\n" + table(resolved)})
    return _open(folder, resolved, weights_digest=settings.cluster.model_digest)


def verify(folder: Path, digest: str) -> None:
    """Compare the model with the digest that the cluster agreed on, if it did.

    Raises:
        CannotStart: It is another model.
    """
    if digest and (actual := content_digest(folder)) != digest:
        raise CannotStart(f"{folder}: digest {actual}, but cluster.model_digest = {digest}")


def content_digest(folder: Path) -> str:
    """SHA-256 over names and bytes of the config and the weights, in order of their names."""
    content = hashlib.sha256()
    for file in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        inner = hashlib.sha256()
        with file.open("rb") as stream:
            while block := stream.read(_READ_BYTES):
                inner.update(block)
        content.update(f"{file.name}\0{inner.hexdigest()}\n".encode())
    return content.hexdigest()


def _open(folder: Path, resolved: Resolved, *, weights_digest: str) -> Engine:
    # torch takes seconds to import; the process says meanwhile that it is starting.
    import torch  # noqa: PLC0415

    from antiphon.model_worker.model.errors import ModelLoadError  # noqa: PLC0415
    from antiphon.model_worker.runner.open import open_model  # noqa: PLC0415

    torch.set_num_threads(resolved.threads.value)
    try:
        model = open_model(
            folder,
            page_tokens=resolved.page_tokens.value,
            pages=resolved.cache_pages.value,
            dtype=resolved.dtype.value,
            device=resolved.device.value,
        )
    except ModelLoadError as error:
        raise CannotStart(str(error)) from error
    pools = CachePools(model.groups)
    limits = Limits(
        step_tokens_max=resolved.step_tokens.value,
        chunk_tokens=resolved.chunk_tokens.value,
        running_max=resolved.running_max.value,
        context_tokens=min(resolved.context_tokens.value, pools.tokens_max),
        vocab_size=model.spec.vocabulary,
        end_ids=frozenset(resolved.eos_ids.value),
        weights_digest=weights_digest,
    )
    return Engine(Batching(limits, pools), model.runner)
