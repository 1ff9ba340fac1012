"""The process groups of the ranks of a worker.

Messages go over gloo, and on one machine through shared memory. So do tensors on the CPU; those on
GPUs go over NCCL, and those of the interpreter over gloo.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch
import torch.distributed

from antiphon.kernels.triton.backend import INTERPRETER
from antiphon.kernels.triton.launch import enqueue
from antiphon.layers.weights import SingleRank, Tp
from antiphon.model_worker.ranks.ordered_sum import sum_in_order
from antiphon.model_worker.ranks.pipeline import Pipeline
from antiphon.model_worker.ranks.shared_memory import (
    MemoryParts,
    SharedMemoryGroup,
    SharedMemoryLink,
    attach,
    create,
    is_supported,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from mmap import mmap

    from numpy.typing import NDArray

    from antiphon.model_worker.batching.plan import Longs
    from antiphon.model_worker.ranks.layout import RankLayout

dist = cast("Any", torch.distributed)  # its stubs lack the collectives of a gloo group

_START_TIMEOUT = timedelta(seconds=120)
_IDLE_TIMEOUT = timedelta(days=3650)
"""A rank waits for the next plan for as long as there is nothing to compute. What waits for a rank
that is gone or stopped is ended by `Attendance`."""
_MESSAGE_BYTES = 16 * 1024
"""Size of the first broadcast of a message; a longer one takes a second. A plan of 256 decodes has
8 KB."""
_LENGTH_BYTES = 8
GATHERED_BYTES = 4 << 20
"""Size of what each rank gathers at a time from each to sum in order. That is a decode step of 256
rows with a hidden size of 8,192 in 16 bits; the sums of prefills take several pieces."""
CPU = "cpu"


class Work(Protocol):
    def wait(self, timeout: timedelta = ...) -> object: ...


class KeyStore(Protocol):
    """What is used of torch's stores."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...


class RankGroup(Protocol):
    """What is used of torch's `ProcessGroupGloo` and `ProcessGroupNCCL`."""

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def allreduce(self, tensors: list[torch.Tensor], options: object = ...) -> Work: ...

    def allgather(self, out: list[list[torch.Tensor]], own: list[torch.Tensor]) -> Work: ...

    def broadcast(self, tensors: list[torch.Tensor], options: object) -> Work: ...

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work: ...

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work: ...


class TensorGroup:
    """The ranks that share every layer: `antiphon.layers.weights.Tp` over gloo or NCCL.

    Both sum each part of a tensor in an order of its own, which follows from the size of the whole.
    The ranks of an `invariant` group gather all parts instead, and add them in the order of ranks.

    On a device a collective is launched like a kernel, and has computed when the stream has. No
    host waits for it: NCCL's `wait` lets the stream wait.
    """

    def __init__(self, group: RankGroup, *, invariant: bool = False) -> None:
        self._group = group
        self.rank = group.rank()
        self.ranks = group.size()
        self.invariant = invariant

    def in_order(self) -> TensorGroup:
        """The same ranks as an invariant group."""
        return TensorGroup(self._group, invariant=True)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.invariant:
            return sum_in_order(x, GATHERED_BYTES, self._gather)
        x = x.contiguous()
        enqueue(lambda: self._group.allreduce([x]).wait())
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._gather(x.contiguous()), dim=-1)

    def _gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """What each rank has in place of a contiguous `x`."""
        parts = [torch.empty_like(x) for _ in range(self.ranks)]
        enqueue(lambda: self._group.allgather([parts], [x]).wait())
        return parts


class TensorLink:
    """To or from one other rank of a group: a `Link`. It is launched as a `TensorGroup` is."""

    def __init__(self, group: RankGroup, rank: int) -> None:
        self._group, self._rank = group, rank

    def send(self, x: torch.Tensor) -> None:
        enqueue(lambda: self._group.send([x], self._rank, 0).wait())

    def receive(self, out: torch.Tensor) -> None:
        enqueue(lambda: self._group.recv([out], self._rank, 0).wait())


class GlooPages:
    """Between rank 0 and another one: a `PageLink`. A wait for the other side has no limit."""

    def __init__(self, group: RankGroup, rank: int) -> None:
        self._group, self._rank = group, rank

    def send(self, data: bytearray | memoryview) -> None:
        content = torch.as_tensor(np.frombuffer(data, np.uint8))
        self._group.send([content], self._rank, 0).wait(_IDLE_TIMEOUT)

    def receive(self, out: bytearray | memoryview) -> None:
        content = torch.as_tensor(np.frombuffer(out, np.uint8))
        self._group.recv([content], self._rank, 0).wait(_IDLE_TIMEOUT)


