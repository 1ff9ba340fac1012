"""QK norms: norms of queries and keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from antiphon.kernels.qk_norm_rope import QkNormWeights
from antiphon.layers.norm import RmsNorm, build_norm
from antiphon.layers.weights import WeightSource, void

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from antiphon.layers.attention import AttentionSpec
    from antiphon.layers.context import ForwardContext
    from antiphon.layers.norm import NormSpec
    from antiphon.layers.sublayer import LayerBuildContext


class QkNorm(Protocol):
    """QK norms. Axes: T tokens, Q query heads, H kv heads, D head size."""

    @property
    def kernel(self) -> QkNormWeights | None:
        """Weights for the fused QK norm and RoPE kernel; None: this layer normalises."""
        ...

    @property
    def operations(self) -> frozenset[str]:
        """Names of the kernels that it calls through `ctx.ops`."""
        ...

    def __call__(self, ctx: ForwardContext, heads: Tensor) -> Tensor:
        """Normalise, unless the kernel does: (T, Q + 2 H, D)  ->  (T, Q + 2 H, D)."""
        ...

    def sources(self) -> Iterator[WeightSource]:
        """Both weights."""
        ...


def build_qk_norm(site: LayerBuildContext, spec: AttentionSpec, norm: NormSpec) -> QkNorm:
    """The QK norms of an attention spec."""
    if spec.qk_norm_over == "token":
        return PerTokenQkNorm(site, spec, norm)
    if norm.kind == "rms":
        return FusedQkNorm(site, spec, norm)
    return PerHeadQkNorm(site, spec, norm)


class FusedQkNorm:
    """RMSNorm of each head, applied by the fused kernel."""

    operations: frozenset[str] = frozenset()

    def __init__(self, site: LayerBuildContext, spec: AttentionSpec, norm: NormSpec) -> None:
        self._norms = tuple(
            RmsNorm(norm, site.tensor_name(name), spec.head_size, site.build)
            for name in (spec.names.query_norm, spec.names.key_norm)
        )
        query, key = self._norms
        self.kernel = QkNormWeights(query.weight, key.weight, norm.eps)

    def __call__(self, ctx: ForwardContext, heads: Tensor) -> Tensor:
        """Do nothing: the fused kernel normalises."""
        return heads

    def sources(self) -> Iterator[WeightSource]:
        """Both weights, (D,)."""
        for norm in self._norms:
            yield from norm.sources()


class PerHeadQkNorm:
    """Norms of each head, of any kind."""

    kernel = None

    def __init__(self, site: LayerBuildContext, spec: AttentionSpec, norm: NormSpec) -> None:
        self._query, self._key = (
            build_norm(norm, site.tensor_name(name), spec.head_size, site.build)
            for name in (spec.names.query_norm, spec.names.key_norm)
        )
        self._groups = spec.query_heads // spec.kv_heads
        self.operations = self._query.operations

    def __call__(self, ctx: ForwardContext, heads: Tensor) -> Tensor:
        """Normalise each head separately."""
        q, k, v = _parted(heads, self._groups)
        return torch.cat((self._query(ctx, q), self._key(ctx, k), v), dim=1)

    def sources(self) -> Iterator[WeightSource]:
        """Both weights, (D,)."""
        yield from self._query.sources()
        yield from self._key.sources()


class PerTokenQkNorm:
    """RMSNorm over all queries of a token, and over all its keys.

    Heads are sharded over ranks, so the mean square is summed over ranks.
    """

    kernel = None
    operations = frozenset({"norm.squares"})

    def __init__(self, site: LayerBuildContext, spec: AttentionSpec, norm: NormSpec) -> None:
        assert norm.kind in ("rms", "rms_wide"), "no other kind is cut over ranks"
        build, ranks = site.build, site.build.tp.ranks
        if spec.kv_heads % ranks:
            # Replicated heads would be counted twice.
            raise ValueError(f"{site.name}: {spec.kv_heads} normalised key heads on {ranks} ranks")
        self._eps = norm.eps
        self._wide = norm.kind == "rms_wide"
        self._groups = spec.query_heads // spec.kv_heads
        sizes = (spec.query_heads * spec.head_size, spec.kv_heads * spec.head_size)
        self._names = (
            site.tensor_name(spec.names.query_norm),
            site.tensor_name(spec.names.key_norm),
        )
        self._sizes, self._rank, self._ranks = sizes, build.tp.rank, ranks
        self._weights = tuple(build.empty(size // ranks) for size in sizes)

    def __call__(self, ctx: ForwardContext, heads: Tensor) -> Tensor:
        """Normalise all queries of a token together, and all its keys."""
        q, k, v = _parted(heads, self._groups)
        parts = [
            self._normalised(ctx, part, weight)
            for part, weight in zip((q, k), self._weights, strict=True)
        ]
        return torch.cat((*parts, v), dim=1)

    def sources(self) -> Iterator[WeightSource]:
        """Both weights, (Q * D,) and (H * D,)."""
        for name, size, weight in zip(self._names, self._sizes, self._weights, strict=True):
            yield WeightSource(
                f"{name}.weight", (size,), lambda tensor, weight=weight: self._load(weight, tensor)
            )

    def _load(self, weight: Tensor, tensor: Tensor) -> None:
        void(weight.copy_(tensor.chunk(self._ranks)[self._rank]))

    def _normalised(self, ctx: ForwardContext, heads: Tensor, weight: Tensor) -> Tensor:
        rows = heads.flatten(1)
        mean = ctx.tp.all_reduce(ctx.ops.squares(rows)) / (rows.shape[1] * self._ranks)
        unit = rows.float() * torch.rsqrt(mean + self._eps)
        if self._wide:
            return (unit * weight.float()).to(heads.dtype).view(heads.shape)
        return (unit.to(heads.dtype) * weight).view(heads.shape)


def _parted(heads: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of heads (T, Q + 2 H, D)."""
    kv = heads.shape[1] // (groups + 2)
    queries = groups * kv
    return heads[:, :queries], heads[:, queries : queries + kv], heads[:, queries + kv :]
