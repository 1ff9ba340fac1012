"""/v1/models: the served models."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

import msgspec

from antiphon.gateway.http.core.auth import tenant_of
from antiphon.gateway.http.core.endpoints import Endpoints, operation
from antiphon.gateway.http.core.operation import json_reply
from antiphon.wire.errors import EngineError, UnknownModel

if TYPE_CHECKING:
    from aiohttp import web

    from antiphon.gateway.access.access import Access
    from antiphon.wire.tokenize import EncodeReply

Modality = Literal["text", "image", "video", "audio"]


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A model, with the fields of OpenAI's and of Anthropic's API.

    `max_model_len`, `max_input_tokens` and `input_modalities` are null until a tokenizer has
    replied.
    """

    id: str
    object: str = "model"
    created: int
    owned_by: str = "antiphon"
    root: str
    parent: None = None
    max_model_len: int | None
    type: str = "model"
    display_name: str
    created_at: str
    lifecycle: str = "active"
    max_input_tokens: int | None
    input_modalities: tuple[Modality, ...] | None
    """What the model takes."""


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """List of models, on one page."""

    object: str = "list"
    data: tuple[ModelEntry, ...]
    first_id: str | None
    last_id: str | None
    has_more: bool = False


@dataclass(frozen=True)
class ModelsEndpoints(Endpoints):
    access: Access
    created: int

    @operation("GET", "/v1/models", "List the served models that the key may use.", reply=ModelList)
    async def _list(self, request: web.Request) -> web.Response:
        if not self._shown(request):
            return json_reply(ModelList(data=(), first_id=None, last_id=None))
        entries = tuple([await self._entry(name) for name in self.served])
        return json_reply(ModelList(data=entries, first_id=entries[0].id, last_id=entries[-1].id))

    @operation("GET", "/v1/models/{name:.+}", "Retrieve a model by name.", reply=ModelEntry)
    async def _one(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if not self._shown(request):
            raise UnknownModel.of(name, ())
        self.check_model(name)
        return json_reply(await self._entry(name))

    def _shown(self, request: web.Request) -> bool:
        return self.access.may_use_model(tenant_of(request), self.model)

    async def _entry(self, name: str) -> ModelEntry:
        try:
            card = await self.tokenizers.card()
        except EngineError:
            card = None
        context_tokens = None if card is None else card.context_tokens
        return ModelEntry(
            id=name,
            created=self.created,
            root=self.model,
            max_model_len=context_tokens,
            display_name=name,
            created_at=datetime.fromtimestamp(self.created, UTC).isoformat(),
            max_input_tokens=context_tokens,
            input_modalities=None if card is None else _modalities(card),
        )


def _modalities(card: EncodeReply) -> tuple[Modality, ...]:
    beside: tuple[tuple[Modality, bool], ...] = (
        ("image", card.sees),
        ("video", card.sees_videos),
        ("audio", card.takes_audio or card.transcription is not None),
    )
    return ("text", *(name for name, taken in beside if taken))
