"""Writes the reference page of models.

Attention kinds and quantization formats of a family are found by building a small model: from the
family's own declaration, and with the refusals of the code that loads models.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING

import msgspec
import torch
import transformers
from tests.models.derived import derived
from tests.models.specs import EVERY, spec_of
from tests.support.markdown import DOCS, table

from antiphon.config.quantization import ROUTERS
from antiphon.layers.attention import AttentionSpec
from antiphon.layers.methods import LinearMethod
from antiphon.layers.mla import LatentSpec
from antiphon.layers.recurrent import GatedDeltaSpec, Mamba2Spec
from antiphon.layers.weights import BuildContext, SingleRank
from antiphon.model_card.config_json import complete_config
from antiphon.model_card.quantization_config import METHODS as QUANTIZED
from antiphon.model_card.quantization_config import read_quantization
from antiphon.model_worker.model.config_file import ACTIVATIONS, KINDS, ConfigFile
from antiphon.model_worker.model.decoder import Decoder
from antiphon.model_worker.model.formats.gguf import LAYOUTS, READABLE
from antiphon.model_worker.model.llama_parts import read_spec
from antiphon.model_worker.model.load import CACHE_DTYPES, quantized_linears
from antiphon.model_worker.model.registry import FAMILIES, find_family

if TYPE_CHECKING:
    from collections.abc import Mapping

    from antiphon.model_worker.model.spec import ModelSpec

PAGE = DOCS / "reference/models.md"
REFERENCE = "transformers"
"""The package that our models are compared with, in the version that the tests install."""
GGUF = frozenset(
    name for layout in LAYOUTS.values() for name in (layout.model, layout.with_experts) if name
)

HEAD = """# The models that are served

<!-- Written by `make docs`; change the families. -->

By `architectures` of config.json. Each family is compared with the reference in float32, and each
feature with its absence: [models.md](../models.md) says how. Grouped-query attention may have one
key-value head, or as many as it has query heads. Any other causal model of transformers runs
through transformers' own modules, in plain numbers.
"""
STORED_HEAD = """
## In fewer bits

By `quant_method` of config.json, see [quantization.md](../quantization.md). What cannot be read is
refused at the start. GGUF files say by themselves how they are stored.
"""

TAIL = f"""
In every family:

* number formats: float32, bfloat16, float16
* linears (`model.linear`): {", ".join(LinearMethod)}
* keys and values (`cache.dtype`, see [quantization.md](../quantization.md)): as the model
  computes, {", ".join(CACHE_DTYPES)}; the latter not in float16
* rotations: {", ".join(KINDS)}
* activations: {", ".join(ACTIVATIONS)}
* files: safetensors, torch's, and of the architectures {", ".join(LAYOUTS)} GGUF
  ({", ".join(kind.name for kind in READABLE)})
