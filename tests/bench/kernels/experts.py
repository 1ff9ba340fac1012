"""Mixtures of experts as one call, against each expert by itself: all layers of a model in order.

python -m tests.bench.kernels.experts --json FILE
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import torch
from tests.bench.kernels.rounds import Rounds, arguments, read_gb_s, run, setup
from tests.bench.models import EXPERTS, ExpertsShape, made
from tests.bench.summary import Measurement, Summary, here, measured, single
from tests.support.models import load

from antiphon.kernels.op import DeviceCapability
from antiphon.kernels.ops import select
from antiphon.layers.context import AttentionParams, ForwardContext, LocalExperts
from antiphon.layers.moe import MixtureOfExperts
from antiphon.layers.weights import SingleRank

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from antiphon.layers.sublayer import Sublayer

ROWS = (1, 4, 16, 64, 256, 1024)
APART = "expert by expert"
ROUNDS_S = 20.0
"""About how long one number of rows is measured."""
WEIGHT_BYTES = {APART: 2, "packed": 2, "int8": 1, "int8_dynamic": 1}


def no_attention(layer: int, heads: Tensor, params: AttentionParams) -> Tensor:
    raise AssertionError(f"experts do not attend: {layer}, {heads.shape}, {params}")


@dataclass(frozen=True)
class Way:
    blocks: Sequence[Sublayer]
    context: ForwardContext

    def __call__(self, x: Tensor) -> None:
        for block in self.blocks:
            block(self.context, x)


def ways(shape: ExpertsShape) -> dict[str, Way]:
    ops = select(DeviceCapability("cpu", torch.bfloat16))
    context = ForwardContext(ops=ops, tp=SingleRank(), experts=LocalExperts(), attend=no_attention)
    found: dict[str, Way] = {}
    for name in WEIGHT_BYTES:
        linear = "packed" if name == APART else name
        decoder = load(made(shape).folder, dtype="bfloat16", linear=linear).own_decoder
        blocks = [layer._feed_forward for layer in decoder.layers]
        mixtures = [block for block in blocks if isinstance(block, MixtureOfExperts)]
        for mixture in mixtures if name == APART else ():
            mixture._compiled = None
        found[name] = Way(mixtures, context)
    return found


def measure(shape: ExpertsShape, rows: Sequence[int]) -> Summary:
    found, rounds = ways(shape), Rounds()
    expert, measurements = 3 * shape.hidden * shape.intermediate, list[Measurement]()
    for count in rows:
        x = torch.randn(count, shape.hidden).bfloat16()
        times = rounds.alternate({name: partial(way, x) for name, way in found.items()}, ROUNDS_S)
        case = f"{count} rows"
        rate = round(read_gb_s(times), 1)
        measurements.append(single("read_gb_s", rate, case=case, arm="plain read"))
        read = shape.layers * shape.experts_read(count) * expert
        macs = shape.layers * shape.chosen * expert * count
        for name in found:
            ms = median(times[name])
            speedup = median(times[APART]) / ms
            gb_s = round(WEIGHT_BYTES[name] * read / ms / 1e6, 1)
            measurements += [
                measured("ms", times[name], case=case, arm=name),
                single("read_gb_s", gb_s, case=case, arm=name),
                single("gflop_s", round(2 * macs / ms / 1e6, 1), case=case, arm=name),
                single("speedup_over_apart", round(speedup, 3), case=case, arm=name),
            ]
    return here("experts", {"shape": shape.name, **setup()}, measurements)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    run(parser, lambda given: measure(EXPERTS, given.rows))


if __name__ == "__main__":
    main()
