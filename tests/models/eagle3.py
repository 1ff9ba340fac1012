"""Random draft heads of EAGLE-3's shape, and what they compute by plain torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from tests.models.tiny import CONFIG, VOCABULARY
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from transformers import PreTrainedModel

HIDDEN, WIDTH, HEADS, KV_HEADS, SIZE = 48, 64, 4, 2, 16
DRAFTED = 90
"""Tokens that a head can draft, of `VOCABULARY`."""
READ = (0, 1, 2)
"""Layers of the served model whose outputs a head reads, as its config names them."""
HEAD_CONFIG: Mapping[str, object] = {
    **CONFIG,
    "architectures": ["LlamaForCausalLMEagle3"],
    "intermediate_size": WIDTH,
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
    "draft_vocab_size": DRAFTED,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(READ)},
    "dtype": "float32",
}


def write_head(
    folder: Path,
    *,
    token_ids: Tensor | None = None,
    hidden: int = HIDDEN,
    vocabulary: int = VOCABULARY,
) -> Path:
    """Write a random head that drafts `token_ids`, by default every third one.

    It has the tensors of published heads that are not its own, too: the served model's embeddings,
    and which of its tokens can be drafted.
    """
    dice = torch.Generator().manual_seed(3)

    def drawn(*size: int) -> Tensor:
        return 0.2 * torch.randn(size, generator=dice)

    if token_ids is None:
        token_ids = 3 * torch.arange(DRAFTED)
    layer = {
        "self_attn.q_proj.weight": drawn(HEADS * SIZE, 2 * hidden),
        "self_attn.k_proj.weight": drawn(KV_HEADS * SIZE, 2 * hidden),
        "self_attn.v_proj.weight": drawn(KV_HEADS * SIZE, 2 * hidden),
        "self_attn.o_proj.weight": drawn(hidden, HEADS * SIZE),
        "mlp.gate_proj.weight": drawn(WIDTH, hidden),
        "mlp.up_proj.weight": drawn(WIDTH, hidden),
        "mlp.down_proj.weight": drawn(hidden, WIDTH),
        "input_layernorm.weight": 1 + drawn(hidden),
        "hidden_norm.weight": 1 + drawn(hidden),
        "post_attention_layernorm.weight": 1 + drawn(hidden),
    }
    drafted = torch.zeros(vocabulary, dtype=torch.bool)
    drafted[token_ids % vocabulary] = True
    tensors = {
        **{f"midlayer.{name}": tensor for name, tensor in layer.items()},
        "fc.weight": drawn(hidden, len(READ) * hidden),
        "norm.weight": 1 + drawn(hidden),
        "lm_head.weight": drawn(len(token_ids), hidden),
        "d2t": token_ids - torch.arange(len(token_ids)),
        "t2d": drafted,
        "embed_tokens.weight": torch.full((vocabulary, hidden), torch.nan),
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        **HEAD_CONFIG,
        "hidden_size": hidden,
        "vocab_size": vocabulary,
        "draft_vocab_size": len(token_ids),
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_stubborn_head(folder: Path) -> Path:
    """Write a head that can draft nothing but the first token."""
    return write_head(folder, token_ids=torch.zeros(1, dtype=torch.int64))


@dataclass
class TextbookHead:
    """A head of `write_head` beside its served model, both in float32 and without a cache."""

    folder: Path
    served: PreTrainedModel

    def __post_init__(self) -> None:
        self._weights = load_file(self.folder / "model.safetensors")

    @torch.inference_mode()
    def drafts(self, ids: Sequence[int], known: int, count: int) -> list[int]:
        """Drafts after `ids`, of which the served model has read the first `known`.

        That is all but the last one, which it has sampled.
        """
        assert known == len(ids) - 1
        outputs = self.served(torch.tensor([list(ids[:known])]), output_hidden_states=True)
        read = [outputs.hidden_states[index + 1][0] for index in READ]
        states = torch.cat(read, dim=-1) @ self._weights["fc.weight"].T
        text, made = list(ids), list[int]()
        embeddings = self.served.get_input_embeddings().weight
        assert isinstance(embeddings, Tensor)
        for _ in range(count):
            hidden, after = self._layer(embeddings[text[1:]], states)
            logits = hidden[-1] @ self._weights["lm_head.weight"].T
            found = int(logits.argmax())
            made.append(found + int(self._weights["d2t"][found]))
            text.append(made[-1])
            states = torch.cat((states, after[-1:]))
        return made

    def _layer(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat(
            (self._normed(embedded, "input_layernorm"), self._normed(states, "hidden_norm")), dim=-1
        )
        stream = states + self._attended(x)
        normed = self._normed(stream, "post_attention_layernorm")
        gate, up = self._linear(normed, "mlp.gate_proj"), self._linear(normed, "mlp.up_proj")
        stream = stream + self._linear(torch.nn.functional.silu(gate) * up, "mlp.down_proj")
        return self._scaled(stream, self._weights["norm.weight"]), stream

    def _attended(self, x: Tensor) -> Tensor:
        q = self._rotated(self._linear(x, "self_attn.q_proj").view(len(x), HEADS, SIZE))
        k = self._rotated(self._linear(x, "self_attn.k_proj").view(len(x), KV_HEADS, SIZE))
        v = self._linear(x, "self_attn.v_proj").view(len(x), KV_HEADS, SIZE)
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * SIZE**-0.5
        later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(later, -torch.inf).softmax(dim=-1)
        out = torch.einsum("hqk,khd->qhd", mixed, v).flatten(1)
        return self._linear(out, "self_attn.o_proj")

    def _rotated(self, heads: Tensor) -> Tensor:
        rates = 10000.0 ** (-torch.arange(0, SIZE, 2) / SIZE)
        angles = torch.arange(len(heads))[:, None] * rates
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = heads.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self._weights[f"midlayer.{name}.weight"].T

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return self._scaled(x, self._weights[f"midlayer.{name}.weight"])

    @staticmethod
    def _scaled(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-3) * weight