class GlooChannel:
    """Messages of rank 0 in one order, and maxima over all ranks: a `RankChannel`."""

    def __init__(self, plans: RankGroup, control: TensorGroup | SharedMemoryGroup) -> None:
        self._plans, self._control = plans, control
        self.rank = plans.rank()
        # What rank 0 sends is on its way while it goes on, until it sends again.
        self._sending: tuple[Work, NDArray[np.uint8]] | None = None

    def send(self, message: bytearray) -> None:
        size = len(message)
        first = np.zeros(_MESSAGE_BYTES, np.uint8)
        first[:_LENGTH_BYTES] = np.frombuffer(size.to_bytes(_LENGTH_BYTES, "little"), np.uint8)
        content = np.frombuffer(message, np.uint8)
        fits = min(size, _MESSAGE_BYTES - _LENGTH_BYTES)
        first[_LENGTH_BYTES : _LENGTH_BYTES + fits] = content[:fits]
        self._broadcast(first)
        if fits < size:
            self._broadcast(content[fits:].copy())

    def receive(self) -> bytearray:
        first = np.empty(_MESSAGE_BYTES, np.uint8)
        self._broadcast(first)
        size = int.from_bytes(first[:_LENGTH_BYTES].tobytes(), "little")
        fits = min(size, _MESSAGE_BYTES - _LENGTH_BYTES)
        message = bytearray(size)
        content = np.frombuffer(message, np.uint8)
        content[:fits] = first[_LENGTH_BYTES : _LENGTH_BYTES + fits]
        if fits < size:
            self._broadcast(content[fits:])
        return message

    def max(self, values: Longs) -> Longs:
        gathered = self._control.all_gather(torch.as_tensor(values))
        return gathered.view(self._control.ranks, len(values)).amax(dim=0).numpy()

    def _broadcast(self, content: NDArray[np.uint8]) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        if self._sending is not None:
            self._sending[0].wait()
        work = self._plans.broadcast([torch.as_tensor(content)], options)
        if self.rank:
            work.wait()
        else:
            self._sending = work, content


class RankGroups:
    """All groups of one rank, and the name of its `device`."""

    def __init__(
        self,
        tensor: Tp,
        attention: Tp | None,
        pipeline: Pipeline | None,
        channel: GlooChannel,
        in_memory: Sequence[SharedMemoryGroup | SharedMemoryLink] = (),
        *,
        layout: RankLayout,
        gloo: Callable[[str], RankGroup],
        device: str = CPU,
    ) -> None:
        self.tensor, self.attention = tensor, attention
        self.pipeline, self.channel = pipeline, channel
        self.layout, self.device = layout, device
        self._in_memory = in_memory
        self._gloo = gloo

    def tensor_groups(self, *, invariant: bool) -> tuple[Tp, Tp | None]:
        """The groups `tensor` and `attention`; `invariant`: they sum in the order of ranks."""
        if not invariant:
            return self.tensor, self.attention
        attention = None if self.attention is None else _in_order(self.attention)
        return _in_order(self.tensor), attention

    def open_pages(self) -> list[GlooPages]:
        """Links for pages, from rank 0 to each other one or back; all ranks call this at once."""
        group = self._gloo("pages")
        others = [0] if group.rank() else range(1, group.size())
        return [GlooPages(group, rank) for rank in others]

    def abort(self) -> None:
        """Fail collectives over shared memory, which notice no process that has ended."""
        for each in self._in_memory:
            each.abort()

    @classmethod
    def open(
        cls,
        rank: int,
        ranks: RankLayout,
        store: tuple[str, int],
        *,
        listening: socket.socket | None = None,
        local: bool = False,
        devices: Sequence[str] | None = None,
    ) -> RankGroups:
        """Meet the other ranks at the `store`, an address at which rank 0 is `listening`.

        Rank 0 says whether all ranks are `local`, on one machine, and which `devices` they have, by
        rank; None: the CPU.

        Raises:
            OSError: The store, or another rank, is not reached.
        """
        host, port = store
        try:
            meeting = dist.TCPStore(
                host,
                port,
                is_master=listening is not None,
                timeout=_START_TIMEOUT,
                wait_for_workers=False,
                master_listen_fd=None if listening is None else listening.detach(),
            )
            own = _own_address(host, port)
            if listening is not None:
                _assign(meeting, devices or [CPU] * ranks.ranks)
            device = meeting.get(_device_key(rank)).decode()
            parts = MemoryParts(ranks)
            memory = _share_memory(meeting, parts, first=rank == 0, local=local)

            def gloo(name: str, member: int = rank, members: int = ranks.ranks) -> RankGroup:
                return _gloo(dist.PrefixStore(name, meeting), member, members, own)

            def nccl(name: str, member: int = rank, members: int = ranks.ranks) -> RankGroup:
                return _nccl(dist.PrefixStore(name, meeting), member, members, device)

            if memory is not None and device == CPU:
                return _in_memory(rank, ranks, memory, parts, gloo)
            control = None if memory is None else SharedMemoryGroup(rank, memory, parts.control)
            tensors = gloo if device in (CPU, INTERPRETER) else nccl
            return _over_network(rank, ranks, gloo, tensors, control, device)
        except RuntimeError as error:
            raise OSError(f"ranks do not meet at {host}:{port}: {error}") from error


