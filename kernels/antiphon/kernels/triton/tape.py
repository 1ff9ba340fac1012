"""A tape: what is launched while it records, to be played in its order, as often as wanted.

The interpreter computes on CPU tensors, which a host could read at any time. While a tape records,
nothing is computed: outputs have their shapes, and memory that is poisoned. A result that is read
before it was played is poison, or the read is refused, and what is not on the tape does not take
place when it is played: so code that runs with a tape is code that launches on a GPU.
"""

# pyright: basic
# ruff: noqa: ANN401 (operands of any function of torch)

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from antiphon.kernels.triton.launch import RECORDING

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from antiphon.kernels.triton.launch import Constant, Kernel

_READS = frozenset(
    {"numpy", "__array__", "tolist", "item", "cpu", "__bool__", "__int__", "__float__", "__index__"}
)
_CONSTANTS = frozenset({"tensor"})
_UPLOADS = frozenset({"as_tensor", "from_numpy"})
_UNFILLED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})


class HostWaits(Exception):
    """Between two launches the host read what the device computes, or copied in what is fixed."""


class Tape:
    """Calls of torch and launches of Triton kernels, as they were recorded."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []
        """Those of which each must be `play`ed, in their order."""
        self._outputs: list[Tensor] = []

    @property
    def allocated_bytes(self) -> int:
        """Of all outputs."""
        return sum(out.nbytes for out in self._outputs)

    @contextmanager
    def recording(self, *, fixed: bool = False) -> Generator[None]:
        """Record what is called inside, in this thread.

        A `fixed` tape is played with other contents: it may copy nothing from the host.

        Raises:
            HostWaits: Inside, by what cannot be recorded.
        """
        assert RECORDING.recorder is None, "another tape records in this thread"
        refused = _READS | _CONSTANTS | (_UPLOADS if fixed else frozenset())
        RECORDING.recorder, RECORDING.calls = self._launched, self.calls.append
        try:
            with ExitStack() as modes:
                modes.enter_context(_Guard(refused))
                modes.enter_context(_Calls(self))
                yield
        finally:
            RECORDING.recorder = RECORDING.calls = None

    def play(self) -> None:
        """Make all calls, in the thread of the caller."""
        for call in self.calls:
            play(call)

    def poison(self) -> None:
        """Fill all outputs with what no computation survives."""
        for out in self._outputs:
            poison(out)

    def _launched(
        self,
        kernel: Kernel,
        grid: tuple[int, ...],
        arguments: tuple[Tensor | float, ...],
        constants: dict[str, Constant],
    ) -> None:
        self.calls.append(lambda: kernel[grid](*arguments, **constants))

    def allocate(self, shape: Any) -> Tensor:
        """Memory for an output, which has no data yet."""
        if not isinstance(shape, Tensor):
            raise HostWaits("a step makes a number of the host of what the device computes")
        out = torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype)
        self._outputs.append(out)
        return poison(out)


class _Calls(TorchDispatchMode):
    """Records calls of torch on a tape."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch._C._dispatch_has_kernel_for_dispatch_key(  # noqa: SLF001
            func.name(), "CompositeImplicitAutograd"
        ):
            with self:  # in inference mode these arrive whole
                return func.decompose(*args, **kwargs)
        schema = func._schema  # noqa: SLF001
        if not schema.is_mutable and any(value.alias_info for value in schema.returns):
            return func(*args, **kwargs)  # a view: no element is read
        made = _shapes_of(func, args, kwargs)
        if schema.is_mutable:
            self._tape.calls.append(lambda: func(*args, **kwargs))
            return _written(schema, args, kwargs)
        outputs = tree_map(self._tape.allocate, made)
        if func.overloadpacket.__name__ not in _UNFILLED:
            self._tape.calls.append(lambda: _fill(outputs, func(*args, **kwargs)))
        return outputs


class _Guard(TorchFunctionMode):
    """Refuses functions that torch does not dispatch by their operands."""

    def __init__(self, refused: frozenset[str]) -> None:
        super().__init__()
        self._refused = refused

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in self._refused:
            raise HostWaits(f"a step calls {name}, for which the host would wait")
        return func(*args, **(kwargs or {}))


def play(call: Callable[[], object]) -> None:
    """Make a call of a tape, in the thread of the caller."""
    with torch.inference_mode():
        call()


def poison(tensor: Tensor) -> Tensor:
    """Fill a tensor with what no computation survives."""
    if tensor.is_floating_point():
        return tensor.fill_(torch.nan)
    return tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)


def _shapes_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The outputs of a call as tensors without data.

    Raises:
        HostWaits: Their shapes depend on data.
    """
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": torch.device("meta")}
    try:
        return func(*tree_map(_without_data, args), **tree_map(_without_data, kwargs))
    except (NotImplementedError, RuntimeError) as error:
        raise HostWaits(f"{func}: {error}") from error


def _without_data(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")


def _written(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call returns that changes its arguments: these."""
    changed = [
        kwargs[argument.name] if argument.name in kwargs else args[place]
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    returned = changed[: len(schema.returns)]
    return returned[0] if len(returned) == 1 else tuple(returned) or None


def _fill(outputs: Any, results: Any) -> None:
    for out, result in zip(tree_iter(outputs), tree_iter(results), strict=True):
        out.copy_(result)
