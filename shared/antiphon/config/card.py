"""What a model folder says of itself, read without torch."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, TypeVar

import msgspec

from antiphon.config.errors import ConfigError
from antiphon.config.model import Dtype

if TYPE_CHECKING:
    from pathlib import Path

T = TypeVar("T")

HEADER_BYTES_MAX = 100 * 1000**2
"""The limit of safetensors itself; a larger length means that the file is none."""
DTYPES = {"BF16": Dtype.BFLOAT16, "F16": Dtype.FLOAT16, "F32": Dtype.FLOAT32}
"""Formats that safetensors headers name and that we load."""


class Sampling(msgspec.Struct, frozen=True):
    """What generation_config.json recommends; unset fields recommend nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class Weights(msgspec.Struct, frozen=True):
    """What the safetensors headers add up to; zeros where a folder holds no weights."""

    count: int
    bytes: int
    dtype: Dtype | None
    """The format of most parameters, if it is one that we load."""


class ModelCard(msgspec.Struct, frozen=True):
    """A model's shape and habits."""

    architecture: str
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary_size: int
    context_tokens: int
    dtype: Dtype
    """Never `auto`."""
    eos_ids: tuple[int, ...]
    rope_theta: float
    rope_kind: str
    """`default`, or the name of a scaling."""
    tied: bool
    """Whether input and output embeddings are one."""
    sampling: Sampling
    weights: Weights

    def kv_bytes(self, dtype: Dtype) -> int:
        """Keys and values of one token, in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_size * item_bytes(dtype)


def item_bytes(dtype: Dtype) -> int:
    """Bytes of one number."""
    return 4 if dtype is Dtype.FLOAT32 else 2


def read_card(folder: Path) -> ModelCard:
    """Read config.json, generation_config.json and the headers of the weights.

    Raises:
        ConfigError: A file is missing or broken, or asks for what no model here has.
    """
    config = _decode(folder / "config.json", _Config)
    generation_file = folder / "generation_config.json"
    generation = (
        _decode(generation_file, _Generation) if generation_file.exists() else _Generation()
    )
    if not config.architectures:
        raise ConfigError(f"{folder / 'config.json'}: architectures names none")
    weights = read_weights(folder)
    rope = config.rope_parameters or config.rope_scaling or _Rope()
    return ModelCard(
        architecture=config.architectures[0],
        hidden_size=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_size=config.head_dim or config.hidden_size // config.num_attention_heads,
        vocabulary_size=config.vocab_size,
        context_tokens=config.max_position_embeddings,
        dtype=_dtype(config, weights, folder),
        # Some folders name more ends in one file than in the other; all of them end an answer.
        eos_ids=tuple(sorted({*_ids(config.eos_token_id), *_ids(generation.eos_token_id)})),
        rope_theta=rope.rope_theta or config.rope_theta,
        rope_kind=rope.rope_type or rope.type or "default",
        tied=config.tie_word_embeddings,
        sampling=msgspec.convert(generation, Sampling, from_attributes=True),
        weights=weights,
    )


def read_weights(folder: Path) -> Weights:
    """Add up the headers of every safetensors file; no tensor is read.

    Raises:
        ConfigError: A file is no safetensors file.
    """
    counts: Counter[str] = Counter()
    size_bytes = 0
    for file in sorted(folder.glob("*.safetensors")):
        for tensor in _header(file).values():
            counts[tensor.dtype] += math.prod(tensor.shape)
            start, end = tensor.data_offsets
            size_bytes += end - start
    common = counts.most_common(1)
    return Weights(
        count=counts.total(),
        bytes=size_bytes,
        dtype=DTYPES.get(common[0][0]) if common else None,
    )


class _Rope(msgspec.Struct):
    rope_theta: float | None = None
    rope_type: str | None = None
    type: str | None = None


class _Config(msgspec.Struct):
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    max_position_embeddings: int
    architectures: tuple[str, ...] = ("",)
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    rope_theta: float = 10000.0
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None
    tie_word_embeddings: bool = False


class _Generation(Sampling, frozen=True):
    eos_token_id: int | tuple[int, ...] | None = None


class _Tensor(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _decode(file: Path, type_: type[T]) -> T:
    try:
        return msgspec.json.decode(file.read_bytes(), type=type_)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file}: {error}") from error


def _header(file: Path) -> dict[str, _Tensor]:
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            text = stream.read(length) if length <= HEADER_BYTES_MAX else b""
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        return {name: msgspec.json.decode(tensor, type=_Tensor) for name, tensor in raw.items()}
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file}: not a safetensors file: {error}") from error


def _dtype(config: _Config, weights: Weights, folder: Path) -> Dtype:
    """What the config names; where it names nothing, what the weights are."""
    named = config.dtype or config.torch_dtype
    if named is None:
        return weights.dtype or Dtype.FLOAT32
    known = {dtype.value: dtype for dtype in DTYPES.values()}
    if named not in known:
        raise ConfigError(
            f"{folder / 'config.json'}: dtype = {named!r}: must be one of {', '.join(known)}"
        )
    return known[named]


def _ids(ids: int | tuple[int, ...] | None) -> tuple[int, ...]:
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else ids
