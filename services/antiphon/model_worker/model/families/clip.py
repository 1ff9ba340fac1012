"""CLIP's and SigLIP's towers for texts: layer norms and plain blocks, with learned positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.layers.attention import AttentionNames
from antiphon.model_worker.model.llama_parts import attention, layer_norm, model, plain
from antiphon.model_worker.model.spec import (
    EmbeddingSpec,
    LayerSpec,
    ModelFamily,
    ModelSpec,
    Norms,
)

if TYPE_CHECKING:
    from antiphon.model_worker.model.config_file import ConfigFile

NAMES = AttentionNames(out="self_attn.out_proj")
NORMS = Norms(before_mixer="layer_norm1", before_feed_forward="layer_norm2")


def declare_clip(config: ConfigFile) -> ModelSpec:
    """CLIP: causal attention. The vector of the first end token is projected by the pooler.

    Source: Radford et al. 2021, arXiv:2103.00020, section 2.4.
    """
    return _tower(config, causal=True)


def declare_siglip(config: ConfigFile) -> ModelSpec:
    """SigLIP: bidirectional attention, to padding, too.

    Source: Zhai et al. 2023, arXiv:2303.15343.
    """
    return _tower(config, causal=False)


def _tower(config: ConfigFile, *, causal: bool) -> ModelSpec:
    layer = LayerSpec(
        mixer=attention(config, bias=True, causal=causal, rotary=None, names=NAMES),
        feed_forward=plain(config, up="mlp.fc1", down="mlp.fc2"),
        norm=layer_norm(config),
        norms=NORMS,
    )
    return model(
        config,
        layer,
        norm_name="final_layer_norm",
        embedding=EmbeddingSpec(
            name="embeddings.token_embedding", positions="embeddings.position_embedding"
        ),
        head=None,
        layer_name="encoder.layers.{}",
        ignored=("embeddings.position_ids",),
    )


CLIP = ModelFamily("clip", declare_clip)
SIGLIP = ModelFamily("siglip", declare_siglip)
