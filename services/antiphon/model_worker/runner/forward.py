"""One rank of a model: it runs plans in order, and every rank gets the same plans.

Axes: R rows, T tokens, L rows of logits, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from antiphon.kernels.attention import KvShape
from antiphon.kernels.op import Device, KernelUnavailable
from antiphon.kernels.ops import select
from antiphon.kernels.rotary import angles
from antiphon.layers.context import Adapters, ForwardContext
from antiphon.model_worker.batching.plan import Outcome, Plan, RowStatus
from antiphon.model_worker.runner.acceptance import accept
from antiphon.model_worker.runner.batch import Batch, Futures, build
from antiphon.model_worker.runner.errors import PlanRefused
from antiphon.model_worker.runner.kv_pool import KvPool
from antiphon.model_worker.runner.sampling import sample

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from antiphon.kernels.attention import AttentionRows
    from antiphon.kernels.ops import Ops
    from antiphon.model_worker.cache.groups import CacheGroup
    from antiphon.model_worker.model.load import Model


class Runner:
    """Runs plans on one rank. Not thread-safe: one thread calls `run`, once a step.

    A plan's page tables are in the order of `groups`. `forced` names a backend by op name.

    Raises:
        KernelUnavailable: The device, or a forced backend, is not one that this build has.
    """

    def __init__(
        self,
        model: Model,
        groups: tuple[CacheGroup, ...],
        *,
        adapters: Adapters | None = None,
        forced: dict[str, str] | None = None,
    ) -> None:
        spec, placement = model.spec, model.build
        if placement.device.type != "cpu":
            raise KernelUnavailable(f"this runner computes on cpu, not on {placement.device}")
        self.ops = select(Device.of(placement.device), forced)
        self.pools = tuple(KvPool(group, spec, placement) for group in groups)
        self._model = model
        self._adapters = adapters
        self._shapes = tuple(_shape(model, group) for group in groups)
        self._layers = _layers(self.pools)
        self._scale = spec.head_size**-0.5
        self._frequencies = spec.rotary.frequencies().to(placement.device)
        self._futures = Futures()
        self._step: int | None = None

    @torch.inference_mode()
    def run(self, plan: Plan) -> Outcome:
        """Compute a plan's pass and sample its tokens.

        A row whose hidden state or logits are not finite is reported and its tokens are wiped from
        the cache; the other rows are as if it had not been there.

        Raises:
            PlanRefused: A step was left out, or the plan uses what this runner does not have.
        """
        self._follow(plan.step)
        batch = build(plan, self._shapes)
        tokens = self._futures.resolve(plan.tokens)
        ctx = self._context(plan, batch)
        hidden = self._model.decoder.forward(ctx, tokens=torch.as_tensor(tokens).long()).last
        logits = self._logits(ctx, plan, hidden)
        failed = _failed(batch, len(plan.slot), hidden, logits)
        sampled = self._sample(plan, batch, logits)
        starts, token_ids = accept(tokens, plan.logit_tokens, batch.logit_row, sampled, failed)
        self._futures.record(plan.slot, starts, token_ids, failed)
        if failed.any():
            self._wipe(batch, failed)
        status = np.where(failed, RowStatus.NON_FINITE, RowStatus.OK).astype(np.int32)
        return Outcome(step=plan.step, starts=starts, token_ids=token_ids, status=status)

    def _follow(self, step: int) -> None:
        if self._step is not None and step != self._step + 1:
            raise PlanRefused(f"step {step} does not follow step {self._step}")
        self._step = step

    def _context(self, plan: Plan, batch: Batch) -> ForwardContext:
        placement = self._model.build
        cos, sin = angles(self._frequencies, torch.as_tensor(plan.positions[0]), placement.dtype)
        adapter = plan.adapter[batch.token_row]
        return ForwardContext(
            ops=self.ops,
            tp=placement.tp,
            attend=PagedAttend(self.ops, self._layers, batch.groups, self._scale),
            cos=cos,
            sin=sin,
            token_adapter=torch.as_tensor(adapter),
            adapters=self._adapters if (adapter >= 0).any() else None,
        )

    def _logits(self, ctx: ForwardContext, plan: Plan, hidden: Tensor) -> Tensor:
        """The wanted rows only, (L, V): the head is the widest linear of a small model."""
        wanted = hidden[torch.as_tensor(plan.logit_tokens).long()]
        return self._model.decoder.logits(ctx, wanted)

    def _sample(self, plan: Plan, batch: Batch, logits: Tensor) -> NDArray[np.int32]:
        if len(batch.logit_row) == 0:
            return np.zeros(0, np.int32)
        tokens = sample(self.ops, logits, plan.sampling, batch.logit_row, batch.logit_position)
        return tokens.int().cpu().numpy()

    def _wipe(self, batch: Batch, failed: NDArray[np.bool_]) -> None:
        """Zero what failed rows wrote in this pass; what earlier passes wrote was finite."""
        wiped = torch.as_tensor(np.flatnonzero(failed[batch.token_row]))
        for pool, rows in zip(self.pools, batch.groups, strict=True):
            pool.zero(rows.write_places[wiped])


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Where one layer keeps its keys and values, each (P, S, H, D)."""

    group: int
    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class PagedAttend:
    """The cache of one pass, as layers meet it."""

    ops: Ops
    layers: dict[int, LayerCache]
    groups: tuple[AttentionRows, ...]
    scale: float

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Keep this pass's keys and values, and attend over all of each row's."""
        cache = self.layers[layer]
        rows = self.groups[cache.group]
        self.ops.kv_store(k, v, cache.keys, cache.values, rows.write_places)
        return self.ops.paged_attention(q, cache.keys, cache.values, rows, self.scale)


def _failed(batch: Batch, rows: int, hidden: Tensor, logits: Tensor) -> NDArray[np.bool_]:
    """Which rows hold a NaN or infinity, (R,).

    Hidden states count too: a chunk of a prompt has no logits, and its pages are shared with other
    requests as soon as it is committed.
    """
    failed = np.zeros(rows, np.bool_)
    for values, row in ((hidden, batch.token_row), (logits, batch.logit_row)):
        # One sum is an order cheaper than looking at each number; it is finite but for trouble.
        if not math.isfinite(float(values.sum(dtype=torch.float32))):
            bad = ~torch.isfinite(values).all(dim=-1)
            failed[row[bad.cpu().numpy()]] = True
    return failed


def _shape(model: Model, group: CacheGroup) -> KvShape:
    heads = model.spec.kv_heads_of(model.build.tp.ranks)
    return KvShape(
        page_tokens=group.page_tokens,
        heads=heads,
        queries_per_head=model.spec.query_heads // model.build.tp.ranks // heads,
        head_size=model.spec.head_size,
        dtype=model.build.dtype,
        window=group.window,
    )


def _layers(pools: tuple[KvPool, ...]) -> dict[int, LayerCache]:
    return {
        layer: LayerCache(index, *pool.layer(place))
        for index, pool in enumerate(pools)
        for place, layer in enumerate(pool.group.layers)
    }
