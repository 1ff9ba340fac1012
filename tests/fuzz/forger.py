"""Hostile messages over every subject of the route table: random bytes, and real ones changed.

What no receiver could tell from the truth is left out: the request of a live stream with its true
attempt or its true sender, the commands of operators, and heartbeats of a new process that has the
settings of the cluster. Names of living processes are forged, with other incarnations.
"""

from __future__ import annotations

import random
import string
import time
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import msgspec
from tests.wire.examples import EVERY

from antiphon.wire.codec import decode, encode
from antiphon.wire.errors import EngineError
from antiphon.wire.routes import (
    ABORT,
    EMBED,
    GENERATE,
    HEARTBEAT,
    ROUTES,
    TEXT,
    TOKENS,
    WORKER_CONTROL,
    Route,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.wire.base import Message, Process

RANDOM_SHARE = 0.25
"""Of the messages, those that are random bytes."""
HOSTILE: Sequence[object] = (
    None, True, 0, -1, 1, 2**31 - 1, 2**31, 2**32 + 7, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 0.0,
    -1.5, float("nan"), float("inf"), "", "\0", " ", ".", "*", ">", "a.b", "$SYS", "x" * 100,
    "x" * 5000, "\N{REPLACEMENT CHARACTER}" * 200, b"", b"\0", b"\xff" * 7, b"\1" * 4096, (), {},
    [[]], [None], {"": ""}, [{}] * 50,
)  # fmt: skip
SENDERS = {"owner", "leader", "scheduler", "process", "asker", "detokenizer", "worker", "gateway"}
ADDRESSED = {
    ("CommandBatch", "worker"),
    ("ResendTokens", "worker"),
    ("TextBatch", "gateway"),
    ("NoticeBatch", "gateway"),
    ("ResumeText", "detokenizer"),
}
"""Fields that name the receiver, whose true life they may have."""

Raw = dict[str, Any]


@dataclass
class Forged:
    """One message. Paths of the subject lack the cluster's prefix."""

    subject: str
    payload: bytes
    reply: str | None
    route: str


@dataclass
class Known:
    """What somebody on the bus has learned of the cluster.

    Attributes:
        processes: The living ones, by role.
        live: Ids of requests that are open.
        config_digest: Of the true heartbeats.
    """

    model: str
    processes: dict[str, Process] = field(default_factory=dict[str, "Process"])
    live: list[str] = field(default_factory=list[str])
    config_digest: str = ""


class Forger:
    """Makes one message after the other, from a seed and what is known."""

    def __init__(self, seed: int, known: Known) -> None:
        self.known = known
        self._chance = random.Random(seed)
        self._examples = {
            route.name: [msg for msg in EVERY if isinstance(msg, route.carries)] for route in ROUTES
        }

    def next(self) -> Forged:
        """Make a message for one of the routes, each as likely as the others."""
        chance = self._chance
        route = chance.choice(ROUTES)
        noise = chance.random() < RANDOM_SHARE
        payload = self._noise() if noise else self._changed(route)
        while self._is_operators(route, payload):
            payload = self._noise()  # which may be one, too: some commands have no fields
        reply = chance.choice([None, None, "client.default.fuzz", "inbox.fuzz.1", "x" * 300])
        return Forged(route.subject_for(**self._address(route)), payload, reply, route.name)

    def _address(self, route: Route[Any]) -> dict[str, str]:
        known, chance = self.known, self._chance
        address: dict[str, str] = {}
        for _, part, _, _ in string.Formatter().parse(route.subject):
            if part is None:
                continue
            if part == "model":
                address[part] = known.model
            elif part == "role":
                address[part] = chance.choice([*known.processes, "gateway", "worker"])
            else:
                role = {"node": "kv_storage"}.get(part, part)
                process = known.processes.get(role)
                address[part] = process.instance if process else f"{part}-0"
        return address

    def _noise(self) -> bytes:
        chance = self._chance
        size = chance.choice([0, 1, 3, 16, 80, 400])
        match chance.randrange(4):
            case 0:
                return chance.randbytes(size)
            case 1:
                return b"{" + chance.randbytes(size)
            case 2:
                return b"\x91" * size  # lists in lists
            case _:
                return msgspec.msgpack.encode({"type": chance.choice(EVERY).__class__.__name__})

    def _changed(self, route: Route[Any]) -> bytes:
        """A message that belongs on the route, with other names and some fields changed."""
        chance = self._chance
        example = chance.choice(self._examples[route.name])
        raw = cast("Raw", msgspec.msgpack.decode(encode(example)))
        name = type(example).__name__
        self._personal(raw, name)
        for _ in range(chance.choice([0, 1, 1, 2, 5])):
            self._mutate(raw)
        self._never_true(raw, route, name)
        if chance.random() < 0.1:
            try:
                return msgspec.json.encode(raw)
            except (TypeError, ValueError, msgspec.EncodeError):
                pass
        payload = msgspec.msgpack.encode(raw)
        if chance.random() < 0.05:
            at = chance.randrange(len(payload))
            payload = payload[:at] + chance.randbytes(1) + payload[at + 1 :]
        return payload

    def _personal(self, raw: object, name: str, key: str = "") -> None:
        """Write names of the true cluster into a message, never as its sender's life."""
        chance, known = self._chance, self.known
        if isinstance(raw, list):
            for part in cast("list[object]", raw):
                self._personal(part, name, key)
            return
        if not isinstance(raw, dict):
            return
        fields = cast("Raw", raw)
        for inner, value in list(fields.items()):
            if inner in {"deadline_unix_ms", "not_after_unix_ms"}:
                fields[inner] = round(time.time() * 1000) + chance.choice([-5_000, 5_000, 60_000])
            elif inner == "model":
                fields[inner] = known.model
            elif inner == "request_id":
                fields[inner] = f"forged-{chance.randrange(50)}"
            elif isinstance(value, dict) and set(cast("Raw", value)) == {"instance", "incarnation"}:
                fields[inner] = self._process(name, inner)
            else:
                self._personal(value, name, inner)

    def _process(self, name: str, key: str) -> Raw:
        chance, known = self._chance, self.known
        true = chance.choice(list(known.processes.values()))
        if (name, key) in ADDRESSED and chance.random() < 0.8:
            role = {"scheduler": "scheduler"}.get(key, key)
            true = known.processes.get(role, true)
            return {"instance": true.instance, "incarnation": true.incarnation}
        return {"instance": true.instance, "incarnation": f"forged{chance.randrange(9)}"}

    def _mutate(self, raw: object) -> None:
        """Change one thing, somewhere inside."""
        chance = self._chance
        while True:
            if isinstance(raw, dict) and raw:
                fields = cast("Raw", raw)
                key = chance.choice(list(fields))
                if isinstance(fields[key], dict | list) and fields[key] and chance.random() < 0.7:
                    raw = fields[key]
                    continue
                match chance.randrange(5):
                    case 0:
                        del fields[key]
                    case 1:
                        fields[f"{key}x"] = fields.pop(key)
                    case _:
                        fields[key] = deepcopy(chance.choice(HOSTILE))
            elif isinstance(raw, list) and raw:
                parts = cast("list[object]", raw)
                at = chance.randrange(len(parts))
                if isinstance(parts[at], dict | list) and chance.random() < 0.7:
                    raw = parts[at]
                    continue
                if chance.random() < 0.3:
                    parts.extend([parts[at]] * chance.choice([1, 30]))
                else:
                    parts[at] = deepcopy(chance.choice(HOSTILE))
            return

    def _never_true(self, raw: Raw, route: Route[Any], name: str) -> None:
        """Undo what would make a message true, or a new process a peer like any other."""
        chance, known = self._chance, self.known
        if route is HEARTBEAT and chance.random() < 0.5:
            # A true name with another life, and the true settings.
            raw["config_digest"] = known.config_digest
            true = chance.choice(list(known.processes.items()))
            raw["role"], process = true[0], true[1]
            raw["process"] = {"instance": process.instance, "incarnation": "forged"}
        elif route in (GENERATE, EMBED):
            raw["timeout_s"] = 1.0
        elif route is ABORT:
            raw["prefix"] = f"forged-{chance.randrange(1000)}"
        elif route in (TEXT, TOKENS) and known.live and isinstance(raw.get("rows"), list):
            # Of live requests, but of an attempt that was never the last one, and of a stranger.
            for row in cast("list[Raw]", raw["rows"]):
                if isinstance(row, dict) and chance.random() < 0.3:  # pyright: ignore[reportUnnecessaryIsInstance]
                    row["request_id"] = chance.choice(known.live)

    def _is_operators(self, route: Route[Any], payload: bytes) -> bool:
        """Whether it is a command that an operator could have given."""
        if route is not WORKER_CONTROL:
            return False
        try:
            decode(payload, cast("tuple[type[Message], ...]", route.carries))
        except EngineError:
            return False
        return True