def _in_memory(
    rank: int, ranks: RankLayout, memory: mmap, parts: MemoryParts, gloo: Callable[..., RankGroup]
) -> RankGroups:
    stage, member = ranks.stage(rank), ranks.member(rank)
    control = SharedMemoryGroup(rank, memory, parts.control)
    tensor = SharedMemoryGroup(member, memory, parts.tensors[stage])
    attention = None
    if ranks.dp > 1:
        group, place = divmod(member, ranks.attention_ranks)
        attention = SharedMemoryGroup(place, memory, parts.attention[group])
    before, after = (
        SharedMemoryLink(memory, parts.links[sender, member], ranks.ranks)
        if (sender, member) in parts.links
        else None
        for sender in (stage - 1, stage)
    )
    return RankGroups(
        tensor if ranks.tp > 1 else SingleRank(),
        SingleRank() if ranks.dp > 1 and ranks.attention_ranks == 1 else attention,
        Pipeline(stage, ranks.pp, before, after) if ranks.pp > 1 else None,
        GlooChannel(gloo("plans"), control),
        [each for each in (control, tensor, attention, before, after) if each is not None],
        layout=ranks,
        gloo=gloo,
    )


def _over_network(
    rank: int,
    ranks: RankLayout,
    gloo: Callable[..., RankGroup],
    tensors: Callable[..., RankGroup],
    control: SharedMemoryGroup | None,
    device: str,
) -> RankGroups:
    """Those that share no tensors in memory: these go over groups of their own kind."""
    plans = gloo("plans")
    stage, member, pipeline = ranks.stage(rank), ranks.member(rank), None
    tensor = SingleRank()
    if ranks.tp > 1:
        tensor = TensorGroup(tensors(f"tensor {stage}", member, ranks.tp))
    attention = None
    if ranks.dp > 1:
        group, place = divmod(member, ranks.attention_ranks)
        attention = SingleRank()
        if ranks.attention_ranks > 1:
            named = f"attention {group}"
            attention = TensorGroup(tensors(named, place, ranks.attention_ranks))
    if ranks.pp > 1:
        group = tensors("stages")
        before, after = (
            TensorLink(group, ranks.rank(other, member)) if 0 <= other < ranks.pp else None
            for other in (stage - 1, stage + 1)
        )
        _connect_stages(before, after, CPU if tensors is gloo else device)
        pipeline = Pipeline(stage, ranks.pp, before, after)
    return RankGroups(
        tensor,
        attention,
        pipeline,
        GlooChannel(plans, control or TensorGroup(gloo("control"))),
        [] if control is None else [control],
        layout=ranks,
        gloo=gloo,
        device=device,
    )


def _in_order(group: Tp) -> Tp:
    """The same ranks with invariant sums, which those that share memory have anyway."""
    return group.in_order() if isinstance(group, TensorGroup) else group


def _assign(store: KeyStore, devices: Sequence[str]) -> None:
    for rank, name in enumerate(devices):
        store.set(_device_key(rank), name)


def _device_key(rank: int) -> str:
    return f"device {rank}"


def _share_memory(store: KeyStore, parts: MemoryParts, *, first: bool, local: bool) -> mmap | None:
    """The memory that all ranks share, if they can."""
    memory, path = None, ""
    if first:
        if local and is_supported():
            memory, path = create(parts)
        store.set("memory", path)
    elif path := store.get("memory").decode():
        memory = attach(path)
    return memory


def _nccl(store: object, rank: int, ranks: int, device: str) -> RankGroup:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _START_TIMEOUT  # noqa: SLF001
    return _connect(dist.ProcessGroupNCCL(store, rank, ranks, options), device)


def _gloo(store: object, rank: int, ranks: int, address: str) -> RankGroup:
    options = dist.ProcessGroupGloo._Options()  # noqa: SLF001  # torch's tests make it so, too
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]  # noqa: SLF001
    options._threads = 1  # noqa: SLF001  # collectives of a group come one after the other
    options._timeout = _START_TIMEOUT  # noqa: SLF001
    return _connect(dist.ProcessGroupGloo(store, rank, ranks, options), CPU)


def _connect(made: object, device: str) -> RankGroup:
    """Make connections, as the first collective does: here, where a wait for them is bounded."""
    group, one = cast("Any", made), torch.ones(1, device=device)
    group.allreduce([one]).wait()
    one.item()  # waits for a GPU
    group._set_default_timeout(_IDLE_TIMEOUT)  # noqa: SLF001
    return group


def _connect_stages(before: TensorLink | None, after: TensorLink | None, device: str) -> None:
    """Make the connections of neighbouring stages, which NCCL makes for the first number sent."""
    one = torch.ones(1, device=device)
    if before is not None:
        before.receive(one)
    if after is not None:
        after.send(one)
    one.item()  # waits for a GPU


def _own_address(host: str, port: int) -> str:
    """The address of this machine on the network of the store."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        return probe.getsockname()[0]
