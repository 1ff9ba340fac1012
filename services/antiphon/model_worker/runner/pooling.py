"""Prompts become vectors: what stands for a text, and what a model makes of that.

Axes: R rows, T tokens of the plan, D hidden size, W numbers of a vector.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (its name in every torch program)
from msgspec.structs import replace

from antiphon.layers.classification_head import ClassificationHeadSpec
from antiphon.model_card.files import LoadFormat, find_files
from antiphon.model_card.pooling import PoolingActivation, PoolMode
from antiphon.model_card.tasks import Task
from antiphon.model_worker.batching.plan import PooledVectors
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.model.weights import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from antiphon.model_card.pooling import Dense, Pooling
    from antiphon.model_worker.batching.plan import Floats, StepPlan
    from antiphon.model_worker.model.load import LoadedModel

    Score = Callable[[Tensor], Tensor]

_BLOCK_TOKENS = 128
"""Tokens that are added up at once: their running sums take memory."""

_ACTIVATIONS: dict[PoolingActivation, Callable[[Tensor], Tensor]] = {
    PoolingActivation.IDENTITY: lambda x: x,
    PoolingActivation.TANH: torch.tanh,
    PoolingActivation.RELU: F.relu,
    PoolingActivation.GELU: F.gelu,
    PoolingActivation.SIGMOID: torch.sigmoid,
}


class Pooler:
    """Makes a vector of each prompt, of which it may see a piece at a time.

    Vectors are computed in float32 and one by one, so that none depends on what is beside it, and a
    mean is added up token after token, so that it does not depend on how the prompt was cut.
    """

    def __init__(self, pooling: Pooling, linears: tuple[PoolingLinear, ...] = ()) -> None:
        self._pooling = pooling
        self._linears = linears
        # By slot: after how many tokens of the prompt what was kept. A plan may be run again, so
        # that it goes on from an earlier piece.
        self._kept: dict[int, list[tuple[int, Tensor]]] = {}

    @classmethod
    def open(cls, pooling: Pooling, folder: Path, model: LoadedModel) -> Pooler:
        """With the linears that a model's folder holds; a head of scores says what it pools.

        Raises:
            ModelLoadError: Their files are missing or do not fit, or there is no such head here.
        """
        if pooling.task is Task.SCORE:
            if not isinstance(model.spec.head, ClassificationHeadSpec):
                raise ModelLoadError("config.json: the head of this architecture is not supported")
            pooling = replace(pooling, mode=PoolMode(model.spec.pooling))
        return cls(pooling, tuple(_read(dense, folder / dense.folder) for dense in pooling.dense))

    def pool(self, plan: StepPlan, hidden: Tensor, score: Score) -> PooledVectors:
        """Take in a plan's normalised hidden (T, D); give the vectors of prompts that end with it.

        Args:
            plan: One that pools.
            hidden: Of all its tokens.
            score: (1, D) of any number format -> (1, labels), the head of a model that scores.
        """
        wanted = plan.pooling
        assert wanted is not None, "a plan of rows that draw"
        values: list[Floats] = []
        widths = np.zeros(len(plan.slot) + 1, np.int32)
        pieces = torch.split(hidden, plan.query_len.tolist())
        ends = zip(wanted.ends.tolist(), wanted.dimensions.tolist(), strict=True)
        for row, (piece, (ended, dimensions)) in enumerate(zip(pieces, ends, strict=True)):
            end = int(plan.kv_len[row])
            standing = self._take(int(plan.slot[row]), piece, end - len(piece))
            if ended:
                if self._pooling.mode is PoolMode.MEAN:
                    standing = standing / end
                made = self._made(standing, dimensions, score)
                values.append(made.float().cpu().numpy())
                widths[row + 1] = len(made)
        for slot in plan.slot[wanted.ends].tolist():
            self._kept.pop(slot, None)
        joined = np.concatenate(values) if values else np.zeros(0, np.float32)
        return PooledVectors(starts=np.cumsum(widths, dtype=np.int32), values=joined)

    def _take(self, slot: int, piece: Tensor, start: int) -> Tensor:
        """What stands for a prompt up to a piece of it (n, D), which begins at `start`."""
        if self._pooling.mode is PoolMode.LAST:
            return piece[-1]
        earlier = [(end, kept) for end, kept in self._kept.get(slot, []) if 0 < end <= start]
        before = earlier[-1][1] if earlier else None
        assert start == (earlier[-1][0] if earlier else 0), "its beginning was computed elsewhere"
        if self._pooling.mode is PoolMode.MEAN:
            kept = _added(piece, before)
        else:
            # A copy, for a view would keep the whole pass in memory.
            kept = piece[0].clone() if before is None else before
        self._kept[slot] = [*earlier, (start + len(piece), kept)]
        return kept

    def _made(self, standing: Tensor, dimensions: int, score: Score) -> Tensor:
        """What the model makes of what stands for a text (D,)  ->  (W,)."""
        if self._pooling.task is Task.SCORE:
            return score(standing.unsqueeze(0))[0]
        vector = standing.float()
        for linear in self._linears:
            vector = linear(vector)
        vector = vector[: dimensions or len(vector)]
        return F.normalize(vector, dim=0) if self._pooling.normalize else vector


@dataclass(frozen=True, slots=True)
class PoolingLinear:
    """A linear behind the pooling, with what follows it."""

    weight: Tensor
    bias: Tensor | None
    activation: PoolingActivation

    def __call__(self, vector: Tensor) -> Tensor:
        """(inputs,)  ->  (outputs,)."""
        return _ACTIVATIONS[self.activation](F.linear(vector, self.weight, self.bias))


def _added(piece: Tensor, before: Tensor | None) -> Tensor:
    """The sum of a piece's vectors (n, D) and of those before it, each added by itself: (D,)."""
    total = torch.zeros(piece.shape[1], dtype=torch.float64) if before is None else before
    for block in torch.split(piece, _BLOCK_TOKENS):
        total = torch.cat([total.unsqueeze(0), block.double()]).cumsum(dim=0)[-1]
    return total


def _read(dense: Dense, folder: Path) -> PoolingLinear:
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (dense.outputs, dense.inputs)}
    if dense.bias:
        shapes["linear.bias"] = (dense.outputs,)
    tensors = Checkpoint.open(find_files(folder, LoadFormat.AUTO)).tensors
    for name, shape in shapes.items():
        if name not in tensors or tuple(tensors[name].shape) != shape:
            raise ModelLoadError(f"{folder}: no tensor {name} of shape {shape}")
    read = {name: tensors[name].decode(tensors[name].data.read()).float() for name in shapes}
    return PoolingLinear(read["linear.weight"], read.get("linear.bias"), dense.squash)
