"""Passes on a device whose layers are captured piece by piece.

What layers compute of a token by itself follows from the number of tokens alone. Attention and
recurrences follow from rows and lengths, too, and ranks sum: these calls are made anew between two
pieces.

Axes: T tokens of a pass, Q query heads, D head size, V elements of a value.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import torch

from antiphon.layers.context import ForwardContext, HiddenStates, LocalExperts, SummedExperts
from antiphon.model_worker.runner.graphs import Captured, capture_each

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from torch import Tensor

    from antiphon.kernels.ops import Ops
    from antiphon.kernels.recurrent import Recurrence
    from antiphon.kernels.stream import Cut, Graph, Stream
    from antiphon.layers.context import AttentionParams, LatentAttentionParams
    from antiphon.layers.weights import Tp
    from antiphon.model_worker.batching.plan import StepPlan
    from antiphon.model_worker.model.load import LoadedModel
    from antiphon.model_worker.runner.context import ForwardContexts
    from antiphon.model_worker.runner.input_batch import InputBatch

    Call = Callable[..., Tensor]
    """Of a context and tensors of its tokens  ->  (T, ...), of the dtype of the first of them."""
    Between = Callable[[Call, Sequence[Tensor], tuple[int, ...]], Tensor]
    """Leaves out a call with tensors of all tokens, whose result has this shape for each."""


class PrefillGraphs:
    """Computes the layers of passes: prefills, drafts that are verified, and decodes beside both.

    A pass is padded to the next captured number of tokens. Tokens of padding enter as zeros, and
    get zeros of every call between pieces.
    """

    def __init__(
        self, model: LoadedModel, ops: Ops, contexts: ForwardContexts, stream: Stream
    ) -> None:
        self._decoder, self._ops, self._contexts = model.own_decoder, ops, contexts
        self._build, self._hidden, self._stream = model.build, model.spec.hidden, stream
        inputs = model.spec.per_layer_embedding
        # Layers, and the size of the input that each has beside the stream.
        self._inputs = (0, 0) if inputs is None else (len(model.spec.layers), inputs.size)
        self._graphs: dict[int, Graph] = {}  # by size, rising
        self._shared: dict[Hashable, Tensor] = {}  # what calls between pieces read and write
        self._replayed: tuple[ForwardContext, int] | None = None  # a pass, and its tokens

    def capture(
        self, sizes: Sequence[int], report: Callable[[int, int], None] | None = None
    ) -> Captured:
        """Capture passes of these numbers of tokens: see `capture_each`.

        Stages of a pipeline have none, since several passes are under way then, nor have attention
        groups, which attend to different tokens, and models with a draft head, which reads what
        enters layers.
        """
        began, build = time.monotonic(), self._build
        if build.pp is not None or build.attention is not None or self._contexts.aux_layers:
            sizes = ()
        self._allocate(max(sizes, default=0))
        self._graphs = capture_each(sizes, self._capture, report)
        kept = (self._entering, self._by_layer, self._states.hidden, *self._shared.values())
        size_bytes = sum(graph.size_bytes for graph in self._graphs.values())
        size_bytes += sum(each.nbytes for each in kept)
        return Captured(tuple(self._graphs), time.monotonic() - began, size_bytes)

    def takes(self, plan: StepPlan) -> bool:
        """Whether a plan has no more tokens than were captured, and adds nothing behind layers."""
        rows = plan.spliced_rows
        return 0 < len(plan.tokens) <= max(self._graphs, default=0) and (
            rows is None or rows.shape[1] == self._hidden
        )

    def run_layers(
        self, plan: StepPlan, batch: InputBatch, token_ids: Tensor
    ) -> tuple[ForwardContext, HiddenStates]:
        """`ForwardContexts.run_layers`. The next pass overwrites the hidden states."""
        ctx = self._contexts.of(plan, batch)
        entering = self._decoder.enter(ctx, token_ids, self._contexts.splices(plan))
        assert ctx.positions is not None, "those of a pass"
        tokens = len(token_ids)
        size = next(size for size in self._graphs if size >= tokens)
        for fixed, values in (
            (self._entering, entering.stream),
            (self._by_layer, entering.by_layer),
            (self._positions, ctx.positions),
        ):
            if values is not None:
                fixed[:tokens].copy_(values)
                _pad(fixed[:size], tokens)
        self._replayed = ctx, tokens
        self._graphs[size].replay()
        self._replayed = None
        hidden, finite, _ = self._states
        assert finite is not None, "layers run one by one"
        return ctx, HiddenStates(hidden[:tokens], finite[:tokens])

    def _capture(self, size: int) -> Graph:
        return self._stream.capture(partial(self._run, size))

    def _run(self, size: int, cut: Cut) -> None:
        """What is captured: all layers, into the hidden states that all sizes share."""
        ctx = self._context(partial(self._leave_out, cut), self._positions[:size])
        # Layers may overwrite what enters them: it is copied there for each pass.
        by_layer = self._by_layer[:size] if self._by_layer.numel() else None
        hidden, finite, _ = self._decoder.run_layers(ctx, self._entering[:size], (), by_layer)
        assert finite is not None, "layers run one by one"
        assert self._states.finite is not None, "they were allocated"
        self._states.hidden[:size].copy_(hidden)
        self._states.finite[:size].copy_(finite)

    def _context(self, between: Between, positions: Tensor) -> ForwardContext:
        """What layers have of a pass while it is captured."""
        tp, experts = self._build.tp, LocalExperts()
        if tp.ranks > 1:
            tp = _SumsBetween(tp, between)
            experts = SummedExperts(tp)
        return ForwardContext(
            ops=self._ops,
            tp=tp,
            experts=experts,
            attend=partial(_attend, between),
            attend_latent=partial(_attend_latent, between),
            recur=partial(_recur, between),
            positions=positions,
        )

    def _leave_out(
        self, cut: Cut, call: Call, inputs: Sequence[Tensor], shape: tuple[int, ...]
    ) -> Tensor:
        """Copies through memory that all layers and sizes share.

        If each call had its own, a graph of 8,192 tokens of Llama-3.1-8B would take 5 GB more.
        """
        tokens, dtype = len(inputs[0]), inputs[0].dtype
        shared = [self._share(place, each.shape, each.dtype) for place, each in enumerate(inputs)]
        for into, values in zip(shared, inputs, strict=True):
            into.copy_(values)
        out = self._share("out", (tokens, *shape), dtype)
        cut(partial(self._call, call, shared, out))
        return out.clone()

    def _call(self, call: Call, inputs: Sequence[Tensor], out: Tensor) -> None:
        tokens = 0
        if self._replayed is not None:  # else it is yet to be captured
            ctx, tokens = self._replayed
            out[:tokens].copy_(call(ctx, *(each[:tokens] for each in inputs)))
        _pad(out, tokens)

    def _share(self, name: Hashable, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        tokens, *rest = shape
        key = name, *rest, dtype
        if key not in self._shared:  # by the largest size
            self._shared[key] = torch.empty(*shape, dtype=dtype, device=self._build.device)
        return self._shared[key][:tokens]

    def _allocate(self, size: int) -> None:
        dtype, device = self._build.dtype, self._build.device
        self._shared = {}
        self._entering = torch.zeros((size, self._hidden), dtype=dtype, device=device)
        self._by_layer = torch.zeros((size, *self._inputs), dtype=dtype, device=device)
        self._positions = torch.zeros(size, dtype=torch.int32, device=device)
        finite = torch.zeros(size, dtype=torch.bool, device=device)
        self._states = HiddenStates(torch.zeros_like(self._entering), finite)


def _pad(values: Tensor, tokens: int) -> None:
    """Zero what is behind these tokens: a NaN there would choose no expert."""
    values[tokens:].zero_()


class _SumsBetween:
    """The ranks of a pass, as its pieces see them: a `Tp`."""

    def __init__(self, tp: Tp, between: Between) -> None:
        self.rank, self.ranks, self.invariant = tp.rank, tp.ranks, tp.invariant
        self._tp, self._between = tp, between

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._between(self._reduce, (x,), tuple(x.shape[1:]))

    def all_gather(self, x: Tensor) -> Tensor:
        raise AssertionError("layers only sum")

    def _reduce(self, _: ForwardContext, x: Tensor) -> Tensor:
        return self._tp.all_reduce(x)


# The backends of a captured `ForwardContext`: those of the pass that is replayed, between pieces.


def _attend(between: Between, layer: int, heads: Tensor, params: AttentionParams) -> Tensor:
    queries = heads.shape[1] - 2 * params.kv_heads

    def attend(ctx: ForwardContext, heads: Tensor) -> Tensor:
        return ctx.attend(layer, heads, params)

    return between(attend, (heads,), (queries, heads.shape[2]))


def _attend_latent(
    between: Between, layer: int, q: Tensor, latents: Tensor, params: LatentAttentionParams
) -> Tensor:
    def attend(ctx: ForwardContext, q: Tensor, latents: Tensor) -> Tensor:
        assert ctx.attend_latent is not None, "a pass of this model"
        return ctx.attend_latent(layer, q, latents, params)

    return between(attend, (q, latents), (q.shape[1], params.value))


def _recur(between: Between, layer: int, projected: Tensor, recurrence: Recurrence) -> Tensor:
    def recur(ctx: ForwardContext, projected: Tensor) -> Tensor:
        assert ctx.recur is not None, "a pass of this model"
        return ctx.recur(layer, projected, recurrence)

    return between(recur, (projected,), (recurrence.width,))
