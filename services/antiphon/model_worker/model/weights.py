"""A checkpoint: its tensors are compared with those the model needs before any is read."""

from __future__ import annotations

import logging
import re
import sys
import time
from collections import Counter, deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, TextIO

import torch

from antiphon.config.errors import ConfigError
from antiphon.config.model import LoadFormat
from antiphon.model_card.config_json import text_name
from antiphon.model_card.files import ENDINGS, ModelFiles, ModelLocation, files_at
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.model.formats.files import (
    StoredTensor,
    TensorData,
    dummy_weights,
    read_safetensors,
    read_torch,
    trim,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from antiphon.layers.weights import WeightSource

log = logging.getLogger(__name__)

_EXPERT = re.compile(
    r"(?P<experts>.*\.experts\.)(?P<number>\d+)\.(?P<part>gate|up|down)_proj\.weight"
)
NAMED_MAX = 5
"""Tensors that an error names; the rest are counted."""
READERS = 2
"""Few readers keep a disk or a network busy; one alone does not where latency is high."""
AHEAD_BYTES = 16 << 20
"""Bytes that may be read but not yet copied, in addition to one tensor."""
ASKED_BYTES = 64 << 20
"""Bytes of read-ahead beyond what is copied, in addition to one tensor. They are in the kernel's
page cache, which no process is charged for.

Read-ahead issues many requests at once; blocking reads, as many as there are readers. Measured
beside other work, with readers alone and with read-ahead: 2.3 and 1.2 s, 2.5 and 1.8 s for 730 MB
of packed weights.
"""
PAUSE_S = 1.0
FRAME_S = 0.1
"""Between two log lines, and between two frames of the bar."""
WIDTH = 30
ERASED = "\r\033[K"


class Checkpoint:
    """The tensors of a model, in whatever files they are."""

    def __init__(self, tensors: dict[str, StoredTensor]) -> None:
        self.tensors = tensors

    @classmethod
    def open(cls, place: ModelLocation, sources: Sequence[WeightSource] = ()) -> Checkpoint:
        """Read the headers of all files; GGUF and dummy weights are created from `sources`."""
        try:
            files = files_at(place)
            tensors = _read(files, sources)
        except ConfigError as error:
            raise ModelLoadError(str(error)) from error
        if not tensors:
            raise ModelLoadError(f"{files.folder}: the {_endings(files)} files hold no tensors")
        return cls({text_name(name): tensor for name, tensor in tensors.items()})

    def add_prefix(self, prefix: str, beside: tuple[str, ...] = ()) -> None:
        """Add a prefix to every name if none has it, as in the checkpoint of a base model.

        Names that begin with one of `beside`, those of the head, never have it.
        """
        if not any(name.startswith(prefix) for name in self.tensors):
            self.tensors = {
                name if name.startswith(beside) else prefix + name: tensor
                for name, tensor in self.tensors.items()
            }

    def rename_endings(self, endings: Mapping[str, str]) -> None:
        """Rename tensors with suffixes that other tools write."""
        for old, new in endings.items():
            for name in [name for name in self.tensors if name.endswith(old)]:
                self.tensors[name.removesuffix(old) + new] = self.tensors.pop(name)

    def unstack_experts(self, names: Iterable[str]) -> None:
        """Split stacks of experts into the tensors of each, where those are wanted by name.

        Such a checkpoint has `experts.gate_up_proj` (E, 2 W, D), the gate's outputs first, and
        `experts.down_proj` (E, D, W).
        """
        taken = Counter[str]()
        for name in names:
            match = None if name in self.tensors else _EXPERT.fullmatch(name)
            if match is None:
                continue
            part, number = match["part"], int(match["number"])
            stack = match["experts"] + ("down_proj" if part == "down" else "gate_up_proj")
            whole = self.tensors.get(stack)
            if whole is not None and len(whole.shape) == 3 and number < whole.shape[0]:
                self.tensors[name] = _unstacked(whole, number, part)
                taken[stack] += 1
        for stack, parts in taken.items():
            # Experts that the model has not would be unexpected.
            if parts == self.tensors[stack].shape[0] * (1 if stack.endswith("down_proj") else 2):
                del self.tensors[stack]

    def compare(
        self,
        sources: Iterable[WeightSource],
        ignored: tuple[str, ...],
        blank: tuple[str, ...] = (),
        passed_over: tuple[str, ...] = (),
    ) -> None:
        """Compare the checkpoint with what the model loads.

        Further names are allowed that end with one of `ignored`, begin with one of `passed_over`,
        or end with one of `blank` if all elements are zero.
        """
        wanted = {source.name: source for source in sources}
        held = [(self.tensors[name], one) for name, one in wanted.items() if name in self.tensors]
        shapes = (
            f"{one.name} {tensor.shape}, not {one.shape}"
            for tensor, one in held
            if not one.fits(tensor.shape)
        )
        dtypes = (
            f"{one.name} {_dtype_names(tensor.dtype)}, not {_dtype_names(*one.dtypes)}"
            for tensor, one in held
            if tensor.dtype not in one.dtypes
        )
        found = {
            "missing": sorted(wanted.keys() - self.tensors),
            "unexpected": sorted(self._unexpected(wanted, ignored, blank, passed_over)),
            "of another shape": list(shapes),
            "of another number format": list(dtypes),
        }
        if complaints := [_listed(what, names) for what, names in found.items() if names]:
            raise ModelLoadError("weights: " + "; ".join(complaints))

    def _unexpected(
        self,
        wanted: Container[str],
        ignored: tuple[str, ...],
        blank: tuple[str, ...],
        passed_over: tuple[str, ...],
    ) -> Iterator[str]:
        for name, tensor in self.tensors.items():
            if name in wanted or name.endswith(ignored) or name.startswith(passed_over):
                continue
            if not (name.endswith(blank) and not tensor.decode(tensor.data.read()).any()):
                yield name

    def load(self, sources: Iterable[WeightSource]) -> None:
        """Load every source that has a part here; each tensor is read once, then released.

        Call `compare` first.

        Other threads read tensors, but only this one copies them: each thread that allocates keeps
        some of the memory that it frees.
        """
        takers: dict[str, list[WeightSource]] = {}
        for source in sources:
            if source.load is not None:
                takers.setdefault(source.name, []).append(source)
        tensors = [self.tensors[name] for name in takers]
        wanted = list(map(_wanted, tensors, takers.values()))
        progress = LoadProgress(sum(data.size_bytes for data in wanted))
        contents = zip(wanted, prefetch_tensors(wanted), strict=True)
        for tensor, takes, (data, content) in zip(tensors, takers.values(), contents, strict=True):
            numbers = tensor.decode(content)
            for source in takes:
                if source.load is not None:
                    source.load(numbers)
            data.release()
            progress.add(data.size_bytes)
        trim()
        progress.end()


def _unstacked(stack: StoredTensor, number: int, part: str) -> StoredTensor:
    """The weight of an expert (outputs, inputs), of which only its own bytes are read."""
    count, outputs, inputs = stack.shape
    half = outputs // 2
    own = {"gate": slice(0, half), "up": slice(half, outputs), "down": slice(0, outputs)}[part]
    data, row_bytes = stack.data, stack.data.size_bytes // max(1, count * outputs)
    if data.cut is not None:
        first = number * outputs
        data = data.cut((first + own.start) * row_bytes, (first + own.stop) * row_bytes)

    def decode(content: Tensor) -> Tensor:
        return stack.decode(content)[number, own]

    shape = (own.stop - own.start, inputs)
    return replace(stack, shape=shape, data=replace(data, cut=None), decode=decode)


def _wanted(tensor: StoredTensor, sources: Sequence[WeightSource]) -> TensorData:
    """The data of a tensor, of which no rows are read that no source uses."""
    rows = [source.rows for source in sources if source.rows is not None]
    if tensor.data.cut is None or len(rows) < len(sources):
        return tensor.data
    bounds = [part.indices(tensor.shape[0]) for part in rows]
    first, end = min(start for start, _, _ in bounds), max(stop for _, stop, _ in bounds)
    row_bytes = tensor.data.size_bytes // max(1, tensor.shape[0])
    return tensor.data.cut(first * row_bytes, max(first, end) * row_bytes)


def _read(files: ModelFiles, sources: Sequence[WeightSource]) -> dict[str, StoredTensor]:
    if files.format is LoadFormat.DUMMY:
        return dummy_weights(sources)
    if not files.weights:
        raise ModelLoadError(f"{files.folder}: there is no {_endings(files)} file")
    if files.format is LoadFormat.GGUF:
        # The gguf package is slow to import.
        from antiphon.model_worker.model.formats.gguf import read_gguf_files  # noqa: PLC0415

        names = [source.name for source in sources]
        blocks = {source.name for source in sources if source.dtypes == (torch.uint8,)}
        return read_gguf_files(files.weights, names, mapped=files.mapped, blocks=blocks)
    read = read_torch if files.format is LoadFormat.PT else read_safetensors
    tensors: dict[str, StoredTensor] = {}
    for file in files.weights:
        tensors.update(read(file, mapped=files.mapped))
    return tensors


def _endings(files: ModelFiles) -> str:
    return " or ".join(ENDINGS[files.format])


def _listed(what: str, names: list[str]) -> str:
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return f"{what}: {', '.join(names[:NAMED_MAX])}{more}"


def _dtype_names(*dtypes: torch.dtype) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def prefetch_tensors(tensors: Sequence[TensorData]) -> Iterator[Tensor]:
    """Yield the contents of tensors, in order; release each before taking the next."""
    waiting: deque[tuple[TensorData, Future[Tensor]]] = deque()
    ahead_bytes = placed_bytes = 0
    readers = ThreadPoolExecutor(READERS, thread_name_prefix="weights")
    # Read-ahead is requested on a thread, in order: a busy disk blocks the caller.
    asking = ThreadPoolExecutor(1, thread_name_prefix="weights-asked")
    unasked, asked_bytes = deque(tensors), 0
    try:
        for tensor in tensors:
            while unasked and asked_bytes < placed_bytes + ASKED_BYTES:
                following = unasked.popleft()
                asked_bytes += following.size_bytes
                asking.submit(following.prefetch)
            waiting.append((tensor, readers.submit(tensor.read)))
            ahead_bytes += tensor.size_bytes
            while ahead_bytes > AHEAD_BYTES and len(waiting) > 1:
                ahead_bytes -= waiting[0][0].size_bytes
                placed_bytes += waiting[0][0].size_bytes
                yield waiting.popleft()[1].result()
        while waiting:
            yield waiting.popleft()[1].result()
    finally:
        asking.shutdown(cancel_futures=True)
        readers.shutdown(cancel_futures=True)


class LoadProgress:
    """Counts loaded bytes: a bar in a terminal, else a log line a second; a line at the end."""

    def __init__(
        self,
        total_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        stream: TextIO | None = None,
    ) -> None:
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._clock = clock
        self._began_s = self._reported_s = clock()
        chosen: TextIO | None = stream or sys.stderr  # None in a process without stderr
        self._terminal = chosen if chosen is not None and chosen.isatty() else None

    def add(self, size_bytes: int) -> None:
        self._done_bytes += size_bytes
        now_s = self._clock()
        if now_s - self._reported_s < (FRAME_S if self._terminal else PAUSE_S):
            return
        self._reported_s = now_s
        left = (self._total_bytes - self._done_bytes) / self._done_bytes
        seconds_left = left * (now_s - self._began_s)
        if self._terminal is not None:
            self._draw(self._terminal, seconds_left)
            return
        log.info(
            "loading weights",
            extra={
                "done_bytes": self._done_bytes,
                "total_bytes": self._total_bytes,
                "seconds_left": round(seconds_left, 1),
            },
        )

    def end(self) -> None:
        if self._terminal is not None:
            self._terminal.write(ERASED)
            self._terminal.flush()
        seconds = self._clock() - self._began_s
        rate = self._done_bytes / seconds if seconds else 0.0
        log.info(
            "weights loaded",
            extra={
                "bytes": self._done_bytes,
                "seconds": round(seconds, 2),
                "megabytes_per_s": round(rate / 1e6),
            },
        )

    def _draw(self, terminal: TextIO, seconds_left: float) -> None:
        full = WIDTH * self._done_bytes // self._total_bytes
        terminal.write(
            f"{ERASED}loading weights [{'#' * full}{'.' * (WIDTH - full)}]"
            f" {self._done_bytes / 1e9:.2f} of {self._total_bytes / 1e9:.2f} GB,"
            f" {seconds_left:.0f} s left"
        )
        terminal.flush()
