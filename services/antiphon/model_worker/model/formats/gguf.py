"""GGUF, the format of llama.cpp: maps tensor names to those of checkpoints and decodes blocks.

The model itself is described by a config.json, as for every other format: by one beside the file,
or by what `antiphon.model_card.converted` makes of the file's own settings. Only those of the
tensor layout are read here.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import torch
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    TensorNameMap,
    dequantize,
    get_tensor_name_map,
)

from antiphon.layers.quantization.gguf import LAYOUTS as GROUPED
from antiphon.layers.quantization.gguf import GgufStorage
from antiphon.model_card.weight_headers import GgufHeader, GgufTensor, read_gguf
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.model.formats.files import StoredTensor, numbers, open_file

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    Decode = Callable[[Tensor], Tensor]

PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
ROUNDED = tuple(
    GGMLQuantizationType[name]
    for name in (
        *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
        *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
        *("TQ1_0", "TQ2_0", "MXFP4"),
    )
)
"""The block types that the gguf package decodes."""
READABLE = (*PLAIN, *ROUNDED)
COMPUTED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors of llama.cpp whose content config.json describes as parameters."""
HEAD = "lm_head.weight"
NORM = "norm.weight"
"""The suffix of the names of all norms of Gemma."""
ROTATED = (".self_attn.q_proj.weight", ".self_attn.k_proj.weight")
EXPERT = re.compile(r"\.experts\.(\d+)\.")
"""In the name of one expert's tensor; llama.cpp stacks the experts of a layer."""
ONE_ROW = "shared_expert_gate.weight"
"""A linear with one output, which llama.cpp stores without its first axis."""


@dataclass(frozen=True, slots=True)
class GgufLayout:
    """How llama.cpp's converter rearranges an architecture.

    Attributes:
        model: The architecture's name in config.json.
        with_experts: The name for a file with experts, if it differs.
        interleaved: Queries and keys are permuted for interleaved RoPE.
        one_more: Norm weights are stored as 1 + weight, the factor itself.
    """

    model: str
    with_experts: str = ""
    interleaved: bool = False
    one_more: bool = False


LAYOUTS = {
    "llama": GgufLayout("LlamaForCausalLM", with_experts="MixtralForCausalLM", interleaved=True),
    "qwen2": GgufLayout("Qwen2ForCausalLM"),
    "qwen2moe": GgufLayout("Qwen2MoeForCausalLM"),
    "qwen3": GgufLayout("Qwen3ForCausalLM"),
    "qwen3moe": GgufLayout("Qwen3MoeForCausalLM"),
    "gemma": GgufLayout("GemmaForCausalLM", one_more=True),
    "gemma2": GgufLayout("Gemma2ForCausalLM", one_more=True),
    "gemma3": GgufLayout("Gemma3ForCausalLM", one_more=True),
}
"""By `general.architecture`. The layout of any other architecture has not been verified."""


def read_gguf_files(
    files: Sequence[Path], names: Iterable[str], *, mapped: bool, blocks: Container[str] = ()
) -> dict[str, StoredTensor]:
    """Read the headers of a model's files; the first one describes the layout of tensors.

    The tensors to load are returned under their checkpoint `names`, all others under their own.
    Of those in `blocks`, the blocks of each row are returned as they lie in the file.
    """
    headers = {file: read_gguf(file) for file in files}
    first = headers[files[0]]
    known = _names(first, files[0], [*names, HEAD])
    tensors: dict[str, StoredTensor] = {}
    for file, header in headers.items():
        part = open_file(file, mapped=mapped)
        size = file.stat().st_size
        for own, tensor in header.tensors.items():
            if own in COMPUTED:
                continue
            length = _length(file, own, tensor)
            if tensor.start + length > size:
                raise ModelLoadError(f"{file}: cut short: {own} ends behind its {size} bytes")
            for name, each in _parts(file, own, tensor, known.get(own, (own,))):
                size_bytes = _length(file, own, each)
                data, order = part(each.start, size_bytes), _order(first, name)
                shape, dtype = each.shape, PLAIN.get(GGMLQuantizationType(each.kind), torch.float32)
                decode = _decode(each, order)
                if name in blocks:
                    shape, dtype = (shape[0], size_bytes // shape[0]), torch.uint8
                    decode = partial(_rows, shape=shape, order=order)
                tensors[name] = StoredTensor(file, shape, dtype, data, decode)
    return tensors


def gguf_storage(files: Sequence[Path]) -> Callable[[str], GgufStorage | None]:
    """The storage layout of each linear whose weight is codes with scales of groups."""
    headers = [read_gguf(file) for file in files]
    table = _name_table(headers[0], files[0])
    grouped = {GGMLQuantizationType[name].value: name for name in GROUPED}
    kinds = {own: tensor.kind for header in headers for own, tensor in header.tensors.items()}

    def storage(name: str) -> GgufStorage | None:
        kind = kinds.get(_own_name(table, f"{name}.weight") or "")
        return GgufStorage(grouped[kind]) if kind in grouped else None

    return storage


def _name_table(header: GgufHeader, file: Path) -> TensorNameMap:
    """The names of an architecture's tensors."""
    architecture = header.settings.get("general.architecture")
    if architecture not in LAYOUTS:
        raise ModelLoadError(
            f"{file}: GGUF files of architecture {architecture!r} are not read: there are "
            f"{', '.join(LAYOUTS)}"
        )
    layers = header.settings.get(f"{architecture}.block_count")
    if not isinstance(layers, int):
        raise ModelLoadError(f"{file}: {architecture}.block_count is missing")
    kind = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture)
    return get_tensor_name_map(kind, layers)