"""


_SIZES = {
    1: "n_shared_experts first_k_dense_replace",
    2: "num_experts_per_tok altup_num_inputs",
    4: "num_experts num_hidden_layers num_attention_heads num_key_value_heads linear_num_key_heads"
    " decoder_layers decoder_attention_heads linear_conv_kernel_dim",
    8: "mamba_n_heads linear_num_value_heads",
    32: "vocab_size vocab_size_per_layer_input qk_nope_head_dim qk_rope_head_dim v_head_dim"
    " mamba_d_head",
    64: "head_dim sliding_window mamba_d_state linear_key_head_dim linear_value_head_dim"
    " query_pre_attn_scalar laurel_rank",
    128: "kv_lora_rank q_lora_rank",
    256: "max_position_embeddings hidden_size intermediate_size intermediate_size_mlp"
    " moe_intermediate_size shared_expert_intermediate_size hidden_size_per_layer_input",
}
SAMPLE: Mapping[str, object] = {
    **{name: size for size, names in _SIZES.items() for name in names.split()},
    "routed_scaling_factor": 1.0,
    "pad_token_id": 0,
    "norm_topk_prob": False,
    "topk_method": "greedy",
    "rope_parameters": {"mrope_section": [12, 10, 10]},
}
"""Fields of all families, in sizes of whole groups and blocks; each family reads its own."""
STORED: Mapping[str, Mapping[str, object]] = {
    "fp8": {"weight_block_size": [128, 128]},
    "w8a8_int8": {},
    "awq": {"bits": 4, "group_size": 32},
    "gptq": {"bits": 4, "group_size": 32},
    "bitsandbytes": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "compressed-tensors": {
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}
        },
    },
    "mxfp4": {},
    "modelopt": {"quant_algo": "NVFP4"},
    "modelopt_fp4": {"quant_algo": "NVFP4"},
    "torchao": {"quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}},
}
"""A quantization config by `quant_method`."""
_KINDS: tuple[tuple[type, str], ...] = (
    (AttentionSpec, "grouped-query"),
    (LatentSpec, "latent"),
    (Mamba2Spec, "Mamba 2"),
    (GatedDeltaSpec, "gated delta net"),
)


def page() -> str:
    models: list[tuple[str, ...]] = []
    stored: list[tuple[str, ...]] = []
    reasons: dict[str, int] = {}
    for architecture, (about, features) in sorted(_families().items()):
        spec = sample(architecture)
        listed = ", ".join(features) or "Llama's shape"
        models.append(
            (f"`{architecture}`", about, attention(spec), listed, _compared(architecture))
        )
        plain = source_names(spec)
        cells = [_cell(refusal(spec, method, plain), reasons) for method in QUANTIZED]
        cells.append("yes" if architecture in GGUF else "no")
        stored.append((f"`{architecture}`", *cells))
    head = (
        "architecture",
        "models",
        "attention",
        "what it has beside Llama's shape",
        "compared with",
    )
    notes = [f"{number}. {reason}" for reason, number in reasons.items()]
    parts = [HEAD, *table(head, models), STORED_HEAD]
    parts += [*table(("architecture", *QUANTIZED, "GGUF"), stored), "", *notes]
    return "\n".join(parts) + "\n" + TAIL


def _cell(reason: str | None, reasons: dict[str, int]) -> str:
    """`yes`, or `no` with the number of the footnote with the reason."""
    return "yes" if reason is None else f"no ({reasons.setdefault(reason, len(reasons) + 1)})"


def _compared(architecture: str) -> str:
    """The reference implementation, and which part of it is compared."""
    # Looked up in the listing: accessing the attribute would import every model.
    own = "" if architecture in dir(transformers) else ", its layers only"
    return f"{REFERENCE} {'.'.join(version(REFERENCE).split('.')[:2])}{own}"


def _families() -> dict[str, tuple[str, tuple[str, ...]]]:
    """By architecture: the first line of what the declaration says, and the features of its rows.

    A model under another head has those of its layers, too.
    """
    shown: dict[str, dict[str, object]] = {}
    for row in EVERY:
        shown.setdefault(row.architecture.__name__, {}).update(derived(spec_of(row)))
    of_layers = {FAMILIES[architecture].declare: shown[architecture] for architecture in FAMILIES}
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    for architecture, family in FAMILIES.items():
        about = (inspect.getdoc(family.declare) or "").partition("\n")[0]
        layers = inspect.unwrap(family.declare)
        beside = {} if layers is family.declare else of_layers[layers]
        found[architecture] = (about, tuple({**beside, **shown[architecture]}))
    return found


def sample(architecture: str) -> ModelSpec:
    """A small model of an architecture."""
    fields = {**SAMPLE, "architectures": [architecture]}
    raw = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}
    encoded = msgspec.json.encode(complete_config(raw))
    config = msgspec.structs.replace(msgspec.json.decode(encoded, type=ConfigFile), raw=encoded)
    return read_spec(find_family((architecture,)), config)


def attention(spec: ModelSpec) -> str:
    """The attention and recurrence kinds of a model."""
    mixers = [mixer for layer in spec.layers for mixer in layer.mixers]
    found = [name for kind, name in _KINDS if any(isinstance(one, kind) for one in mixers)]
    return ", ".join(found) + ("" if spec.causal else ", bidirectional")


_PLAIN = BuildContext(SingleRank(), torch.float32, torch.device("cpu"))


def source_names(spec: ModelSpec, build: BuildContext = _PLAIN) -> set[str]:
    """The tensors that a checkpoint of a model must have; by default in plain numbers."""
    return {source.name for source in Decoder(spec, build).sources()}


def refusal(spec: ModelSpec, method: str, plain: set[str]) -> str | None:
    """Why a checkpoint with this `quant_method` cannot be loaded, or None.

    `plain` are the names of its tensors in plain numbers.
    """
    config = {"quantization_config": {"quant_method": method, **STORED[method]}}
    quantization = read_quantization(msgspec.json.encode(config))
    assert quantization is not None
    # No tool quantizes routers: a gate of one output cannot even be packed.
    quantization = msgspec.structs.replace(quantization, plain=(*quantization.plain, ROUTERS))
    stored = quantized_linears(quantization, spec, LinearMethod.PLAIN)
    try:
        names = source_names(spec, replace(_PLAIN, quantization=stored))
    except ValueError as error:
        return str(error).rpartition(": ")[2]
    # Byte formats may keep the name of the weight and add a tensor for its scales.
    return None if names - plain else "none of its linears is stored so"
