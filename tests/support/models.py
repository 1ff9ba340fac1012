"""Models opened by the few values of a plan that a test sets."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
from safetensors.torch import load_file, save_file

from antiphon.config.errors import ConfigError
from antiphon.config.model import CacheDtype, Dtype, LinearFormat
from antiphon.layers.methods import LinearMethod
from antiphon.model_card.card import read_card
from antiphon.model_card.files import ModelLocation, files_at
from antiphon.model_worker.model import load as loading
from antiphon.model_worker.model.config_file import read_config
from antiphon.model_worker.model.decoder import Decoder
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.model.load import LoadedModel, load_weights
from antiphon.model_worker.model.transformers_backend.support import implementation_of
from antiphon.model_worker.model.weights import Checkpoint
from antiphon.model_worker.runner import opening
from antiphon.resolve.draft import ResolvedDraft
from antiphon.resolve.resolved_config import ResolvedConfig
from antiphon.resolve.resolved_value import ResolvedValue

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from antiphon.layers.weights import Tp
    from antiphon.model_worker.model.spec import ModelSpec
    from antiphon.model_worker.runner.opening import OpenModel


def plan(
    place: ModelLocation,
    *,
    dtype: str = "auto",
    linear: str = "plain",
    quantization: str | None = None,
    quantized: str | None = None,
    implementation: str = "auto",
    pages: int = 128,
    states: int = 64,
    **values: object,
) -> ResolvedConfig:
    """A plan for a model with these values; what loading does not read is None."""
    try:
        chosen = implementation_of(files_at(place), implementation)
        dtype = _dtype(place) if dtype == "auto" else dtype
    except ConfigError as error:
        raise ModelLoadError(str(error)) from error
    decided: dict[str, Any] = {
        **dict.fromkeys(ResolvedConfig.__struct_fields__),
        "dtype": Dtype(dtype),
        "linear": LinearFormat(linear),
        "quantized": LinearFormat(quantized or linear),
        "cache_pages": pages,
        "cache_states": states,
        "quantization": quantization or "none",
        "device": "cpu",
        "deterministic": False,
        "page_tokens": 4,
        "cache_dtype": CacheDtype.AUTO,
        "cache_scales": "",
        "ep_ranks": 1,
        "running_max": 64,
        "backends": (),
        "context_tokens": 1024,
        **values,
    }
    resolved = {name: ResolvedValue(value, "a test") for name, value in decided.items()}
    return ResolvedConfig(**{**resolved, "implementation": chosen})


def with_draft_model(served: ResolvedConfig, place: ModelLocation, **values: Any) -> ResolvedConfig:
    """The plan with a draft model of these values."""
    own, nothing = plan(place, **values), ResolvedValue(0, "a test")
    draft = ResolvedDraft(
        model=ResolvedValue(str(place), "a test"),
        dtype=own.dtype,
        quantization=own.quantization,
        linear=own.linear,
        quantized=own.quantized,
        implementation=own.implementation,
        cache_dtype=own.cache_dtype,
        weight_bytes=nothing,
        activation_bytes=nothing,
        token_bytes=nothing,
    )
    return msgspec.structs.replace(served, draft=ResolvedValue(draft, "a test"))


def load(place: ModelLocation, *, tp: Tp | None = None, **values: Any) -> LoadedModel:
    return loading.load(place, plan(place, **values), tp=tp)


def open_model(place: ModelLocation, *, tp: Tp | None = None, **values: Any) -> OpenModel:
    return opening.open_model(place, plan(place, **values), tp=tp)


def with_spec(
    folder: Path, model: LoadedModel, spec: ModelSpec, linear: str = "plain"
) -> LoadedModel:
    """The model of the folder as if its config declared another spec."""
    decoder = Decoder(spec, model.build, LinearMethod(linear))
    load_weights(decoder, Checkpoint.open(folder), spec)
    return LoadedModel(spec, decoder, model.build)


def change_config(folder: Path, *dropped: str, **fields: object) -> dict[str, Any]:
    """Drop and set fields of a model's config.json; return what it was."""
    file = folder / "config.json"
    before = json.loads(file.read_text())
    kept = {name: value for name, value in before.items() if name not in dropped}
    file.write_text(json.dumps(kept | fields))
    return before


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Change the tensors of a model in one file."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def take_tensors(folder: Path) -> dict[str, Tensor]:
    """Remove all tensors from a model's folder, and return them."""
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    for file in [*folder.glob("*.safetensors*")]:
        file.unlink()
    return tensors


def _dtype(place: ModelLocation) -> str:
    config = read_config(place)
    named = config.dtype or config.torch_dtype
    # The card names the dtypes there are, or reads that of the weights.
    return named if named in loading.DTYPES else read_card(place).dtype