def _own_name(table: TensorNameMap, name: str) -> str | None:
    """The name that llama.cpp has for a tensor, or for the stack of all experts' tensors."""
    return table.get_name(EXPERT.sub(".experts.", name), try_suffixes=(".weight", ".bias"))


def _names(header: GgufHeader, file: Path, names: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
    """Checkpoint names by llama.cpp's name; for experts, all names in the stack, in order."""
    table = _name_table(header, file)
    known: dict[str, dict[int, str]] = {}
    for name in names:
        expert = EXPERT.search(name)
        if (own := _own_name(table, name)) is not None:
            known.setdefault(own, {})[int(expert[1]) if expert else 0] = name
    return {own: tuple(each[index] for index in sorted(each)) for own, each in known.items()}


def _parts(
    file: Path, own: str, tensor: GgufTensor, names: tuple[str, ...]
) -> Iterator[tuple[str, GgufTensor]]:
    """The checkpoint tensors that one tensor of llama.cpp contains."""
    if not EXPERT.search(names[0]):
        one_row = names[0].endswith(ONE_ROW) and len(tensor.shape) == 1
        shape = (1, *tensor.shape) if one_row else tensor.shape
        yield names[0], msgspec.structs.replace(tensor, shape=shape)
        return
    count, *shape = tensor.shape
    if count != len(names):
        raise ModelLoadError(f"{file}: {own} holds {count} experts, and the model has {len(names)}")
    size_bytes = _length(file, own, tensor) // count
    for index, name in enumerate(names):
        start = tensor.start + index * size_bytes
        yield name, GgufTensor(tuple(shape), tensor.kind, start)


def _length(file: Path, name: str, tensor: GgufTensor) -> int:
    kinds = {kind.value: kind for kind in GGMLQuantizationType}
    kind = kinds.get(tensor.kind)
    if kind is None or kind not in READABLE:
        raise ModelLoadError(
            f"{file}: {name} is {tensor.kind if kind is None else kind.name}: only "
            f"{', '.join(kind.name for kind in READABLE)} weights are read"
        )
    numbers_a_block, bytes_a_block = GGML_QUANT_SIZES[kind]
    if tensor.count % numbers_a_block:
        raise ModelLoadError(f"{file}: {name}: {tensor.shape} is not whole blocks")
    return tensor.count // numbers_a_block * bytes_a_block


def _decode(tensor: GgufTensor, order: Decode) -> Decode:
    kind = GGMLQuantizationType(tensor.kind)
    dtype = PLAIN.get(kind)
    read = (
        partial(_scaled, kind=kind, shape=tensor.shape)
        if dtype is None
        else partial(numbers, dtype=dtype, shape=tensor.shape)
    )
    return lambda data: order(read(data))


def _rows(data: Tensor, shape: tuple[int, ...], order: Decode) -> Tensor:
    """Blocks of bytes (N,) uint8 as rows of them, in the order of the weight's outputs."""
    return order(data.view(shape))


def _scaled(data: Tensor, kind: GGMLQuantizationType, shape: tuple[int, ...]) -> Tensor:
    """Decode blocks of bytes, (N,) uint8, to float32."""
    rows = data.view(math.prod(shape[:-1]), -1).numpy()
    return torch.as_tensor(dequantize(rows, kind)).view(shape)


def _order(header: GgufHeader, name: str) -> Decode:
    """Undo the converter's rearrangement of a tensor."""
    architecture = str(header.settings["general.architecture"])
    layout = LAYOUTS[architecture]
    if layout.one_more and name.endswith(NORM):
        return _one_less
    if not layout.interleaved or not name.endswith(ROTATED):
        return lambda tensor: tensor
    field = "head_count" if ".q_proj." in name else "head_count_kv"
    heads = header.settings.get(f"{architecture}.attention.{field}")
    heads = heads or header.settings.get(f"{architecture}.attention.head_count")
    assert isinstance(heads, int), "llama.cpp writes none without it"
    return partial(_halves, heads=heads)


def _one_less(tensor: Tensor) -> Tensor:
    return tensor - 1


def _halves(tensor: Tensor, heads: int) -> Tensor:
    """Rows (O, I) of each head, permuted from interleaved RoPE to RoPE over halves."""
    pairs = tensor.view(heads, -1, 2, tensor.shape[-1])
    return pairs.transpose(1, 2).reshape(tensor.shape)
