"""A batching loop whose media come from a fake store, so that no encoder is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from tests.models.model_loop import ModelLoop
from tests.support.worker import state

from antiphon.model_worker.batching.media import MediaLoaded
from antiphon.wire.claim import Claim
from antiphon.wire.ids import RequestId
from antiphon.wire.media import Medium, MediumSpan
from antiphon.wire.namespaces import medium_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from antiphon.model_worker.batching.mailbox import Mail
    from antiphon.model_worker.batching.media import MediaLoad
    from antiphon.model_worker.batching.plan import Floats
    from antiphon.model_worker.batching.state import ChoiceKey, RequestState
    from antiphon.model_worker.runner.opening import OpenModel

CLAIM = Claim(address="a:1", token="00", size_bytes=1, digest=bytes(32), expires_unix_ms=0)
NEAR = 2e-4
"""Logits that are nearer than this may be taken either way."""
Part = int | tuple[int, int, int]
"""So many tokens of text, or rows, columns and content of an image; no columns: it is no grid."""


def embedding(content: int, tokens: int, width: int) -> Floats:
    """The embedding of an image, by its content."""
    return np.random.default_rng(content).normal(0, 1, (tokens, width)).astype(np.float32)


def medium(start: int, rows: int, columns: int, content: int) -> Medium:
    """An image, whose width and height are its grid here; without columns it has so many rows."""
    key = medium_key(bytes([content]) * 32, bytes([rows, columns]))
    span = MediumSpan(start=start, tokens=rows * (columns or 1), key=key, columns=columns)
    return Medium(span=span, width=content, height=1, claim=CLAIM)


def prompt(parts: Sequence[Part], image: int) -> tuple[list[int], tuple[Medium, ...]]:
    """The ids of a prompt, and its images, whose tokens have that id."""
    ids, media = list[int](), list[Medium]()
    for part in parts:
        if isinstance(part, int):
            ids += [10 + (7 * len(ids) + n) % 50 for n in range(part)]
        else:
            media.append(medium(len(ids), *part))
            ids += [image] * media[-1].span.tokens
    return ids, tuple(media)


def seeing_request(parts: Sequence[Part], image: int, name: str, **sampling: Any) -> RequestState:
    """A request of this prompt, greedy unless its sampling says otherwise."""
    ids, media = prompt(parts, image)
    return state(ids, request_id=RequestId(name), media=media, **{"temperature": 0.0, **sampling})


def check_greedy(logits: Tensor, output: Sequence[int], prompt_tokens: int, name: object) -> None:
    """Each token of an output is the likeliest one by the logits of the whole text, (T, V)."""
    for index, token in enumerate(output, start=prompt_tokens - 1):
        assert logits[index, token] >= logits[index].max() - NEAR, f"{name}: token {index}"


class SeeingLoop(ModelLoop):
    """Embeddings are brought in the turn after they are loaded; the content is a medium's width.

    `deepstack` is how many of the first layers add a part of them; `rows_max` that of a window.
    """

    def __init__(
        self, model: OpenModel, *, deepstack: int = 0, rows_max: int | None = None, **values: Any
    ) -> None:
        width = (1 + deepstack) * model.spec.hidden
        values = {"media_width": width, "media_grids": True, **values}
        super().__init__(model, **values)
        self.loads = 0
        self._width: int = values["media_width"]
        self._landed: list[MediaLoaded] = []
        for core in self.cores:
            core.batch.media.use(self, rows_max=rows_max)

    def load(self, load: MediaLoad) -> None:
        self.loads += len(load.media)
        found = {
            index: self.embedding(each.medium)[each.first : each.last]
            for index, each in load.media.items()
        }
        self._landed.append(MediaLoaded(load.key, load.number, found))

    def embedding(self, medium: Medium) -> Floats:
        """What an encoder makes of a medium."""
        return embedding(medium.width, medium.span.rows, self._width)

    def release(self, key: ChoiceKey, number: int) -> None:
        pass

    def _turn(self, mail: Mail) -> None:
        landed, self._landed = self._landed, []
        super()._turn(msgspec.structs.replace(mail, landed=list(landed)))
