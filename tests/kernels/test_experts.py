"""A mixture of experts in one call, against the same written out in torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch
from tests.kernels.rows import ISAS, threads, using

from antiphon.kernels.activation import clamped_swish_mul, gate, sigmoid
from antiphon.kernels.cpu.experts import PackedExperts
from antiphon.kernels.cpu.linear import Format, PackedWeight
from antiphon.kernels.routing import RoutingSpec, combine, route, sort_by_expert

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.kernels.activation import ActivationKind
    from antiphon.kernels.cpu.experts import CompiledExperts

pytestmark = pytest.mark.skipif(not ISAS, reason="the CPU's own kernels are not built")

HIDDEN, COUNT, WIDTH, SHARED_WIDTH = 72, 8, 40, 56
TOKENS = (1, 2, 5, 17, 150, 700)


@dataclass(frozen=True)
class Kind:
    """A mixture; correction and gate are of the router and of the shared expert."""

    routing: RoutingSpec
    activation: ActivationKind | tuple[float, float] = "silu"
    bias: bool = False
    correction: bool = False
    on_input: bool = False
    shared: bool = False
    shared_gate: bool = False


GROUPED = RoutingSpec(
    top_k=3,
    scoring="sigmoid",
    renormalised=True,
    factor=2.5,
    groups=4,
    groups_kept=2,
    group_best=2,
)
KINDS = {
    "softmax": Kind(RoutingSpec(top_k=3)),
    "softmax, renormalised": Kind(RoutingSpec(top_k=2, renormalised=True)),
    "softmax within groups": Kind(
        RoutingSpec(top_k=3, groups=4, groups_kept=2, factor=16.0), shared=True
    ),
    "sigmoid within groups, corrected": Kind(GROUPED, correction=True, shared=True),
    "sigmoid on the input": Kind(
        RoutingSpec(top_k=1, scoring="sigmoid"), on_input=True, shared=True
    ),
    "a gated shared expert": Kind(RoutingSpec(top_k=4), shared=True, shared_gate=True),
    "clamps and biases": Kind(
        RoutingSpec(top_k=4, renormalised=True), activation=(1.702, 0.5), bias=True
    ),
    "all of them": Kind(RoutingSpec(top_k=COUNT, renormalised=True), bias=True),
    "gelu": Kind(RoutingSpec(top_k=2), activation="gelu"),
    "gelu_tanh": Kind(RoutingSpec(top_k=2), activation="gelu_tanh"),
    "relu": Kind(RoutingSpec(top_k=2), activation="relu"),
    "relu_squared": Kind(RoutingSpec(top_k=2), activation="relu_squared"),
    "tanh": Kind(RoutingSpec(top_k=2), activation="tanh"),
}


@dataclass
class Mixture:
    """Random weights, packed and as they are."""

    kind: Kind
    dtype: torch.dtype
    format_: Format
    seed: int = 0
    compiled: CompiledExperts = field(init=False)

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)
        kind, down_bias = self.kind, self.kind.bias
        self.router = self._packed(HIDDEN, COUNT, bias=kind.bias, dtype=torch.float32)
        self.correction = self.random(COUNT).float() if kind.correction else None
        self.gate_up = [self._packed(HIDDEN, 2 * WIDTH, bias=down_bias) for _ in range(COUNT)]
        self.down = [self._packed(WIDTH, HIDDEN, bias=down_bias) for _ in range(COUNT)]
        self.shared = None
        if kind.shared:
            self.shared = (
                self._packed(HIDDEN, 2 * SHARED_WIDTH),
                self._packed(SHARED_WIDTH, HIDDEN),
            )
        self.shared_gate = self._packed(HIDDEN, 1) if kind.shared_gate else None
        self.compiled = PackedExperts(
            routing=kind.routing,
            router=self.router.linear,
            correction=self.correction,
            gate_up=[each.linear for each in self.gate_up],
            down=[each.linear for each in self.down],
            first=0,
            activation=kind.activation,
            apply_router_weight_on_input=kind.on_input,
            shared=self.shared and (self.shared[0].linear, self.shared[1].linear),
            shared_gate=None if self.shared_gate is None else self.shared_gate.linear,
        ).compile()

    def random(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self._generator).to(self.dtype)

    def expected(self, x: Tensor) -> Tensor:
        """Operation by operation, with the same linears."""
        kind = self.kind
        logits = self.router.linear.multiply(x.float())
        chosen, shares = route.reference(logits, self.correction, kind.routing)
        pair, bounds = sort_by_expert(chosen, range(COUNT))
        rows = x[pair // chosen.shape[1]]
        if kind.on_input:
            rows = (rows * shares.flatten()[pair, None]).to(x.dtype)
            shares = torch.ones_like(shares)
        made = torch.cat(
            [
                self.down[e].linear.multiply(
                    self._gated(self.gate_up[e].linear.multiply(rows[begin:end]))
                )
                for e, (begin, end) in enumerate(pairwise(bounds))
            ]
        )
        routed = combine.reference(made, pair, shares)
        if self.shared is None:
            return routed
        gate_up, down = self.shared
        beside = down.linear.multiply(gate.reference(gate_up.linear.multiply(x), "silu"))
        if self.shared_gate is not None:
            beside = beside * sigmoid(self.shared_gate.linear.multiply(x))
        return routed + beside

    def _gated(self, gate_up: Tensor) -> Tensor:
        activation = self.kind.activation
        if isinstance(activation, tuple):
            return clamped_swish_mul.reference(gate_up, *activation)
        return gate.reference(gate_up, activation)

    def _packed(
        self, inputs: int, outputs: int, *, bias: bool = False, dtype: torch.dtype | None = None
    ) -> PackedWeight:
        exact = dtype is not None or outputs == 1
        packed = PackedWeight(
            inputs,
            outputs,
            bias=bias,
            dtype=dtype or self.dtype,
            format_="packed" if exact else self.format_,
            halves=outputs in (2 * WIDTH, 2 * SHARED_WIDTH),
        )
        packed.write(0, self.random(outputs, inputs).to(dtype or self.dtype) * inputs**-0.5)
        if bias:
            packed.write_bias(0, self.random(outputs).float())
        return packed


def check(mixture: Mixture, x: Tensor) -> None:
    got, want = mixture.compiled.forward(x), mixture.expected(x)
    assert float(want.float().std()) > 0.01
    # Roundings of what an exponential's last bits have moved across, here and there.
    some = {torch.bfloat16: 2e-2, torch.float32: 2e-5}[x.dtype] * float(want.float().abs().max())
    torch.testing.assert_close(got, want, rtol=0.0, atol=some)
    if x.dtype == torch.bfloat16:
        assert float((got != want).float().mean()) < 0.05


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_one_call_gives_what_its_operations_give(isa: str, dtype: torch.dtype, kind: Kind) -> None:
    mixture = Mixture(kind, dtype, "packed")
    with using(isa):
        for tokens in TOKENS:
            check(mixture, mixture.random(tokens, HIDDEN))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format_", ["int8", "int8_dynamic"])
def test_experts_may_be_quantized(isa: str, format_: Format) -> None:
    mixture = Mixture(KINDS["a gated shared expert"], torch.bfloat16, format_)
    with using(isa):
        for tokens in (1, 40, 300):
            check(mixture, mixture.random(tokens, HIDDEN))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("format_", ["packed", "int8", "int8_dynamic"])
@pytest.mark.parametrize("name", ["sigmoid within groups, corrected", "clamps and biases"])
def test_a_token_has_the_bits_that_it_has_alone(
    isa: str, number: int, format_: Format, name: str
) -> None:
    mixture = Mixture(KINDS[name], torch.bfloat16, format_)
    x = mixture.random(333, HIDDEN)
    with using(isa), threads(number):
        together = mixture.compiled.forward(x)
        for first, length in ((0, 1), (7, 1), (5, 4), (40, 17), (100, 101)):
            part = x[first : first + length].clone()
            assert torch.equal(mixture.compiled.forward(part), together[first : first + length]), (
                first,
                length,
            )


def test_a_token_that_is_not_finite_spoils_no_other() -> None:
    mixture = Mixture(KINDS["sigmoid within groups, corrected"], torch.bfloat16, "packed")
    x = mixture.random(9, HIDDEN)
    good = mixture.compiled.forward(x)
    for bad in (torch.nan, torch.inf):
        x[4, 3] = bad
        got = mixture.compiled.forward(x)
        assert not torch.isfinite(got[4]).any()
        rest = [0, 1, 2, 3, 5, 6, 7, 8]
        assert torch.equal(got[rest], good[rest])


def test_no_tokens_give_none() -> None:
    mixture = Mixture(KINDS["softmax"], torch.float32, "packed")
    assert mixture.compiled.forward(torch.empty(0, HIDDEN)).shape == (0, HIDDEN)


def test_what_does_not_fit_together_is_refused() -> None:
    mixture = Mixture(KINDS["softmax"], torch.float32, "packed")

    def made(**changes: object) -> None:
        parts = {
            "routing": RoutingSpec(top_k=2),
            "router": mixture.router.linear,
            "correction": None,
            "gate_up": [each.linear for each in mixture.gate_up],
            "down": [each.linear for each in mixture.down],
            "first": 0,
            "activation": "silu",
        }
        PackedExperts(**parts | changes).compile()  # pyright: ignore[reportArgumentType]

    made()
    with pytest.raises(RuntimeError, match="no 9 of 8 experts"):
        made(routing=RoutingSpec(top_k=9))
    with pytest.raises(RuntimeError, match="no 5 of 8 experts"):
        made(routing=RoutingSpec(top_k=5, groups=2))
    with pytest.raises(RuntimeError, match="two linears"):
        made(down=[mixture.down[0].linear])
    with pytest.raises(RuntimeError, match="there are 8 experts, not 8 from 1 on"):
        made(first=1)
    with pytest.raises(RuntimeError, match="a linear of 40 to 72 where one of 72 to 72 belongs"):
        made(router=mixture.down[0].linear)
    with pytest.raises(RuntimeError, match="correction"):
        made(correction=torch.zeros(COUNT + 1))
    with pytest.raises(RuntimeError, match="x must be"):
        mixture.compiled.forward(torch.zeros(3, HIDDEN + 1))
