"""Embeddings of the media of prompts: what is loaded, where it comes from, what a request has.

The batching loop decides what is needed: the embeddings of the media that are not in the prefix
cache, until the prefill is past them. A `MediaStore` brings them in the event loop's thread, and
reports by the mailbox.

Axes: H hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from antiphon.model_worker.batching.plan import Floats, Ints
from antiphon.model_worker.batching.positions import grid_runs
from antiphon.model_worker.batching.state import ChoiceKey, EngineLimits, MediumRows, placeholders
from antiphon.wire.errors import EngineError, InvalidRequest, Unsupported
from antiphon.wire.ids import RequestId, TenantId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.model_worker.batching.request import Request
    from antiphon.wire.media import Medium


class MediaLoad(msgspec.Struct, frozen=True):
    """Rows of media of a choice that are needed, by the indices of the media in the request.

    Attributes:
        number: Of this load of the choice.
        tower: Digest of the model that makes them: an encoder with another one is not asked.
    """

    key: ChoiceKey
    number: int
    request_id: RequestId
    tenant: TenantId
    media: dict[int, MediumRows]
    deadline_unix_ms: int
    tower: str = ""


class MediaLoaded(msgspec.Struct, frozen=True, eq=False):
    """A load has ended: with those rows (rows, H) of each of its media, or an error."""

    key: ChoiceKey
    number: int
    embeddings: dict[int, Floats] = {}
    error: EngineError | None = None


class MediaStore(Protocol):
    """Where embeddings come from. Each call returns at once."""

    def load(self, load: MediaLoad) -> None:
        """Bring embeddings; answered by a `MediaLoaded`, unless it is released before."""
        ...

    def release(self, key: ChoiceKey, number: int) -> None:
        """End a load: what it has brought, or would bring, is not used any more."""
        ...


class MediaLoader:
    """Loads the embeddings that requests of one engine core wait for.

    Attributes:
        tower: Digest of the encoders' model that makes them.
    """

    def __init__(self) -> None:
        self._store: MediaStore | None = None
        self._rows_max: int | None = None
        self._whole = False
        self.tower = ""

    def use(self, store: MediaStore, *, rows_max: int | None = None, whole: bool = False) -> None:
        """Load from a store, at most `rows_max` rows of a request at a time; `whole`: no parts."""
        self._store, self._rows_max, self._whole = store, rows_max, whole

    def wait(self, request: Request, tokens: int) -> bool:
        """Whether a request, so many tokens of which are computed, must wait for embeddings.

        The next rows are loaded from here on, in one load: what an earlier one has brought
        is given up, so that no request waits for memory while it holds some.
        """
        media = request.media
        if media is None:
            return False
        if media.loading:
            return True
        if not media.lacks(tokens):
            return False
        self.release(request)
        window = media.window(tokens, self._rows_max, whole=self._whole)
        assert self._store is not None, "media were admitted without a store"
        media.number, media.loading = media.number + 1, window
        state = request.state
        self._store.load(
            MediaLoad(
                key=request.key,
                number=media.number,
                request_id=state.request_id,
                tenant=state.tenant,
                media=window,
                deadline_unix_ms=state.deadline_unix_ms,
                tower=self.tower,
            )
        )
        return True

    def ready(self, request: Request, start: int, end: int) -> int:
        """Up to which token, at most `end`, a prefill can go on from `start`.

        If that is `start`, it waits for the next rows, which are loaded from here on.
        """
        if request.media is None:
            return end
        found = request.media.ready(start, end)
        if found == start:
            self.wait(request, start)
        return found

    def release(self, request: Request) -> None:
        """Free the embeddings of a request that needs them no more, or has given up its slot."""
        media = request.media
        if media is not None and media.clear() and self._store is not None:
            self._store.release(request.key, media.number)


def check_media(media: Sequence[Medium], prompt: Ints, limits: EngineLimits) -> None:
    """Refuse media that this model does not take, or whose places are not in the prompt (P,).

    Raises:
        Unsupported: The model takes no media.
        InvalidRequest: Places are not in the prompt, or not in order, or have other placeholders.
    """
    grids, span_tokens = limits.media_grids, limits.span_tokens
    if media and limits.media_width is None:
        raise Unsupported("this model takes no images", param="media")
    if limits.source_shape is not None:
        rows, _ = limits.source_shape
        if len(media) > 1 or any(m.span.tokens or m.span.rows != rows for m in media):
            text = f"this model takes one medium of {rows} rows, beside the prompt"
            raise InvalidRequest(text, param="media")
        return
    end = 0
    for medium in media:
        if medium.span.start < end or not medium.span.tokens:
            raise InvalidRequest("media are empty, or not in order", param="media")
        end = medium.span.start + medium.span.tokens
    if end > len(prompt):
        raise InvalidRequest("a medium ends behind the prompt", param="media")
    for medium in media:
        places = placeholders(medium, prompt)
        if len(places) != medium.span.rows:
            raise InvalidRequest("a medium has other placeholders than rows", param="media")
        if bool(medium.span.columns) != grids:
            text = "the positions of this model have axes, and a medium no grid"
            if not grids:
                text = "a medium has a grid, and the positions of this model no axes"
            raise InvalidRequest(text, param="media")
        depth = max(1, medium.span.times) * medium.span.columns
        if grids and any(tokens % depth for _, tokens in grid_runs(places)):
            raise InvalidRequest("a medium is no whole grid", param="media")
        if (medium.span.times - 1) * medium.span.step >= medium.span.tokens:
            raise InvalidRequest("a medium has more positions than tokens", param="media")
        if span_tokens is not None and medium.span.tokens > span_tokens:
            # A prefill chunk may be too short for it.
            text = f"a medium has {medium.span.tokens} tokens, of at most {span_tokens}"
            raise InvalidRequest(text, param="media")
