"""Checks whether transformers' modules support a model, and loads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec
import torch

from antiphon.config.model import Dtype, LoadFormat
from antiphon.kernels.kv import KvSpec
from antiphon.model_card.card import read_card
from antiphon.model_worker.model.config_file import ConfigFile, read_config
from antiphon.model_worker.model.errors import (
    ModelLoadError,
    UnknownArchitecture,
    UnsupportedVariant,
)
from antiphon.model_worker.model.llama_parts import read_spec
from antiphon.model_worker.model.registry import family_of
from antiphon.resolve.resolved_value import ResolvedValue

NAMED_MAX = 5
"""Tensors that an error names."""

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from antiphon.layers.weights import BuildContext
    from antiphon.model_card.files import ModelFiles
    from antiphon.model_worker.model.transformers_backend.model import TransformersDecoder


def unsupported_reason(config: ConfigFile) -> str | None:
    """Why the transformers backend cannot run this model, or None."""
    from transformers.models.auto import modeling_auto  # noqa: PLC0415 (it takes a second)

    names = cast("dict[str, str]", modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    architecture = (*config.architectures, "a model without architecture")[0]
    if names.get(config.model_type) != architecture:
        return f"transformers has no causal model {architecture} of type {config.model_type!r}"
    return None


def implementation_of(files: ModelFiles, configured: str) -> ResolvedValue[str]:
    """The implementation that runs a model, for the resolved plan: their cache sizes differ.

    Raises:
        ModelLoadError: Neither our decoder nor the transformers backend supports the model.
    """
    config = read_config(files)
    if configured == "transformers":
        return ResolvedValue("transformers", "model.implementation")
    try:
        family = family_of(config.architectures, files)
        read_spec(family, config)
    except UnsupportedVariant as error:
        if configured == "antiphon" or unsupported_reason(config) is not None:
            raise
        unknown = isinstance(error, UnknownArchitecture)
        return ResolvedValue("transformers", "no family of ours" if unknown else str(error))
    if configured == "antiphon":
        return ResolvedValue("antiphon", "model.implementation")
    return ResolvedValue("antiphon", f"the family {family.name} is our own")


def load_transformers(
    files: ModelFiles, config: ConfigFile, build: BuildContext, linear: str, *, quantized: bool
) -> TransformersDecoder:
    """Load a model with transformers' modules, which attend over our KV cache."""
    refusals = (
        (linear not in ("plain", "packed"), f"keep no linears as {linear!r}"),
        (quantized, "are not asked for quantized checkpoints"),
        (build.tp.ranks > 1 or build.pp is not None, "run on one rank only"),
        (files.format is LoadFormat.GGUF, "take no GGUF files"),
    )
    for holds, reason in refusals:
        if holds:
            raise ModelLoadError(f"{files.folder}: transformers' modules {reason}")
    if reason := unsupported_reason(config):
        raise ModelLoadError(f"config.json: {reason}")
    padding = config.family_fields(_Padding).pad_token_id
    if padding is not None and not -config.vocab_size <= padding < config.vocab_size:
        raise ModelLoadError(
            f"config.json: pad_token_id {padding} is beyond the vocabulary of {config.vocab_size}: "
            "override it with --json-model-override-args '{\"pad_token_id\": null}'"
        )
    decoder = _open_decoder(files, build, config.context_tokens)
    _hold_against_plan(files, decoder)
    return decoder


class _Padding(msgspec.Struct, frozen=True):
    pad_token_id: int | None = None


def _hold_against_plan(files: ModelFiles, decoder: TransformersDecoder) -> None:
    """Check the bytes of cache a token: the plan divides memory by what config.json implies."""
    planned = read_card(files).with_full_heads().kv_bytes(Dtype.FLOAT32)
    groups = decoder.spec.cache_groups()
    used = sum(
        len(layers) * spec.token_bytes(1, torch.float32)
        for spec, layers in groups
        if isinstance(spec, KvSpec)
    )
    if used > planned:
        raise ModelLoadError(
            f"{files.folder}: a token takes {used} bytes of cache, and config.json says {planned}"
        )


def _open_decoder(
    files: ModelFiles, build: BuildContext, context_tokens: int
) -> TransformersDecoder:
    import transformers  # noqa: PLC0415

    import antiphon.model_worker.model.transformers_backend.model as backend  # noqa: PLC0415

    fields = {
        name: _with_floats(value)
        for name, value in msgspec.json.decode(files.config(), type=dict[str, object]).items()
    }
    # transformers leaves these classes largely untyped.
    config = cast("Any", transformers.AutoConfig).for_model(fields.pop("model_type"), **fields)
    auto = cast("Any", transformers.AutoModelForCausalLM)
    try:
        if files.format is LoadFormat.DUMMY:
            torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
            model = auto.from_config(
                config, dtype=build.dtype, attn_implementation=backend.IMPLEMENTATION
            )
        else:
            model, loading_info = auto.from_pretrained(
                files.folder,
                config=config,
                dtype=build.dtype,
                attn_implementation=backend.IMPLEMENTATION,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=files.format is LoadFormat.SAFETENSORS,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
            _refuse_missing_weights(loading_info)
        return backend.TransformersDecoder(model.eval(), context_tokens)
    except KeyError as error:
        if error.args == (backend.IMPLEMENTATION,):
            raise ModelLoadError(
                f"{files.folder}: transformers' modules of {config.model_type!r} choose among "
                "attentions of their own, which cannot run over a paged cache"
            ) from error
        raise ModelLoadError(
            f"{files.folder}: transformers' modules look up {error}, which is not there"
        ) from error
    except (
        ModelLoadError,
        ValueError,
        TypeError,
        AssertionError,
        AttributeError,
        IndexError,
        OSError,
        RuntimeError,
    ) as error:
        raise ModelLoadError(f"{files.folder}: transformers' modules: {error}") from error


def _with_floats(value: object) -> object:
    """A value of config.json, with the floats that JSON lacks and transformers encodes."""
    if isinstance(value, dict):
        fields = cast("dict[str, object]", value)
        spelled = fields.get("__float__")
        if len(fields) == 1 and isinstance(spelled, str):
            return float(spelled)
        return {name: _with_floats(inner) for name, inner in fields.items()}
    if isinstance(value, list):
        return [_with_floats(inner) for inner in cast("list[object]", value)]
    return value


def _refuse_missing_weights(loading_info: Mapping[str, object]) -> None:
    """Refuse missing weights: transformers would initialise them randomly, with only a warning."""
    kinds = {"missing_keys": "missing", "mismatched_keys": "of another shape"}
    for kind, shown in kinds.items():
        if found := sorted(map(str, cast("Iterable[object]", loading_info[kind]))):
            raise ModelLoadError(f"weights: {shown}: {', '.join(found[:NAMED_MAX])}")
