"""Qwen2 and Qwen2.5: Llama's shape with biases on queries, keys and values only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.model_worker.model.spec import Biases, Family, full_attention

if TYPE_CHECKING:
    from antiphon.model_worker.model.config_file import ConfigFile
    from antiphon.model_worker.model.spec import Windows


def windows(config: ConfigFile) -> Windows:
    """Every layer sees every token, unless the upper ones were told to see a window."""
    if not config.use_sliding_window or config.sliding_window is None:
        return full_attention(config)
    if config.layer_types is not None:
        sliding = [kind == "sliding_attention" for kind in config.layer_types]
    else:
        sliding = [i >= config.max_window_layers for i in range(config.num_hidden_layers)]
    return tuple(config.sliding_window if cut else None for cut in sliding)


QWEN2 = Family(
    name="qwen2",
    biases=lambda _: Biases(qkv=True),
    windows=windows,
)
