"""Models of published shapes with random weights, opened as a worker opens them."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from tests.support.models import open_model
from tests.support.worker import state

from antiphon.config.model import LoadFormat
from antiphon.model_card.files import find_files
from antiphon.model_worker.runner.device_runner import DeviceRunner
from antiphon.wire.ids import RequestId
from antiphon.wire.sampling import TokenOutputParams

if TYPE_CHECKING:
    from tests.kernels.dry_run import Sizes

    from antiphon.model_worker.batching.state import RequestState
    from antiphon.model_worker.runner.opening import OpenModel

PAGE_TOKENS = 64
"""Those of a worker whose settings leave them open."""
LOGPROBS = TokenOutputParams(logprobs=True, top=2)


def llama_config(sizes: Sizes, layers: int) -> dict[str, Any]:
    """The config.json of a Llama model of these sizes."""
    queries, kv_heads, size = sizes.heads
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.width,
        "num_hidden_layers": layers,
        "num_attention_heads": queries,
        "num_key_value_heads": kv_heads,
        "head_dim": size,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def open_llama(
    sizes: Sizes, layers: int, device: str, *, rows: int, tokens: int, dtype: str = "bfloat16"
) -> OpenModel:
    """A Llama model of these sizes, with pages for so many rows of so many tokens."""
    with TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "config.json").write_text(json.dumps(llama_config(sizes, layers)))
        return open_model(
            find_files(folder, LoadFormat.DUMMY),
            device=device,
            dtype=dtype,
            page_tokens=PAGE_TOKENS,
            pages=rows * -(-tokens // PAGE_TOKENS),
            running_max=rows,
            context_tokens=tokens,
        )


def runner_of(model: OpenModel) -> DeviceRunner:
    assert isinstance(model.runner, DeviceRunner), "the runner of a device"
    return model.runner


def greedy_requests(
    vocabulary: int, rows: int, prompt_tokens: int, new_tokens: int, *, logprobs: bool = False
) -> list[RequestState]:
    """Requests with random prompts, which all generate as many tokens."""
    prompts = np.random.default_rng(7).integers(0, vocabulary, (rows, prompt_tokens))
    return [
        state(
            prompt.tolist(),
            request_id=RequestId(str(number)),
            temperature=0.0,
            max_new_tokens=new_tokens,
            details=LOGPROBS if logprobs else None,
        )
        for number, prompt in enumerate(prompts)
    ]
