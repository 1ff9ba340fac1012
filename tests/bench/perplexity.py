"""Perplexity of the embedded model with quantized weights, on conversations not in its training.

python -m tests.bench.perplexity --json FILE
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from tests.bench.summary import Measurement, Summary, arguments, here, report, single
from tests.models.specs import attention_of
from tests.support.models import load
from tests.training.batches import Encoder, Row
from tests.training.dialogue import seeded
from tests.training.grammar import conversations
from tokenizers import Tokenizer

from antiphon import embedded
from antiphon.kernels.op import DeviceCapability
from antiphon.kernels.ops import select
from antiphon.kernels.rotary import apply_rotary, cos_sin
from antiphon.layers.context import AttentionParams, ForwardContext, LocalExperts
from antiphon.layers.methods import LinearMethod
from antiphon.layers.weights import SingleRank

if TYPE_CHECKING:
    from torch import Tensor

    from antiphon.model_worker.model.load import LoadedModel

SEED = 20_000
"""Training starts from another."""
LEFT_OUT = (LinearMethod.GROUPED, LinearMethod.FP8, LinearMethod.TILED)
"""What a checkpoint would have to be stored in, and what a GPU multiplies as it is."""


@dataclass(frozen=True)
class WholeSequence:
    """Attention of one sequence by itself, without a cache."""

    heads: int
    kv_heads: int
    cos: Tensor
    sin: Tensor

    def __call__(self, layer: int, heads: Tensor, params: AttentionParams) -> Tensor:
        """(T, Q + 2 H, D)  ->  (T, Q, D)."""
        assert params.norms is None, "the embedded model has no norms of heads"
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        q, k = apply_rotary(q, self.cos, self.sin), apply_rotary(k, self.cos, self.sin)
        mixed = F.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True, enable_gqa=True
        )
        return mixed.transpose(0, 1).contiguous()


def logits(model: LoadedModel, row: Row) -> Tensor:
    """Of every token of a conversation, (T, V)."""
    spec, build = model.spec, model.build
    positions = torch.tensor(row.positions)
    mixer = attention_of(spec.layers[0])
    assert mixer.rotary is not None
    cos, sin = cos_sin(mixer.rotary.frequencies_at(positions), positions, build.dtype)
    ctx = ForwardContext(
        ops=select(DeviceCapability("cpu", dtype=build.dtype)),
        tp=SingleRank(),
        experts=LocalExperts(),
        attend=WholeSequence(mixer.query_heads, mixer.kv_heads, cos, sin),
    )
    decoder = model.own_decoder
    return decoder.logits(ctx, decoder.forward(ctx, torch.tensor(row.token_ids)).hidden)


def measure(count: int, dtype: str) -> Summary:
    """Score the same conversations with every storage format of weights that are not quantized.

    `answers` are tokens of the assistant, which the model was trained on and hardly ever misses;
    it was not trained on the others, so that a change shows in `all`.
    """
    folder = embedded.path()
    encoder = Encoder(Tokenizer.from_file(str(folder / "tokenizer.json")))
    rng = seeded("perplexity", SEED)
    rows = [encoder.chat(rng, chat) for chat in itertools.islice(conversations(SEED), count)]
    answers = torch.tensor([supervised for row in rows for supervised in row.supervised[1:]])
    counted = {"answers": answers, "all": torch.ones_like(answers)}
    found: list[Measurement] = []
    plain: Foretold | None = None
    for linear in [one for one in LinearMethod if one not in LEFT_OUT]:
        predicted = foretold(load(folder, dtype=dtype, linear=linear), rows)
        plain = plain or predicted
        for case, tokens in counted.items():
            values = score(predicted, plain, tokens)
            found += [single(name, value, case=case, arm=linear) for name, value in values.items()]
    setup = {"model": embedded.SERVED_NAME, "dtype": dtype, "conversations": count}
    return here("perplexity", setup, found)


@dataclass(frozen=True)
class Foretold:
    """Of every token but the first of a row: its loss in nats, and the likeliest instead."""

    losses: Tensor
    likeliest: Tensor


def foretold(model: LoadedModel, rows: list[Row]) -> Foretold:
    losses: list[Tensor] = []
    likeliest: list[Tensor] = []
    for row in rows:
        found, came = logits(model, row)[:-1], torch.tensor(row.token_ids[1:])
        losses.append(F.cross_entropy(found.double(), came, reduction="none"))
        likeliest.append(found.argmax(dim=-1))
    return Foretold(torch.cat(losses), torch.cat(likeliest))


def score(predicted: Foretold, plain: Foretold, counted: Tensor) -> dict[str, float]:
    """Sum up the tokens that are counted.

    Returns:
        `change` of the perplexity against that of `plain`, as a share, and `agreement`: the share
        of tokens whose argmax is that of `plain`.
    """
    after, before = (math.exp(float(one.losses[counted].mean())) for one in (predicted, plain))
    same = (predicted.likeliest == plain.likeliest)[counted].double()
    return {
        "tokens": int(counted.sum()),
        "perplexity": round(after, 6),
        "change": round(after / before - 1, 6),
        "agreement": round(float(same.mean()), 6),
    }


def main() -> None:
    parser = arguments(description=__doc__)
    parser.add_argument("--conversations", type=int, default=400)
    parser.add_argument("--dtype", default="bfloat16")
    given = parser.parse_args()
    with torch.inference_mode():
        summary = measure(given.conversations, given.dtype)
    report(summary, given.json)


if __name__ == "__main__":
    main()
