"""Llama 2, 3, 3.1, 3.2, and the many models of the same shape."""

from __future__ import annotations

from antiphon.model_worker.model.spec import Biases, Family

LLAMA = Family(
    name="llama",
    biases=lambda config: Biases(
        qkv=config.attention_bias, out=config.attention_bias, mlp=config.mlp_bias
    ),
)
