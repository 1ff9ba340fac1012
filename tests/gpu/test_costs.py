"""The formulae of a step's cost, against what it launches in a dry run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.gpu.costs import (
    GROUPED_BYTES,
    ITEM_BYTES,
    LAUNCHES,
    decode_cost,
    launches_of,
    used_experts,
)
from tests.kernels.dry_run import in_groups, open_worker
from tests.kernels.published import MODELS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from antiphon.kernels.triton.launch import RECORDING
from antiphon.model_worker.runner.device_runner import DeviceRunner

KEYS = 5000
UNFILLED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "detach"})
EXPERTS = ("gate_up_kernel", "down_kernel")


class StepCounts(TorchDispatchMode):
    """Counts what is called meanwhile: weights, keys and values, products, and launches."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self._rows = rows
        self.weight_bytes = self.cache_bytes = self.operations = self.launches = 0

    def take(
        self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: Any
    ) -> None:
        self.launches += 1
        name = kernel.fn.__name__
        if name == "paged_attention_kernel":
            seen = min(KEYS, constants["WINDOW"] or KEYS)
            cached = seen * constants["KV_HEADS"] * constants["SIZE"] * self._rows
            self.cache_bytes += 2 * cached * arguments[1].itemsize
            self.operations += 4 * cached * constants["GROUP"]
        if name in EXPERTS:
            # Weights and their scales; what there is not has another one in its place.
            weights = {id(each): each for each in arguments if dims_of(each) > 2}
            pairs = max(each for each in arguments if isinstance(each, int))
            self.weight_bytes += sum(each.nbytes for each in weights.values())
            halves = 2 if name == "gate_up_kernel" else 1
            self.operations += 2 * pairs * halves * constants["HIDDEN"] * constants["WIDTH"]
        if name == "multiply_kernel":
            _, codes, scales, minimums, *_, tokens = arguments
            weights = {id(each): each for each in (codes, scales, minimums)}
            self.weight_bytes += sum(each.nbytes for each in weights.values())
            self.operations += 2 * tokens * constants["INPUTS"] * constants["OUTPUTS"]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        composite = torch._C._dispatch_has_kernel_for_dispatch_key
        if composite(func.name(), "CompositeImplicitAutograd"):
            with self:
                return func.decompose(*args, **kwargs)
        name, schema = func.overloadpacket.__name__, func._schema
        views = not schema.is_mutable and any(value.alias_info for value in schema.returns)
        self.launches += not views and name not in UNFILLED
        if name in ("mm", "addmm"):
            x, weight = args[-2:]
            self.weight_bytes += weight.nbytes
            self.operations += 2 * len(x) * weight.numel()
        return func(*args, **kwargs)


def dims_of(argument: Any) -> int:
    return argument.dim() if isinstance(argument, Tensor) else 0


def counted(name: str, layers: int, rows: int, way: dict[str, Any]) -> StepCounts:
    """Of a decode step by a graph."""
    model = open_worker(MODELS[name].config(layers), positions=KEYS, **way)
    counts = StepCounts(rows)
    assert isinstance(model.runner, DeviceRunner)
    graphs = model.runner._decode
    RECORDING.recorder = counts.take
    try:
        with torch.inference_mode():
            graphs._outputs = graphs._allocate(rows)
            with counts:
                graphs._run(rows, lambda call: call())
    finally:
        RECORDING.recorder = None
    return counts


@pytest.mark.parametrize(
    ("name", "grouped"),
    [*((name, False) for name in LAUNCHES), *((name, True) for name in GROUPED_BYTES)],
)
def test_costs_are_those_of_what_is_launched(name: str, *, grouped: bool) -> None:
    sizes, rows = MODELS[name], 24
    way = in_groups(sizes.grouped) if grouped and sizes.grouped is not None else {}
    linear_bytes, expert_bytes = GROUPED_BYTES[name] if grouped else (ITEM_BYTES, ITEM_BYTES)
    found, more = (counted(name, layers, rows, way) for layers in (2, 4))
    each = (more.launches - found.launches) // 2
    assert LAUNCHES[name] == (each, found.launches - 2 * each)
    cost = decode_cost(sizes, 2, rows, KEYS, linear_bytes, expert_bytes)
    idle = 0.0
    if sizes.experts is not None:
        count, chosen = sizes.experts
        unused = count - used_experts(count, chosen, rows)
        idle = 2 * expert_bytes * 3 * sizes.hidden * sizes.width * unused
    assert found.weight_bytes == pytest.approx(cost.weight_bytes + idle, rel=1e-9)
    assert found.cache_bytes == cost.cache_bytes
    assert found.operations == cost.operations
    assert launches_of(name, 4) == more.launches


def test_few_tokens_read_few_experts() -> None:
    assert used_experts(128, 8, 1) == pytest.approx(8)
    assert used_experts(128, 8, 10_000) == pytest.approx(128)
    one, many = (decode_cost(MODELS["Qwen3-30B-A3B"], 48, rows, 1000) for rows in (1, 256))
    assert one.weight_bytes < many.weight_bytes / 8
    assert one.operations == many.operations / 256
