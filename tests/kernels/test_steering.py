from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from antiphon.kernels.op import DeviceCapability
from antiphon.kernels.ops import select

OPS = select(DeviceCapability("cpu"))
VOCABULARY = 70

PENALTY = st.floats(-2, 2, width=32)
REPETITION = st.floats(0.5, 2, width=32)
OUTPUTS = st.lists(st.integers(0, VOCABULARY - 1), max_size=40)
LOGITS = st.integers(0, 2**32 - 1).map(
    lambda seed: torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed))
)


def naive(
    row: torch.Tensor, outputs: list[int], frequency: float, presence: float, repetition: float
) -> list[float]:
    """One token after the other, as it is said in words."""
    logits = row.tolist()
    for token, count in Counter(outputs).items():
        logits[token] -= frequency * count
        logits[token] -= presence
        logits[token] *= 1 / repetition if logits[token] > 0 else repetition
    return logits


@given(st.lists(st.tuples(LOGITS, OUTPUTS, PENALTY, PENALTY, REPETITION), min_size=1, max_size=5))
def test_penalties_lower_what_was_drawn_before(rows) -> None:
    logits = torch.stack([row for row, *_ in rows])
    entries = [
        (index, token, count, frequency, presence, repetition)
        for index, (_, outputs, frequency, presence, repetition) in enumerate(rows)
        for token, count in Counter(outputs).items()
    ]
    columns = [torch.tensor([entry[n] for entry in entries]) for n in range(6)]
    OPS.penalize(logits, columns[0].long(), columns[1].long(), *(c.float() for c in columns[2:]))
    expected = [naive(row, *others) for row, *others in rows]
    np.testing.assert_allclose(logits.numpy(), expected, atol=1e-4)


@given(st.integers(1, 100), st.integers(0, 2**32 - 1))
def test_a_mask_forbids_each_token_whose_bit_is_not_set(vocabulary: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    logits = torch.randn(6, vocabulary, generator=torch.Generator().manual_seed(seed))
    rows = np.sort(random.permutation(6)[: random.integers(1, 7)])
    allowed = random.random((len(rows), vocabulary)) < 0.5
    words = np.zeros((len(rows), -(-vocabulary // 32)), np.uint32)
    for row, token in np.argwhere(allowed):
        words[row, token // 32] |= np.uint32(1 << token % 32)
    expected = logits.clone()
    expected[torch.as_tensor(rows)] = torch.where(
        torch.as_tensor(allowed), logits[torch.as_tensor(rows)], -torch.inf
    )
    OPS.mask(logits, torch.as_tensor(rows), torch.as_tensor(words.view(np.int32)))
    assert torch.equal(logits, expected)


def test_a_bias_is_added_and_minus_infinity_forbids() -> None:
    logits = torch.zeros(3, 5)
    OPS.bias(
        logits,
        torch.tensor([0, 2, 2]),
        torch.tensor([4, 0, 1]),
        torch.tensor([1.5, -2.0, -torch.inf]),
    )
    assert logits.tolist() == [[0, 0, 0, 0, 1.5], [0] * 5, [-2.0, -torch.inf, 0, 0, 0]]


@given(st.integers(0, 2**32 - 1), st.floats(0.0625, 10, width=32))
def test_a_scaled_logit_less_the_log_mass_is_its_log_probability(seed: int, warmth: float) -> None:
    logits = 4 * torch.randn(3, 500, generator=torch.Generator().manual_seed(seed))
    logits[1, 7:] = -torch.inf
    temperature = torch.tensor([warmth, 1.0, warmth])
    mass = OPS.logsumexp(logits, temperature)
    got = logits / temperature[:, None] - mass[:, None]
    expected = torch.log_softmax(logits.double() / temperature.double()[:, None], dim=-1)
    np.testing.assert_allclose(got.numpy(), expected.numpy(), atol=3e-5, rtol=1e-5)


def test_a_row_s_log_mass_does_not_depend_on_its_batch() -> None:
    logits = 5 * torch.randn(64, 5000, generator=torch.Generator().manual_seed(2))
    temperature = torch.linspace(0.3, 2.0, 64)
    together = OPS.logsumexp(logits, temperature)
    for row in range(64):
        one = slice(row, row + 1)
        assert torch.equal(OPS.logsumexp(logits[one], temperature[one]), together[one])
