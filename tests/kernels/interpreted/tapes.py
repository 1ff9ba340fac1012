"""Tapes and the stream that plays them, without a model."""

from __future__ import annotations

from concurrent.futures import wait
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.kernels.interpreted.drawn import DrawnDevice

from antiphon.kernels.op import DeviceCapability
from antiphon.kernels.ops import select
from antiphon.kernels.stream import CudaStream, InterpretedStream, TapeThread
from antiphon.kernels.triton.futures import record
from antiphon.kernels.triton.sampling import argmax
from antiphon.kernels.triton.tape import HostWaits, Tape
from antiphon.kernels.upload import upload_to
from antiphon.model_worker.cache.groups import CacheGroup, CacheTensor, GroupKind
from antiphon.model_worker.runner.device_pages import DevicePages, PageStream
from antiphon.model_worker.runner.pools import GroupMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from numpy.typing import NDArray
    from torch import Tensor

    from antiphon.kernels.stream import Cut, Download

UPLOAD = upload_to("interpreter", torch.device("cpu"))


def work(x: Tensor, weight: Tensor, last: Tensor) -> Tensor:
    """Views, a product, a launch of two kernels, and a change in place."""
    logits = torch.nn.functional.linear(x.reshape(-1, 4), weight).float()
    logits[:, 0] -= 1
    best = argmax(logits)
    slots = torch.arange(len(best), dtype=torch.int32)
    record(last, slots, best, torch.isfinite(logits).all(dim=-1), len(weight))
    return torch.cat((best, best.flip(0)))


def test_a_tape_computes_what_its_inputs_are_when_it_is_played() -> None:
    weight = torch.randn(9, 4, generator=torch.Generator().manual_seed(1))
    x, last = torch.zeros(2, 12), torch.zeros(6, dtype=torch.int32)
    tape = Tape()
    with torch.inference_mode(), tape.recording(fixed=True):
        out = work(x, weight, last)
    assert not last.any(), "nothing was computed"
    assert (out == torch.iinfo(torch.int64).max).all()
    for seed in range(2):
        x.copy_(torch.randn(2, 12, generator=torch.Generator().manual_seed(seed)))
        tape.play()
        expected = torch.zeros(6, dtype=torch.int32)
        assert torch.equal(out, work(x, weight, expected))
        assert torch.equal(last, expected)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.tolist(),
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x.cpu(),
        np.asarray,
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x * torch.tensor(2.0),
        lambda x: x.index_select(0, UPLOAD(np.array([1]))),
    ],
)
def test_what_a_graph_cannot_have_is_refused(call: Callable[[Tensor], object]) -> None:
    tape = Tape()
    with torch.inference_mode(), pytest.raises(HostWaits), tape.recording(fixed=True):
        call(torch.ones(3))


def test_uploads_are_copied_and_results_are_poison_until_they_are_waited_for() -> None:
    device, values = DrawnDevice(), np.array([3.0, 5.0], np.float32)
    stream = InterpretedStream(device.queue())
    with torch.inference_mode(), stream.launching():
        doubled = UPLOAD(values) * 2
        download = stream.download([doubled])
    values[:] = 0  # the host goes on
    assert doubled.isnan().all()
    assert not device.played
    assert download.wait()[0].tolist() == [6.0, 10.0]


def test_a_graph_reads_its_inputs_when_it_is_replayed() -> None:
    """And one of a host that reads, or copies in what is fixed, is not captured."""
    stream, x = InterpretedStream(DrawnDevice().queue()), torch.zeros(2)
    out = torch.zeros(2)

    def run(_: Cut) -> None:
        out.copy_(x * 3)

    with torch.inference_mode():
        graph = stream.capture(run)
        downloads: list[Download] = []
        for number in (1, 2):
            with stream.launching():
                stream.fill(x, np.full(2, number, np.float32))
                graph.replay()
                downloads.append(stream.download([out]))
        assert [each.wait()[0].tolist() for each in downloads] == [[3, 3], [6, 6]]
        with pytest.raises(HostWaits):
            stream.capture(lambda _: stream.fill(x, np.zeros(2, np.float32)))
    assert graph.size_bytes == 8


def test_a_replay_writes_over_what_other_graphs_have_computed() -> None:
    """They share their memory: only what a graph has copied elsewhere is there afterwards."""
    stream, x = InterpretedStream(DrawnDevice().queue()), torch.ones(2)
    kept: dict[int, Tensor] = {}
    outs = [torch.zeros(2), torch.zeros(2)]

    def run(place: int, _: Cut) -> None:
        kept[place] = x * (place + 2)
        outs[place].copy_(kept[place])

    with torch.inference_mode():
        graphs = [stream.capture(partial(run, place)) for place in range(2)]
        with stream.launching():
            for graph in graphs:
                graph.replay()
            download = stream.download([*outs, *kept.values()])
    first, second, lost, own = (values.tolist() for values in download.wait())
    assert (first, second, own) == ([2, 2], [3, 3], [3, 3])
    assert np.isnan(lost).all()


