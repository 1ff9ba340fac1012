"""What every process of a cluster must agree on. Its digest travels in each heartbeat."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from antiphon.config.schema import Config, Help, Tokens


class ClusterConfig(Config):
    """What must be the same everywhere; a peer with another digest is refused."""

    name: Annotated[
        Annotated[str, Meta(pattern="^[A-Za-z0-9_-]+$", max_length=64)],
        Help("First token of every subject; clusters with different names do not meet."),
    ] = "antiphon"
    model: Annotated[
        str,
        Help(
            "Name that clients ask for, and aliases of it behind commas; empty means the name of "
            "the model folder."
        ),
    ] = ""
    model_digest: Annotated[
        str, Help("SHA-256 of the model's content, verified by whoever loads it; empty: not.")
    ] = ""
    page_tokens: Annotated[Tokens, Help("Tokens of one KV page.")] = 16
    hash_salt: Annotated[str, Help("Goes into every page digest; change it to forget pages.")] = ""

    def __post_init__(self) -> None:
        if self.model and not all(self.names):
            raise ValueError(f"model is {self.model!r}: there is no name between two commas")
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"model is {self.model!r}: a name stands twice")

    @property
    def names(self) -> tuple[str, ...]:
        """The given names, the model's own first; none where the folder's is taken."""
        return tuple(name.strip() for name in self.model.split(",")) if self.model else ()
