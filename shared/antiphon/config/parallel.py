"""How the ranks of a worker divide a model, and where they meet."""

from __future__ import annotations

import re
from typing import Annotated

from msgspec import Meta

from antiphon.config.errors import ConfigError
from antiphon.config.schema import Config

Ranks = Annotated[int, Meta(ge=1, extra={"unit": "ranks"})]
Nodes = Annotated[int, Meta(ge=1, extra={"unit": "machines"})]
Node = Annotated[int, Meta(ge=0)]

_ADDRESS = re.compile(r"[^\s:/]+:[1-9]\d{0,4}")


class ParallelConfig(Config):
    """Parallelism inside a worker: processes that compute one model together."""

    tp_size: Ranks = 1
    """Number of ranks over which every layer is split (tensor parallelism). Each is a process with
    an even share of the worker's cores and memory, or with a GPU of its own."""
    pp_size: Ranks = 1
    """Number of stages into which the layers are divided (pipeline parallelism), each of tp_size
    ranks. Stages compute different requests at the same time."""
    ep_size: Ranks = 1
    """Number of equal parts of the ranks over which the experts of every layer are spread (expert
    parallelism); must divide tp_size. 1: each rank has a part of every expert."""
    attn_dp_size: Ranks = 1
    """Number of equal parts of the ranks, each of which attends to requests of its own and caches
    only these (data-parallel attention); must divide tp_size. All else is split over all ranks."""
    nodes: Nodes = 1
    """Number of machines over which the ranks of a worker are spread evenly; on each, start
    `python -m antiphon.model_worker` with its node_rank."""
    node_rank: Node = 0
    """Number of this machine among them. The one with number 0 serves; the others only compute."""
    init_address: str = ""
    """Address (`host:port`) at which rank 0 listens for the other ranks; empty: any free port of
    this machine, which needs no address."""

    def check(self) -> None:
        """Check the fields against each other.

        Raises:
            ConfigError: These ranks cannot meet.
        """
        if self.ranks % self.nodes:
            raise ConfigError(
                f"parallel.tp_size * parallel.pp_size = {self.ranks}: must be divisible by "
                f"parallel.nodes = {self.nodes}"
            )
        if self.tp_size % self.ep_size:
            raise ConfigError(
                f"parallel.ep_size = {self.ep_size}: must divide parallel.tp_size = {self.tp_size}"
            )
        if self.tp_size % self.attn_dp_size:
            raise ConfigError(
                f"parallel.attn_dp_size = {self.attn_dp_size}: must divide parallel.tp_size = "
                f"{self.tp_size}"
            )
        if self.attn_dp_size > 1 and self.pp_size > 1:
            raise ConfigError(
                f"parallel.attn_dp_size = {self.attn_dp_size}: parallel.pp_size = {self.pp_size}: "
                "stages pass on the tokens of one group; use one stage"
            )
        if self.node_rank >= self.nodes:
            raise ConfigError(
                f"parallel.node_rank = {self.node_rank}: must be less than parallel.nodes = "
                f"{self.nodes}"
            )
        if self.nodes > 1 and not self.init_address:
            raise ConfigError(
                "parallel.init_address (--dist-init-addr): must be set if there are several nodes"
            )
        if self.init_address and not _ADDRESS.fullmatch(self.init_address):
            raise ConfigError(f"parallel.init_address = {self.init_address!r}: must be host:port")

    @property
    def ranks(self) -> int:
        """Number of ranks of a worker, of all stages."""
        return self.tp_size * self.pp_size

    @property
    def local_ranks(self) -> range:
        """The ranks of this machine."""
        each = self.ranks // self.nodes
        return range(self.node_rank * each, (self.node_rank + 1) * each)
