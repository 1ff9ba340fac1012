"""Decode steps on a device: inputs at fixed addresses, and graphs of some sizes that read them.

Axes: R rows, S slots, N pages of a table, V vocabulary.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from antiphon.kernels.attention import AttentionMetadata, KvShape
from antiphon.kernels.cpu.fused_decoder import FusedDecoderOutput
from antiphon.kernels.triton.rows import DeviceRows, Tiles, splits_of
from antiphon.model_worker.cache.groups import GroupKind
from antiphon.model_worker.runner.graphs import Captured, capture_each

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from antiphon.kernels.ops import Ops
    from antiphon.kernels.stream import Cut, Graph, Stream
    from antiphon.kernels.upload import Upload
    from antiphon.model_worker.batching.plan import Ints, SlotChanges, StepPlan
    from antiphon.model_worker.cache.groups import CacheGroup
    from antiphon.model_worker.model.load import LoadedModel
    from antiphon.model_worker.runner.context import ForwardContexts

COLUMNS = 4
"""Of a row of a step: slot, token, length, and what is added to its position."""


class _Outputs(NamedTuple):
    """What graphs of all sizes write, at one address."""

    hidden: Tensor  # (R, hidden)
    finite: Tensor  # (R,)
    logits: Tensor  # (R, V)
    logits_finite: Tensor  # (R,)


class DecodeGraphs:
    """Computes decode steps by what the device knows of each slot: its last token and its pages.

    A step is `padded` to the next captured size. Rows of padding have a slot of their own, behind
    those of requests, whose page no request has. A step of another size is computed as it is, by
    the same calls.
    """

    def __init__(
        self,
        model: LoadedModel,
        ops: Ops,
        contexts: ForwardContexts,
        groups: Sequence[tuple[CacheGroup, KvShape]],
        *,
        stateful: bool,
        last: Tensor,
        positions: int,
        stream: Stream,
        upload: Upload,
    ) -> None:
        self._decoder, self._ops, self._contexts = model.own_decoder, ops, contexts
        self._stream, self._upload = stream, upload
        self._shapes = [shape for _, shape in groups]
        self._last, self._positions = last, positions
        slots, device = len(last), model.build.device
        self._padding = slots
        widths = (-(-positions // shape.page_tokens) + 1 for shape in self._shapes)
        self._tables = [  # (S + 1, N)
            torch.zeros((slots + 1, width), dtype=torch.int32, device=device) for width in widths
        ]
        self._padding_pages = [group.pages_total for group, _ in groups]
        for table, page in zip(self._tables, self._padding_pages, strict=True):
            table[self._padding] = page
        self._inputs = torch.zeros(COLUMNS * slots, dtype=torch.int32, device=device)
        every = torch.arange(slots, dtype=torch.int32, device=device)
        self._tiles = torch.stack([every, torch.zeros_like(every)], dim=1)
        self._vocabulary, self._hidden, self._dtype = (
            model.spec.vocabulary,
            model.spec.hidden,
            model.build.dtype,
        )
        # Where a row reads and writes its states changes from step to step; stages share no step,
        # attention groups have different rows, and a draft head reads what enters layers.
        build = model.build
        alone = not stateful and build.pp is None and build.attention is None
        alone = alone and not contexts.aux_layers
        self._supported = alone and all(
            group.kind in (GroupKind.FULL, GroupKind.WINDOW, GroupKind.LATENT)
            and shape.chunk is None
            for group, shape in groups
        )
        self._graphs: dict[int, Graph] = {}  # by size, rising
        self._captured: dict[int, list[AttentionMetadata]] = {}  # by size, the rows of each group
        self._padded = True
        self._outputs: _Outputs | None = None

    def capture(
        self,
        sizes: Sequence[int],
        *,
        padded: bool = True,
        report: Callable[[int, int], None] | None = None,
    ) -> Captured:
        """Capture steps of these sizes: see `capture_each`.

        Sizes above the number of slots, and all of a model that is not supported, are left out.
        """
        began = time.monotonic()
        sizes = [size for size in sizes if self._supported and size <= self._padding]
        self._graphs, self._padded = capture_each(sizes, self._capture, report), padded
        size_bytes = sum(graph.size_bytes for graph in self._graphs.values())
        if self._outputs is not None:
            size_bytes += self._outputs.logits.nbytes + self._outputs.hidden.nbytes
        return Captured(tuple(self._graphs), time.monotonic() - began, size_bytes)

    def apply(self, changes: SlotChanges) -> None:
        """Apply the changes of a plan to the page tables. Inside `launching`."""
        for table, (slots, places, pages) in zip(self._tables, changes.entries, strict=False):
            if not len(slots):
                continue
            index = slots.astype(np.int64) * table.shape[1] + places
            # Of several entries of one place the last one counts; the device has no order.
            index, at = np.unique(index[::-1], return_index=True)
            target = table.view(-1)
            target.index_copy_(0, self._upload(index), self._upload(pages[::-1][at]))

    def takes(self, plan: StepPlan) -> bool:
        """Whether a plan is a decode step, each of whose rows is known by its slot."""
        rows = len(plan.slot)
        plain = (
            plan.spliced,
            plan.axis_tokens,
            plan.token_types,
            plan.ahead,
            plan.group_rows,
            plan.future_start,
        )
        return (
            self._supported
            and 0 < rows == len(plan.tokens) == len(plan.logit_tokens)
            and all(part is None for part in plain)
            and int(plan.kv_len.max()) <= self._positions
        )

    def score(self, plan: StepPlan, groups: Sequence[AttentionMetadata]) -> FusedDecoderOutput:
        """Run a decode step. Inside `launching`; what it returns is overwritten by the next one.

        groups: the rows of the plan as each cache group sees them, which own what is planned for
        them on the host

        Raises:
            RuntimeError: A row writes a token that has no page.
        """
        self._check_pages(plan)
        rows, offsets = len(plan.slot), plan.position_offsets
        known = np.stack(
            [plan.slot, plan.tokens, plan.kv_len, np.zeros(rows, np.int32)], dtype=np.int32
        )
        if offsets is not None:
            known[3] = offsets
        size = next((size for size in self._graphs if size >= rows), None)
        if size is None or not (size == rows or self._padded):
            self._fill(known, rows)
            return self._compute(rows, int(plan.kv_len.max()), groups)
        self._fill(known, size)
        self._plan_again(size, groups)
        self._graphs[size].replay()
        made = self._outputs_of(rows)
        return FusedDecoderOutput(made.hidden, made.finite, made.logits, made.logits_finite, None)

    def _plan_again(self, size: int, groups: Sequence[AttentionMetadata]) -> None:
        """Let backends that plan on the host do so for the graph that is about to be replayed."""
        captured = self._captured_groups(size)
        if not any(rows.planners for rows in captured):
            return
        padded = self._padded_groups(groups, size)
        for rows, planned, owner in zip(captured, padded, groups, strict=True):
            for plan in rows.planners:
                plan(planned, owner)

    def _captured_groups(self, size: int) -> list[AttentionMetadata]:
        """The rows of a captured step, which are those of padding as long as it is captured."""
        if size not in self._captured:
            none = np.zeros(0, np.int32)
            nothing = (
                AttentionMetadata(shape, none[:, None], none, none, self._upload)
                for shape in self._shapes
            )
            self._captured[size] = self._padded_groups(nothing, size)
        return self._captured[size]

    def _padded_groups(
        self, groups: Iterable[AttentionMetadata], size: int
    ) -> list[AttentionMetadata]:
        """The rows of each group, and behind them those of padding."""
        padded: list[AttentionMetadata] = []
        for rows, table, page in zip(groups, self._tables, self._padding_pages, strict=True):
            ones = np.ones(size - len(rows.kv_len), np.int32)
            added = ((0, len(ones)), (0, 0))
            padded.append(
                AttentionMetadata(
                    rows.shape,
                    np.pad(rows.page_table, added, constant_values=page),
                    np.append(rows.query_len, ones),
                    np.append(rows.kv_len, ones),
                    rows.upload,
                    pages_max=table.shape[1],
                )
            )
        return padded

    def _check_pages(self, plan: StepPlan) -> None:
        rows, written = np.arange(len(plan.slot)), plan.kv_len - 1
        for shape, table in zip(self._shapes, plan.page_tables, strict=False):
            page = written // shape.page_tokens
            if page.max() >= table.shape[1] or (table[rows, page] < 0).any():
                raise RuntimeError("a row writes a token that has no page")

    def _fill(self, known: Ints, size: int) -> None:
        """Copy the rows of a step to the device, with rows of padding behind them."""
        inputs = np.zeros((COLUMNS, size), np.int32)
        inputs[0], inputs[2] = self._padding, 1
        inputs[:, : known.shape[1]] = known
        self._stream.fill(self._inputs[: COLUMNS * size], inputs.ravel())

    def _capture(self, size: int) -> Graph:
        if self._outputs is None:
            self._outputs = self._allocate(size)
        with self._stream.launching():
            self._fill(np.zeros((COLUMNS, 0), np.int32), size)
        return self._stream.capture(partial(self._run, size))

    def _run(self, size: int, _: Cut) -> None:
        """What is captured: a step whose rows may be as long as any, into the shared outputs."""
        made = self._compute(size, self._positions, self._captured_groups(size))
        outputs = self._outputs_of(size)
        assert made.finite is not None, "layers run one by one"
        assert made.logits_finite is not None, "layers run one by one"
        outputs.hidden.copy_(made.hidden)
        outputs.finite.copy_(made.finite)
        outputs.logits.copy_(made.logits)
        outputs.logits_finite.copy_(made.logits_finite)

    def _compute(
        self, size: int, keys: int, groups: Sequence[AttentionMetadata]
    ) -> FusedDecoderOutput:
        inputs = self._inputs[: COLUMNS * size].view(COLUMNS, size)
        resolved: list[AttentionMetadata] = []
        rows = None
        for group, table in zip(groups, self._tables, strict=True):
            rows = self._ops.decode_rows(inputs, self._last, table, group.shape.page_tokens)
            tiles = Tiles(self._tiles[:size], 1, splits_of(keys, size, group.shape.heads))
            on_device = DeviceRows(table, rows.rows, tiles, None)
            resolved.append(group.resolved(on_device, rows.places))
        assert rows is not None, "a model that attends"
        ctx = self._contexts.decoding(tuple(resolved), rows.positions, rows.rotary)
        hidden, finite, aux = self._decoder.forward(ctx, rows.tokens)
        logits = self._decoder.logits(ctx, hidden)
        return FusedDecoderOutput(hidden, finite, logits, self._ops.finite_rows(logits), None, aux)

    def _allocate(self, size: int) -> _Outputs:
        device = self._inputs.device
        return _Outputs(
            torch.zeros((size, self._hidden), dtype=self._dtype, device=device),
            torch.zeros(size, dtype=torch.bool, device=device),
            torch.zeros((size, self._vocabulary), dtype=torch.float32, device=device),
            torch.zeros(size, dtype=torch.bool, device=device),
        )

    def _outputs_of(self, rows: int) -> _Outputs:
        """The outputs of the first rows."""
        assert self._outputs is not None, "something was captured"
        return _Outputs(*(part[:rows] for part in self._outputs))
