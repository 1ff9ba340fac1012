"""Settings that all processes of a cluster share; each heartbeat carries their digest."""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec
from msgspec import Meta

from antiphon.config.schema import Config, Tokens


class ClusterConfig(Config):
    """Settings that all processes of a cluster share; peers with other values are rejected."""

    name: Annotated[str, Meta(pattern="^[A-Za-z0-9_-]+$", max_length=64)] = "antiphon"
    """Name of the cluster and first token of every NATS subject; clusters with different names are
    isolated from each other."""
    model: str = ""
    """Model name in the API, optionally followed by comma-separated aliases; empty: the name of the
    model folder."""
    model_digest: str = ""
    """SHA-256 digest of the model files, verified when a worker loads them; empty: not verified."""
    page_tokens: Tokens | None = None
    """Number of tokens in one KV cache page; unset: 64."""
    hash_salt: str = ""
    """Salt of the page hashes; changing it invalidates all cached prefixes."""

    def __post_init__(self) -> None:
        if self.model and not all(self.names):
            raise ValueError(f"model = {self.model!r}: empty name between two commas")
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"model = {self.model!r}: duplicate name")

    @property
    def names(self) -> tuple[str, ...]:
        """The configured names, the main one first; empty if the folder's name is used."""
        return tuple(name.strip() for name in self.model.split(",")) if self.model else ()


_FIELD_DIGITS = 12
_PAGE_TOKENS_BEFORE = 16
"""Default of `page_tokens` up to version 0.4, whose processes agree with those that leave it open:
a page is of one worker alone."""


def digest(cluster: ClusterConfig) -> str:
    """Equal for equal settings, on every machine: `name:3fa2...,model:9b1c...`.

    Each field is a prefix of its value's SHA-256, so that differing fields can be named and no
    value (the salt) is disclosed.
    """
    if cluster.page_tokens is None:
        cluster = msgspec.structs.replace(cluster, page_tokens=_PAGE_TOKENS_BEFORE)
    hashes = {
        name: hashlib.sha256(msgspec.json.encode(getattr(cluster, name))).hexdigest()
        for name in cluster.__struct_fields__
    }
    return ",".join(f"{name}:{value[:_FIELD_DIGITS]}" for name, value in hashes.items())


def differing(ours: str, theirs: str) -> tuple[str, ...]:
    """Name the fields in which two digests differ, including those that only one of them has."""
    mine, others = _parse(ours), _parse(theirs)
    return tuple(sorted(n for n in mine | others if mine.get(n) != others.get(n)))


def _parse(text: str) -> dict[str, str]:
    return {name: value for name, _, value in (part.partition(":") for part in text.split(","))}
