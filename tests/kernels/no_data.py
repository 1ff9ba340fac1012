"""Workers without a GPU and without data: their own code launches what a GPU would run.

Tensors have shapes and types alone, and nothing is computed.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch

from antiphon.config.model import LoadFormat
from antiphon.kernels import upload
from antiphon.kernels.stream import Graph
from antiphon.layers.methods import LinearMethod
from antiphon.layers.weights import BuildContext, SingleRank
from antiphon.model_card.files import find_files
from antiphon.model_worker.model.config_file import read_config
from antiphon.model_worker.model.decoder import Decoder
from antiphon.model_worker.model.llama_parts import read_spec
from antiphon.model_worker.model.load import LoadedModel, quantized_linears
from antiphon.model_worker.model.registry import family_of
from antiphon.model_worker.runner.device_runner import DeviceRunner
from antiphon.model_worker.runner.opening import OpenModel
from antiphon.model_worker.runner.pools import cache_groups

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from antiphon.config.quantization import QuantizationConfig
    from antiphon.kernels.stream import Cut, Download
    from antiphon.model_worker.model.spec import ModelSpec

META = torch.device("meta")


def open_without_data(
    config: Mapping[str, Any],
    *,
    page_tokens: int,
    pages: int,
    rows: int,
    positions: int,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    quantization: QuantizationConfig | None = None,
    kept: LinearMethod = LinearMethod.FP8,
    deterministic: bool = False,
    device: torch.device = META,
    ranks: int = 1,
) -> OpenModel:
    """The model of a config.json as a worker opens it on a GPU; `kept` are its quantized weights.

    Tensors are made on a device on which none has data. Of several ranks it is the first one's.

    Raises:
        KernelUnavailable: It calls an operation that has no kernel there.
    """
    spec = _spec_of(config)
    tp = SingleRank() if ranks == 1 else _FirstRank(ranks)
    build: BuildContext = _CudaBuild(tp, dtype, device, cache_dtype=cache_dtype)
    if quantization is not None:
        build = replace(build, quantization=quantized_linears(quantization, spec, kept))
    decoder = Decoder(spec, build, LinearMethod.TILED if deterministic else LinearMethod.PLAIN)
    decoder.pack()
    groups = cache_groups(spec, build, page_tokens=page_tokens, pages=pages)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upload, "_Pinned", lambda device: partial(uploaded, device=device))
        runner = DeviceRunner(
            LoadedModel(spec, decoder, build),
            groups,
            _NoDataStream(),
            slots=rows,
            positions=positions,
            deterministic=deterministic,
        )
    return OpenModel(runner, groups, spec)


def empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(size, dtype=dtype, device=META)


def _spec_of(config: Mapping[str, Any]) -> ModelSpec:
    with TemporaryDirectory() as place:
        (Path(place) / "config.json").write_text(json.dumps(config))
        files = find_files(Path(place), LoadFormat.DUMMY)
        read = read_config(files)
        return read_spec(family_of(read.architectures, files), read)


def uploaded(values: NDArray[Any], device: torch.device = META) -> Tensor:
    return torch.empty(values.shape, dtype=getattr(torch, values.dtype.name), device=device)


class _CudaBuild(BuildContext):
    @property
    def device_kind(self) -> str:
        return "cuda"


class _FirstRank(NamedTuple):
    """The tensor-parallel group of one of several ranks, whose collectives launch no kernels."""

    ranks: int
    rank = 0
    invariant = False

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat([x] * self.ranks, dim=-1)


class _NoDataStream:
    @contextmanager
    def launching(self) -> Generator[None]:
        yield

    reading = launching

    def beside(self) -> _NoDataStream:
        return self

    def fill(self, target: Tensor, values: NDArray[Any]) -> None:
        assert target.numel() == values.size, "an array that fills it"

    def download(self, tensors: Sequence[Tensor]) -> Download:
        return _NoDataDownload(tensors)

    def capture(self, run: Callable[[Cut], None]) -> Graph:
        whole = partial(run, lambda call: call())
        whole()
        return Graph(whole, 0)


class _NoDataDownload(NamedTuple):
    tensors: Sequence[Tensor]

    def wait(self) -> list[NDArray[Any]]:
        """Of a step the first two say what is finite: all is. Tokens are 0, and none is blocked."""
        return [
            np.full(each.shape, place < 2, str(each.dtype).removeprefix("torch."))
            for place, each in enumerate(self.tensors)
        ]
