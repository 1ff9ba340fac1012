"""The base class of config structs, and the units of their fields."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from antiphon.config.frozen import FrozenMeta


class Config(msgspec.Struct, metaclass=FrozenMeta, forbid_unknown_fields=True):
    """A group of settings. Build it with `msgspec.convert`: the constructor checks no bounds."""


class Help(msgspec.Struct, frozen=True):
    """The help text of a field, for `--help` and the reference page."""

    text: str


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
