"""The base classes of config structs and messages, and the units of settings."""

from __future__ import annotations

from typing import Annotated, dataclass_transform

import msgspec
from msgspec import Meta


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class FrozenMeta(msgspec.StructMeta):
    """Makes each subclass frozen and keyword-only; msgspec alone inherits only the first."""

    def __new__(
        cls, name: str, bases: tuple[type, ...], namespace: dict[str, object], **options: object
    ) -> FrozenMeta:
        options = {"frozen": True, "kw_only": True, **options}
        return super().__new__(cls, name, bases, namespace, **options)  # pyright: ignore[reportArgumentType]  # passed through


class Config(msgspec.Struct, metaclass=FrozenMeta, forbid_unknown_fields=True):
    """A group of settings. Build it with `msgspec.convert`: the constructor checks no bounds.

    The docstring below a field is its help text.
    """


class Secret(msgspec.Struct, frozen=True):
    """Marks a field that is set only by environment: argv and files may be read by others."""


Tokens = Annotated[int, Meta(ge=1, extra={"unit": "tokens"})]
Requests = Annotated[int, Meta(ge=1, extra={"unit": "requests"})]
Bytes = Annotated[int, Meta(ge=1, extra={"unit": "bytes"})]
Threads = Annotated[int, Meta(ge=1, extra={"unit": "threads"})]
Cores = Annotated[int, Meta(ge=1, extra={"unit": "cores"})]
Processes = Annotated[int, Meta(ge=1, extra={"unit": "processes"})]
Beats = Annotated[int, Meta(ge=1, extra={"unit": "heartbeats"})]
Pixels = Annotated[int, Meta(ge=1, extra={"unit": "pixels"})]
Seed = Annotated[int, Meta(ge=-1, le=2**63 - 1)]
Seconds = Annotated[float, Meta(gt=0, extra={"unit": "s"})]
Ratio = Annotated[float, Meta(gt=0, le=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Host = Annotated[str, Meta(min_length=1)]
