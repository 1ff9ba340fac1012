"""A draft head: one layer that drafts from hidden states of the model that it drafts for.

Source: Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test", arXiv:2503.01840.

Axes: T tokens, L tokens whose logits are requested, A auxiliary layers of the served model, D
tokens that can be drafted.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from antiphon.layers.embedding import VocabParallelEmbedding
from antiphon.layers.linear import replicated
from antiphon.layers.norm import build_norm
from antiphon.layers.sublayer import LayerBuildContext
from antiphon.layers.weights import BuildContext, Module, WeightSource
from antiphon.model_worker.model.decoder_layer import NotStackable, build_sublayer
from antiphon.model_worker.model.spec import HeadSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from antiphon.kernels.cpu.fused_decoder import FusedDecoder, UncachedHeads
    from antiphon.kernels.kv import LayerKvCache
    from antiphon.kernels.recurrent import LayerStates
    from antiphon.layers.context import ForwardContext
    from antiphon.layers.methods import LinearMethod
    from antiphon.model_worker.model.decoder_layer import PositionSpec
    from antiphon.model_worker.model.spec import ModelSpec


class DraftHead(Module):
    """Reads at each position the token after it and what is known of the tokens up to it.

    That is the hidden states of the served model's auxiliary layers, projected to one; or, where
    the served model has not been yet, what the head itself has made of the token before. It embeds
    tokens by the table of the served model.
    """

    def __init__(self, spec: ModelSpec, build: BuildContext, method: LinearMethod) -> None:
        own, layer = spec.draft_head, spec.layers[0]
        assert own is not None, "a spec of a draft head"
        assert isinstance(spec.head, HeadSpec), "it has logits"
        assert spec.norm_name is not None, "it has a final norm"
        assert layer.feed_forward is not None, "it has both blocks"
        site = LayerBuildContext(0, spec.layer_name, spec.hidden, build, method)
        norm = partial(site.norm, layer.norm, size=spec.hidden)
        self.invariant = method.invariant
        self._dtype = build.dtype
        self._served_vocabulary = spec.vocabulary
        self._project = replicated(
            "fc",
            own.aux_count * own.target_hidden,
            spec.hidden,
            bias=False,
            build=build,
            method=method,
        )
        self._token_norm = norm(tensor="input_layernorm")
        self._state_norm = norm(tensor="hidden_norm")
        self._mixer = build_sublayer(site, layer.mixer)
        self._norm = norm(tensor="post_attention_layernorm")
        self._feed_forward = build_sublayer(site, layer.feed_forward)
        self._final_norm = build_norm(spec.norm, spec.norm_name, spec.hidden, build)
        self._head = VocabParallelEmbedding(
            spec.head.name, own.vocabulary, spec.hidden, build, method
        )
        self.children = (
            *(self._project, self._token_norm, self._state_norm, self._mixer, self._norm),
            *(self._feed_forward, self._final_norm, self._head),
        )
        self.token_ids = torch.arange(own.vocabulary)
        """The token of each logit, (D,)."""

    def project(self, ctx: ForwardContext, aux: Tensor) -> Tensor:
        """States of the served model's auxiliary layers (T, A * its hidden)  ->  (T, hidden)."""
        return self._project(ctx, aux.to(self._dtype))

    def forward(
        self, ctx: ForwardContext, embedded: Tensor, states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Embeddings of the tokens after T positions, and the states there, both (T, hidden).

        Returns the hidden states, ready for the head, and the states for the positions after
        these, both (T, hidden).
        """
        entered = self._token_norm(ctx, embedded.to(self._dtype)), self._state_norm(ctx, states)
        mixed = self._mixer(ctx, torch.cat(entered, dim=-1))
        normed, stream = self._norm.add(ctx, mixed, states)
        return self._final_norm.add(ctx, self._feed_forward(ctx, normed), stream)

    def logits(self, ctx: ForwardContext, hidden: Tensor) -> Tensor:
        """Logits of hidden states (L, hidden)  ->  (L, D) float32."""
        return self._head.logits(ctx, hidden)

    def stack(
        self,
        caches: Mapping[int, LayerKvCache | UncachedHeads],
        states: Mapping[int, LayerStates],
        aux_layers: tuple[int, ...] = (),
    ) -> tuple[FusedDecoder, tuple[PositionSpec, ...]]:
        raise NotStackable("a draft head reads hidden states beside its tokens")

    def sources(self) -> Iterator[WeightSource]:
        yield from super().sources()
        if (drafted := len(self.token_ids)) < self._served_vocabulary:
            yield WeightSource("d2t", (drafted,), self._renumber, (torch.int64, torch.int32))

    def _renumber(self, offsets: Tensor) -> None:
        """Take the token of each logit from its distance to the logit's own number."""
        token_ids = torch.arange(len(self.token_ids)) + offsets.long()
        if not 0 <= int(token_ids.min()) <= int(token_ids.max()) < self._served_vocabulary:
            raise ValueError(
                f"weights: d2t names tokens beyond the vocabulary of {self._served_vocabulary}"
            )
        self.token_ids = token_ids
