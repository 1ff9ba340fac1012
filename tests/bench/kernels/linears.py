"""Packed linears against the memory rate and against torch: all linears of a model in order.

python -m tests.bench.kernels.linears --shape llama-135m --json FILE
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from tests.bench.kernels.rounds import Rounds, arguments, read_gb_s, run, setup
from tests.bench.models import PLAIN, Shape
from tests.bench.summary import Measurement, Summary, here, measured, single

from antiphon.kernels.cpu.linear import Format, Grouping, PackedGroups, PackedWeight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

ROWS = (1, 2, 4, 8, 16, 64, 256, 1024)
FORMATS: tuple[Format, ...] = ("packed", "int8", "int8_dynamic")
FOUR_BITS = tuple(map(float, range(16)))
GROUPINGS = {
    "Q4_1, Q4_K": Grouping(4, 32, torch.float16, minimums=True, values=FOUR_BITS),
    "int4 in groups of 128": Grouping(4, 128, torch.float16, minimums=True, values=FOUR_BITS),
    "Q6_K": Grouping(6, 16, torch.float16, minimums=False, values=tuple(map(float, range(64)))),
    "Q8_0": Grouping(8, 32, torch.float16, minimums=False),
}
"""As they meet activations in bfloat16."""
ROUNDS_S = 20.0
"""About how long one number of rows is measured."""


def sizes(shape: Shape) -> Iterator[tuple[int, int]]:
    """Inputs and outputs of each linear, in the order of a step."""
    head = shape.hidden // shape.heads
    for _ in range(shape.layers):
        yield shape.hidden, head * (shape.heads + 2 * shape.kv_heads)
        yield shape.hidden, shape.hidden
        yield shape.hidden, 2 * shape.intermediate
        yield shape.intermediate, shape.hidden
    yield shape.hidden, shape.vocabulary


@dataclass(frozen=True)
class Way:
    read_bytes: int
    linears: Sequence[tuple[int, Callable[[Tensor], Tensor]]]

    def __call__(self, by_inputs: Mapping[int, Tensor]) -> None:
        for inputs, multiply in self.linears:
            multiply(by_inputs[inputs])


def ways(shape: Shape) -> dict[str, Way]:
    """Torch first, then every format of ours; codes of groups are random."""
    weights = [torch.randn(outputs, inputs).bfloat16() for inputs, outputs in sizes(shape)]
    plain = [(weight.shape[1], partial(F.linear, weight=weight)) for weight in weights]
    found = {"torch": Way(sum(weight.nbytes for weight in weights), plain)}
    for format_ in FORMATS:
        kept = [packed(weight, format_) for weight in weights]
        linears = [
            (weight.shape[1], one.linear.multiply)
            for weight, one in zip(weights, kept, strict=True)
        ]
        found[format_] = Way(sum(one.nbytes for one in kept), linears)
    for name, grouping in GROUPINGS.items():
        made = [(inputs, grouped(inputs, outputs, grouping)) for inputs, outputs in sizes(shape)]
        linears = [(inputs, one.linear.multiply) for inputs, one in made]
        found[name] = Way(sum(one.nbytes for _, one in made), linears)
    return found


def grouped(inputs: int, outputs: int, grouping: Grouping) -> PackedGroups:
    made = PackedGroups(inputs, outputs, grouping, bias=False, dtype=torch.bfloat16)
    codes = torch.randint(0, 1 << grouping.bits, (outputs, inputs), dtype=torch.uint8)
    scales = torch.rand(outputs, -(-inputs // grouping.group)) / 1000
    made.write(0, codes, scales, -8 * scales if grouping.minimums else None)
    return made


def packed(weight: Tensor, format_: Format) -> PackedWeight:
    outputs, inputs = weight.shape
    made = PackedWeight(inputs, outputs, bias=False, dtype=weight.dtype, format_=format_)
    made.write(0, weight)
    return made


def measure(shape: Shape, rows: Sequence[int]) -> Summary:
    found, rounds = ways(shape), Rounds()
    macs = sum(inputs * outputs for inputs, outputs in sizes(shape))
    measurements: list[Measurement] = []
    for count in rows:
        by_inputs = {
            inputs: torch.randn(count, inputs).bfloat16() for inputs, _ in set(sizes(shape))
        }
        work = {name: partial(way, by_inputs) for name, way in found.items()}
        times = rounds.alternate(work, ROUNDS_S)
        case = f"{count} rows"
        rate = round(read_gb_s(times), 1)
        measurements.append(single("read_gb_s", rate, case=case, arm="plain read"))
        for name, way in found.items():
            ms = median(times[name])
            speedup = median(times["torch"]) / ms
            measurements += [
                measured("ms", times[name], case=case, arm=name),
                single("read_gb_s", round(way.read_bytes / ms / 1e6, 1), case=case, arm=name),
                single("gflop_s", round(2 * macs * count / ms / 1e6, 1), case=case, arm=name),
                single("speedup_over_torch", round(speedup, 3), case=case, arm=name),
            ]
    return here("linears", {"shape": shape.name, **setup()}, measurements)


_SHAPES = {shape.name: shape for shape in PLAIN}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", choices=sorted(_SHAPES), default="llama-135m")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    run(parser, lambda given: measure(_SHAPES[given.shape], given.rows))


if __name__ == "__main__":
    main()
