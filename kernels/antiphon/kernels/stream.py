"""The stream of a device: what is launched is computed in this order, while the host goes on.

For a step the host waits for a `Download` and for nothing else.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from antiphon.kernels.triton.backend import INTERPRETER
from antiphon.kernels.triton.tape import Tape, play

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from concurrent.futures import Future
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray
    from torch import Tensor

    Cut = Callable[[Callable[[], object]], object]
    """Leaves a call out of what is captured; each replay makes it in this place."""


class Download(Protocol):
    """Copies of tensors on their way to the host."""

    def wait(self) -> list[NDArray[Any]]:
        """Wait until the device has computed and copied them.

        Raises:
            Exception: What the device has raised meanwhile.
        """
        ...


class Stream(Protocol):
    """One stream of a device. Not thread-safe."""

    def launching(self) -> AbstractContextManager[None]:
        """What is called inside is launched, and nothing is waited for."""
        ...

    def reading(self) -> AbstractContextManager[None]:
        """What is called inside may read tensors: the host waits for all that was launched.

        It waits for what was called, too, before it goes on: what that has written is there for
        streams beside this one.
        """
        ...

    def fill(self, target: Tensor, values: NDArray[Any]) -> None:
        """Copy an array, which may change afterwards, into a tensor. Inside `launching`."""
        ...

    def download(self, tensors: Sequence[Tensor]) -> Download:
        """Copy tensors to the host, after what was launched before. Inside `launching`."""
        ...

    def beside(self) -> Stream:
        """Another stream of the device, for another thread; only the host orders the two."""
        ...

    def capture(self, run: Callable[[Cut], None]) -> Graph:
        """Capture what `run` launches, to be replayed with other contents of the same tensors.

        `run` may be called before, too; it gets what cuts the graph in pieces. All graphs share
        their memory: the outputs of one are overwritten by the next replay of any.

        Raises:
            Exception: `run` waits for the device, or copies from the host.
        """
        ...


class Graph(NamedTuple):
    """Captured launches.

    Attributes:
        replay: Launches all of them, and makes the calls between them. Inside `launching`.
        size_bytes: Memory that was allocated for them, and on a GPU for workspaces that they read.
    """

    replay: Callable[[], None]
    size_bytes: int


def open_stream(kind: str, device: torch.device) -> Stream:
    """The stream of a device of a kind, which is not the CPU."""
    return InterpretedStream() if kind == INTERPRETER else CudaStream(device)


class CudaStream:
    """The current stream of a GPU in each thread that launches, or one of its own."""

    def __init__(self, device: torch.device, own: torch.cuda.Stream | None = None) -> None:
        self._device = device
        self._own = own
        self._pool: Any = None  # of all graphs, once there is one

    @contextmanager
    def launching(self) -> Generator[None]:
        # Triton launches kernels on the current device, of which each thread has one of its own.
        with torch.cuda.device(self._device), torch.cuda.stream(self._own):
            yield

    @contextmanager
    def reading(self) -> Generator[None]:
        with self.launching():
            yield
            torch.cuda.current_stream().synchronize()

    def beside(self) -> CudaStream:
        return CudaStream(self._device, torch.cuda.Stream(self._device))

    def fill(self, target: Tensor, values: NDArray[Any]) -> None:
        target.copy_(torch.as_tensor(values).pin_memory(), non_blocking=True)

    def capture(self, run: Callable[[Cut], None]) -> Graph:
        with self.launching():
            torch.cuda.empty_cache()  # as each capture does, which must not count
            before = torch.cuda.memory_reserved()
            run(lambda call: call())  # compiles kernels, and gives libraries their workspaces
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            pieces = _CudaPieces(self._pool)
            with pieces.capturing():
                run(pieces.cut)
            return Graph(pieces.replay, torch.cuda.memory_reserved() - before)

    def download(self, tensors: Sequence[Tensor]) -> Download:
        copies = [
            torch.empty(each.shape, dtype=each.dtype, pin_memory=True).copy_(
                each, non_blocking=True
            )
            for each in tensors
        ]
        copied = torch.cuda.Event(blocking=True)  # a host that spins would take a core
        copied.record()
        return _CudaDownload(copies, copied)


class _CudaPieces:
    """Graphs, and the calls between them."""

    def __init__(self, pool: Any) -> None:  # noqa: ANN401 (its type is private to torch)
        self._pool = pool
        self._parts: list[Callable[[], object]] = []
        self._open = ExitStack()  # while a piece is captured

    @contextmanager
    def capturing(self) -> Generator[None]:
        with self._open:
            self._begin()
            yield

    def cut(self, call: Callable[[], object]) -> None:
        self._open.close()
        self._parts.append(call)
        self._begin()

    def replay(self) -> None:
        for part in self._parts:
            part()

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        # All pieces are captured on one stream of torch's, which reuses what others have freed.
        self._open.enter_context(torch.cuda.graph(graph, pool=self._pool))
        self._parts.append(graph.replay)


class _CudaDownload(NamedTuple):
    copies: list[Tensor]
    copied: torch.cuda.Event

    def wait(self) -> list[NDArray[Any]]:
        self.copied.synchronize()
        return [copy.numpy() for copy in self.copies]


class TapeQueue(Protocol):
    """One stream of the interpreter: plays tapes in their order, and not before they are put in."""

    def put(self, tape: Tape) -> Future[None]:
        """Play a tape after those before it  ->  when it was played, or what that has raised."""
        ...

    def paused(self) -> AbstractContextManager[None]:
        """Inside no queue of the device plays: what the host calls runs in its own thread."""
        ...

    def beside(self) -> TapeQueue:
        """Another queue of the device, in no order with this one."""
        ...


class TapeThread:
    """Plays tapes in a thread. Those of a device take turns, call by call.

    Triton interprets one kernel at a time.
    """

    def __init__(self, turn: Lock | None = None) -> None:
        threads = partial(torch.set_num_threads, torch.get_num_threads())
        self._executor = ThreadPoolExecutor(1, "stream", threads)
        self._turn = turn or Lock()

    def put(self, tape: Tape) -> Future[None]:
        return self._executor.submit(self._play, tape)

    def _play(self, tape: Tape) -> None:
        for call in tape.calls:
            with self._turn:
                play(call)

    @contextmanager
    def paused(self) -> Generator[None]:
        with self._turn:
            yield

    def beside(self) -> TapeThread:
        return TapeThread(self._turn)


class InterpretedStream:
    """Has its queue play what is launched, once it was recorded: see `Tape`.

    Raises:
        HostWaits: Inside `launching`, by what a GPU would make the host wait for.
    """

    def __init__(self, queue: TapeQueue | None = None) -> None:
        self._queue = queue or TapeThread()
        self._launched: _Launched | None = None
        self._undownloaded: list[_Launched] = []
        self._last: Future[None] | None = None
        self._graphs: list[Tape] = []

    @contextmanager
    def launching(self) -> Generator[None]:
        launched = self._launched = _Launched(Tape())
        self._undownloaded.append(launched)
        try:
            with launched.tape.recording():
                yield
        finally:
            # A GPU has what was launched before a failure, too.
            self._last = launched.played = self._queue.put(launched.tape)
            self._launched = None

    @contextmanager
    def reading(self) -> Generator[None]:
        if self._last is not None:
            self._last.exception()  # which its own download raises
        with self._queue.paused():
            yield

    def beside(self) -> InterpretedStream:
        return InterpretedStream(self._queue.beside())

    def fill(self, target: Tensor, values: NDArray[Any]) -> None:
        target.copy_(torch.as_tensor(values.copy()))

    def capture(self, run: Callable[[Cut], None]) -> Graph:
        with Tape().recording():
            run(lambda call: call())  # as on a GPU: backends plan on the host then
        tape = Tape()
        cuts: list[tuple[int, Callable[[], object]]] = []
        with tape.recording(fixed=True):
            run(lambda call: cuts.append((len(tape.calls), call)))
        self._graphs.append(tape)
        return Graph(partial(self._replay, tape, cuts), tape.allocated_bytes)

    def _replay(self, tape: Tape, cuts: Sequence[tuple[int, Callable[[], object]]]) -> None:
        assert self._launched is not None, "nothing is being launched"
        launched, start = self._launched.tape.calls, 0
        # They share their memory, which this one may write over.
        launched += [graph.poison for graph in self._graphs]
        for end, call in cuts:
            launched += tape.calls[start:end]
            call()
            start = end
        launched += tape.calls[start:]

    def download(self, tensors: Sequence[Tensor]) -> Download:
        assert self._launched is not None, "nothing is being launched"
        launched, self._undownloaded = self._undownloaded, []
        return _InterpretedDownload(
            [torch.empty_like(each).copy_(each) for each in tensors], launched
        )


class _Launched:
    """A tape, and when it was played, once it is launched."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.played: Future[None] | None = None


class _InterpretedDownload(NamedTuple):
    copies: list[Tensor]
    launched: list[_Launched]  # since the download before this one

    def wait(self) -> list[NDArray[Any]]:
        for each in self.launched:
            assert each.played is not None, "it is still being launched"
            each.played.result()
        return [copy.numpy() for copy in self.copies]