def test_a_graph_is_cut_where_a_call_is_made_anew() -> None:
    """What the call uploads is another thing in each replay, and beforehand."""
    stream, x = InterpretedStream(DrawnDevice().queue()), torch.ones(2)
    out, factors = torch.zeros(2), [1.0, 3.0, 5.0]

    def run(cut: Cut) -> None:
        doubled, scaled = x * 2, torch.empty(2)
        cut(lambda: scaled.copy_(doubled * UPLOAD(np.array(factors.pop(0), np.float32))))
        out.copy_(scaled + 1)

    with torch.inference_mode():
        graph = stream.capture(run)
        downloads: list[Download] = []
        for _ in range(2):
            with stream.launching():
                graph.replay()
                downloads.append(stream.download([out]))
    assert [each.wait()[0].tolist() for each in downloads] == [[7, 7], [11, 11]]


def test_what_the_device_raises_is_raised_by_the_wait() -> None:
    stream = InterpretedStream(DrawnDevice().queue())
    with torch.inference_mode(), stream.launching():
        tokens = torch.zeros(2, dtype=torch.int64).index_select(0, UPLOAD(np.array([7])))
    with torch.inference_mode(), stream.launching():
        download = stream.download([tokens + 1])
    with stream.reading():
        pass
    with pytest.raises(IndexError):
        download.wait()


def test_while_the_host_reads_no_stream_is_played() -> None:
    """Kernels that it calls then run in its own thread, and Triton interprets in one at a time."""
    played: list[int] = []
    beside = (queue := TapeThread()).beside()
    tape = Tape()
    tape.calls.append(lambda: played.append(1))
    with queue.paused():
        waited = beside.put(tape)
        assert not wait([waited], timeout=0.1).done
        assert not played
    waited.result()
    assert played


def test_what_a_gpu_computes_while_the_host_reads_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pages that are wiped then may be free, and be filled on another stream, right afterwards."""
    done: list[str] = []
    current = SimpleNamespace(synchronize=lambda: done.append("waited for"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    with CudaStream(torch.device("cuda")).reading():
        done.append("launched")
    assert done == ["launched", "waited for"]


def test_a_gpu_replays_pieces_and_calls_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """All pieces have one pool of memory, which counts, and so do workspaces of libraries."""
    done: list[str] = []
    reserved: dict[str, int] = {}

    class FakeGraph:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def replay(self) -> None:
            done.extend(self.calls)

    @contextmanager
    def capturing(graph: FakeGraph, pool: str) -> Generator[None]:
        assert pool == "pool"
        before = len(done)
        yield
        graph.calls = done[before:]
        reserved["pool"] = 5

    def run(cut: Cut) -> None:
        reserved["workspace"] = 100
        done.append("first")
        cut(lambda: done.append("call"))
        done.append("second")

    fakes: dict[str, Any] = {"CUDAGraph": FakeGraph, "graph": capturing}
    fakes |= {
        "graph_pool_handle": lambda: "pool",
        "memory_reserved": lambda: sum(reserved.values()),
    }
    fakes |= dict.fromkeys(("synchronize", "empty_cache"), lambda: None)
    fakes |= dict.fromkeys(("device", "stream"), lambda _: nullcontext())
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    graph = CudaStream(torch.device("cuda")).capture(run)
    assert done == ["first", "call", "second", "first", "second"]  # nothing is called in between
    assert graph.size_bytes == 105
    done.clear()
    graph.replay()
    assert done == ["first", "call", "second"]


def test_a_copy_that_fails_half_way_writes_nothing_afterwards() -> None:
    """Its pages are another request's then. Keys are launched, and values do not fit."""
    tensors = tuple(CacheTensor(name=name, dtype="float32", shape=(4,)) for name in ("k", "v"))
    group = CacheGroup(
        kind=GroupKind.FULL, layers=(0, 1), tensors=tensors, page_tokens=16, pages_total=3
    )
    memory, ops = GroupMemory(group, torch.device("cpu")), select(DeviceCapability("interpreter"))
    uploads: list[NDArray[Any]] = []

    def upload(values: NDArray[Any]) -> Tensor:
        uploads.append(values)
        if len(uploads) == 3:
            raise torch.OutOfMemoryError("out of memory")
        return UPLOAD(values)

    pages = DevicePages(memory, PageStream(InterpretedStream(DrawnDevice().queue()), ops, upload))
    page = memoryview(bytearray(b"\x01" * group.page_bytes))
    with pytest.raises(torch.OutOfMemoryError):
        pages.write([2], page)
    left = memory.data.clone()
    pages.read([0], page)  # what was launched before it is played
    assert torch.equal(memory.data, left)
