"""A short digest of the settings that a cluster must agree on, field by field."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from antiphon.config.cluster import ClusterConfig

_FIELD_DIGITS = 12


def digest(cluster: ClusterConfig) -> str:
    """Equal for equal settings, on every machine: `name:3fa2...,model:9b1c...`.

    Each field is a prefix of its value's SHA-256, so that differing fields can be named and no
    value (the salt) is disclosed.
    """
    return ",".join(
        f"{field.encode_name}:{_digest(getattr(cluster, field.name))}"
        for field in msgspec.structs.fields(cluster)
    )


def differing(ours: str, theirs: str) -> tuple[str, ...]:
    """Name the fields in which two digests differ, including those that only one of them has."""
    mine, others = _parse(ours), _parse(theirs)
    return tuple(sorted(n for n in mine | others if mine.get(n) != others.get(n)))


def _digest(value: object) -> str:
    return hashlib.sha256(msgspec.json.encode(value)).hexdigest()[:_FIELD_DIGITS]


def _parse(text: str) -> dict[str, str]:
    pairs = (part.partition(":") for part in text.split(","))
    return {name: value for name, _, value in pairs}
