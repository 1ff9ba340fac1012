"""Models of published shapes with random weights, opened as a worker opens them."""

from __future__ import annotations

import json
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.kernels.dry_run import PAGE_TOKENS, seeing
from tests.support.models import open_model
from tests.support.worker import state

from antiphon.config.model import LoadFormat
from antiphon.kernels.stream import CudaStream, Graph, InterpretedStream, open_stream
from antiphon.model_card.files import find_files
from antiphon.model_worker.runner import opening
from antiphon.model_worker.runner.device_runner import DeviceRunner
from antiphon.wire.ids import RequestId
from antiphon.wire.sampling import TokenOutputParams

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    import torch
    from numpy.typing import NDArray
    from tests.kernels.dry_run import Launch
    from tests.kernels.published import Sizes
    from torch import Tensor

    from antiphon.kernels.stream import Cut, Download, Stream
    from antiphon.model_worker.batching.state import RequestState
    from antiphon.model_worker.runner.opening import OpenModel

LOGPROBS = TokenOutputParams(logprobs=True, top=2)


def open_sized(
    sizes: Sizes,
    layers: int,
    device: str,
    *,
    rows: int,
    tokens: int,
    dtype: str = "bfloat16",
    backends: tuple[str, ...] = (),
) -> OpenModel:
    """A model of these sizes, with pages for so many rows of so many tokens."""
    with TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "config.json").write_text(json.dumps(sizes.config(layers)))
        return open_model(
            find_files(folder, LoadFormat.DUMMY),
            device=device,
            dtype=dtype,
            page_tokens=PAGE_TOKENS,
            pages=rows * -(-tokens // PAGE_TOKENS),
            running_max=rows,
            context_tokens=tokens,
            backends=backends,
        )


class WatchedStream:
    """A stream whose launches are seen before they run, or are recorded to be replayed."""

    def __init__(self, stream: Stream, see: Callable[[Launch], object]) -> None:
        self._stream = stream
        self._see = see

    @contextmanager
    def launching(self) -> Generator[None]:
        with self._stream.launching(), seeing(self._see):
            yield

    @contextmanager
    def reading(self) -> Generator[None]:
        with self._stream.reading(), seeing(self._see):
            yield

    def beside(self) -> WatchedStream:
        return WatchedStream(self._stream.beside(), self._see)

    def fill(self, target: Tensor, values: NDArray[Any]) -> None:
        self._stream.fill(target, values)

    def download(self, tensors: Sequence[Tensor]) -> Download:
        return self._stream.download(tensors)

    def capture(self, run: Callable[[Cut], None]) -> Graph:
        def seen(cut: Cut) -> None:
            with seeing(self._see):
                run(cut)

        return self._stream.capture(seen)


@contextmanager
def watching(see: Callable[[Launch], object]) -> Generator[None]:
    """The launches of models that are opened meanwhile are seen."""

    def open_watched(kind: str, device: torch.device) -> WatchedStream:
        return WatchedStream(open_stream(kind, device), see)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "open_stream", open_watched)
        yield


@contextmanager
def uncaptured() -> Generator[None]:
    """What models that run meanwhile would capture is launched kernel by kernel in each replay."""

    def capture(_: Stream, run: Callable[[Cut], None]) -> Graph:
        return Graph(partial(run, lambda call: call()), 0)

    with pytest.MonkeyPatch.context() as patch:
        for kind in (CudaStream, InterpretedStream):
            patch.setattr(kind, "capture", capture)
        yield


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
