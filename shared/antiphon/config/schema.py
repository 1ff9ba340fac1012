"""The base of every config struct, and the units that their fields are written in."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from antiphon.config.frozen import FrozenMeta


class Config(msgspec.Struct, metaclass=FrozenMeta, forbid_unknown_fields=True):
    """One concern's settings. Built by `msgspec.convert` only: the constructor checks no bounds."""


class Help(msgspec.Struct, frozen=True):
    """What a field means, for `--help` and the reference page."""

    text: str


class Secret(msgspec.Struct, frozen=True):
    """Marks a field that comes by environment only: argv and files are read by others."""


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
