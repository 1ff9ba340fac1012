"""Pooling: prompts become embedding vectors or class scores.

Axes: R rows, T tokens of the plan, D hidden size, W elements of a vector.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (its name in every torch program)
from msgspec import structs

from antiphon.layers.classification_head import ClassificationHeadSpec
from antiphon.model_card.config_json import Task
from antiphon.model_card.files import LoadFormat, find_files
from antiphon.model_card.pooling import Dense, Pooling, PoolingActivation, PoolMode
from antiphon.model_worker.batching.plan import Floats, Ints, PooledVectors, StepPlan
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.model.weights import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from antiphon.model_worker.model.load import LoadedModel

    Score = Callable[[Tensor], Tensor]

_ACTIVATIONS: dict[PoolingActivation, Callable[[Tensor], Tensor]] = {
    PoolingActivation.IDENTITY: lambda x: x,
    PoolingActivation.TANH: torch.tanh,
    PoolingActivation.RELU: F.relu,
    PoolingActivation.GELU: F.gelu,
    PoolingActivation.SIGMOID: torch.sigmoid,
}


class _PooledPrefix(NamedTuple):
    """The pooled vector of the first `end` tokens of a prompt.

    Of the mode `end` also the rank of the token that it belongs to; 0: none is an end token.
    """

    end: int
    vector: Tensor
    rank: int = 0


class Pooler:
    """Pools each prompt into a vector; a prompt may arrive in several prefill chunks.

    Vectors are computed in float32 and one by one, so that none depends on the rest of the batch,
    and a mean is summed token after token, so that it does not depend on the chunks.
    """

    def __init__(self, pooling: Pooling, linears: tuple[PoolingLinear, ...] = ()) -> None:
        self._pooling = pooling
        self._linears = linears
        # By slot. A plan may be run again, so earlier chunks are kept to resume from.
        self._partial: dict[int, list[_PooledPrefix]] = {}

    @classmethod
    def open(cls, pooling: Pooling, folder: Path, model: LoadedModel) -> Pooler:
        """Open a pooler with the linears of a model folder; a classifier sets its own pooling."""
        if pooling.task is Task.SCORE:
            if not isinstance(model.spec.head, ClassificationHeadSpec):
                raise ModelLoadError("config.json: the head of this architecture is not supported")
            pooling = structs.replace(pooling, mode=PoolMode(model.spec.pooling))
        return cls(pooling, tuple(_read(dense, folder / dense.folder) for dense in pooling.dense))

    def pool(self, plan: StepPlan, hidden: Tensor, score: Score) -> PooledVectors:
        """Pool a plan's normalised hidden states (T, D); return vectors of prompts that end in it.

        Args:
            plan: A pooling plan.
            hidden: Of all its tokens.
            score: (1, D) of any dtype -> (1, labels), the head of a classifier or reward model.
        """
        wanted = plan.pooling
        assert wanted is not None, "a plan of rows that draw"
        images, values = self._images(plan), list[Floats]()
        widths = np.zeros(len(plan.slot) + 1, np.int32)
        pieces = self._split(plan, hidden)
        ends = zip(wanted.ends.tolist(), wanted.dimensions.tolist(), strict=True)
        for row, (piece, (ended, dimensions)) in enumerate(zip(pieces, ends, strict=True)):
            end = int(plan.kv_len[row])
            if (image := images.get(row)) is not None:
                values.append(self._cut(image, dimensions).numpy())
                widths[row + 1] = len(values[-1])
                continue
            start, count = int(plan.query_start[row]), int(plan.query_len[row])
            ids = plan.tokens[start : start + count]
            pooled = self._take(int(plan.slot[row]), piece, ids, end - count)
            if ended:
                if self._pooling.mode is PoolMode.MEAN:
                    pooled = pooled / end
                result = self._finish(pooled, dimensions, score)
                values.append(result.float().cpu().numpy())
                widths[row + 1] = len(result)
        for slot in plan.slot[wanted.ends].tolist():
            self._partial.pop(slot, None)
        joined = np.concatenate(values) if values else np.zeros(0, np.float32)
        return PooledVectors(starts=np.cumsum(widths, dtype=np.int32), values=joined)

    def texts(self, plan: StepPlan) -> StepPlan:
        """The plan as layers read it: images that are prompts by themselves are their vectors."""
        if not self._pooling.card.images:
            return plan
        return structs.replace(plan, spliced=None, spliced_rows=None)

    def _split(self, plan: StepPlan, hidden: Tensor) -> Sequence[Tensor]:
        """What is read of each row, on the CPU: the states of its tokens, or of the last one."""
        lengths = plan.query_len
        if self._pooling.mode is PoolMode.LAST:
            last = np.cumsum(lengths, dtype=np.int64) - 1
            hidden, lengths = hidden[torch.as_tensor(last)], np.ones_like(lengths)
        return torch.split(hidden.cpu(), lengths.tolist())

    def _images(self, plan: StepPlan) -> dict[int, Tensor]:
        """The vectors of prompts that are images, by row: each has one token, and a row for it."""
        if plan.spliced is None or plan.spliced_rows is None or not self._pooling.card.images:
            return {}
        rows = np.searchsorted(plan.query_start, plan.spliced, side="right") - 1
        return dict(zip(rows.tolist(), torch.tensor(plan.spliced_rows), strict=True))

    def _take(self, slot: int, piece: Tensor, ids: Ints, start: int) -> Tensor:
        """The pooled vector of a prompt up to and with a chunk, which begins at `start`.

        piece: (n, D), of the last token alone (1, D)
        ids: (n,) those of the chunk's tokens
        """
        if self._pooling.mode is PoolMode.LAST:
            return piece[-1]
        earlier = [each for each in self._partial.get(slot, []) if 0 < each.end <= start]
        before = earlier[-1] if earlier else None
        assert start == (0 if before is None else before.end), "an earlier chunk is missing"
        end, rank = start + len(piece), 0
        if self._pooling.mode is PoolMode.MEAN:
            vector = _added(piece, None if before is None else before.vector)
        elif self._pooling.mode is PoolMode.END:
            vector, rank = self._of_end(piece, ids, before)
        else:
            # A copy, since a view would keep the hidden states of the whole batch in memory.
            vector = piece[0].clone() if before is None else before.vector
        self._partial[slot] = [*earlier, _PooledPrefix(end, vector, rank)]
        return vector

    def _of_end(self, piece: Tensor, ids: Ints, before: _PooledPrefix | None) -> tuple[Tensor, int]:
        """The vector of the end token up to and with a chunk (n, D), and its rank."""
        end_id = self._pooling.end_id
        ranks = ids + 1 if end_id is None else (ids == end_id).astype(np.int32)
        at = int(ranks.argmax())  # the first of them
        rank = int(ranks[at])
        if before is not None and before.rank and before.rank >= rank:
            return before.vector, before.rank
        return piece[at if rank else -1].clone(), rank

    def _finish(self, pooled: Tensor, dimensions: int, score: Score) -> Tensor:
        """The result for a pooled vector (D,), after linears, normalisation or head  ->  (W,)."""
        if self._pooling.task is Task.SCORE:
            return score(pooled.unsqueeze(0))[0]
        vector = pooled.float()
        for linear in self._linears:
            vector = linear(vector)
        return self._cut(vector, dimensions)

    def _cut(self, vector: Tensor, dimensions: int) -> Tensor:
        """The first dimensions, if only these are wanted, normalised."""
        vector = vector[: dimensions or len(vector)]
        return F.normalize(vector, dim=0) if self._pooling.normalize else vector


@dataclass(frozen=True, slots=True)
class PoolingLinear:
    """A linear after the pooling, with its activation."""

    weight: Tensor
    bias: Tensor | None
    activation: PoolingActivation

    def __call__(self, vector: Tensor) -> Tensor:
        """(inputs,)  ->  (outputs,)."""
        return _ACTIVATIONS[self.activation](F.linear(vector, self.weight, self.bias))


def _added(piece: Tensor, before: Tensor | None) -> Tensor:
    """The sum of a chunk's vectors (n, D) and `before`, added one by one: (D,) float64."""
    vectors = piece.double() if before is None else torch.cat([before.unsqueeze(0), piece.double()])
    # Along the first of two axes numpy adds row after row, where torch adds in some order of its
    # own; torch's cumulative sum has the same order and takes eight times as long.
    return torch.as_tensor(np.add.reduce(vectors.numpy(), axis=0))


def _read(dense: Dense, folder: Path) -> PoolingLinear:
    weight, bias = f"{dense.name}.weight", f"{dense.name}.bias"
    shapes: dict[str, tuple[int, ...]] = {weight: (dense.outputs, dense.inputs)}
    if dense.bias:
        shapes[bias] = (dense.outputs,)
    tensors = Checkpoint.open(find_files(folder, LoadFormat.AUTO)).tensors
    for name, shape in shapes.items():
        if name not in tensors or tuple(tensors[name].shape) != shape:
            raise ModelLoadError(f"{folder}: no tensor {name} of shape {shape}")
    read = {name: tensors[name].decode(tensors[name].data.read()).float() for name in shapes}
    return PoolingLinear(read[weight], read.get(bias), dense.squash)
