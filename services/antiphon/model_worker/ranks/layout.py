"""Which part of a model each rank of a worker has."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.config.parallel import ParallelConfig


class RankLayout(NamedTuple):
    """Ranks by number: those of the last pipeline stage first, since rank 0 samples.

    What it samples from is computed there; the first stage, whose layers are run first, learns the
    tokens from the plans and samples that all ranks are sent.
    """

    tp: int = 1
    """Ranks of a stage, which share each of its layers."""
    pp: int = 1
    """Stages."""
    dp: int = 1
    """Equal parts of the ranks of a stage, each of which attends to its own requests."""

    @classmethod
    def of(cls, parallel: ParallelConfig) -> RankLayout:
        return cls(parallel.tp_size, parallel.pp_size, parallel.attn_dp_size)

    @property
    def ranks(self) -> int:
        return self.tp * self.pp

    def stage(self, rank: int) -> int:
        return self.pp - 1 - rank // self.tp

    def member(self, rank: int) -> int:
        """The number of a rank in its stage."""
        return rank % self.tp

    @property
    def attention_ranks(self) -> int:
        """Ranks that attend to the same requests."""
        return self.tp // self.dp

    def shard(self, rank: int) -> str:
        """Which part of every page a rank has: the heads of its member in the layers of its stage.

        A part of the names of stored pages. How heads are divided follows from the number of ranks.
        """
        return f"stage {self.stage(rank)}/{self.pp}, rank {self.member(rank)}/{self.tp}"

    def rank(self, stage: int, member: int) -> int:
        return (self.pp - 1 - stage) * self.tp + member


def devices_of(parallel: ParallelConfig, first: str) -> Sequence[str]:
    """The device of each rank: the ranks of a machine have GPUs of their own, from the first on."""
    kind, _, index = first.partition(":")
    if kind != "cuda":
        return [first] * parallel.ranks
    each = parallel.ranks // parallel.nodes
    return [f"cuda:{int(index or 0) + rank % each}" for rank in range(parallel.ranks)]
