"""An operation: a torch reference that defines its result, and a list of faster backends.

The backend is chosen once, at start, by facts about the device, and every rejected backend is
logged with the reason. There is no fallback at run time.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, ParamSpec, TypeVar, cast

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)

REFERENCE = "torch"


class KernelUnavailable(Exception):
    """A backend that was requested by name cannot run here; the message names the reason."""


@dataclass(frozen=True, slots=True)
class AttentionFeatures:
    """What some layers of a model attend with, as far as backends differ in it."""

    head_size: int
    window: bool = False
    softcap: bool = False
    latent: int = 0  # of pages of latents, which are keys and values: the elements that are values
    heads: int = 1  # of latents, the query heads on a rank


@dataclass(frozen=True, slots=True)
class DeviceCapability:
    """The facts about a device, and the model on it, that determine which backends can run."""

    kind: str  # cpu, cuda, or interpreter: Triton's, on CPU tensors
    dtype: torch.dtype = torch.float32
    sm: int | None = None  # of a CUDA device, its compute capability: 90 is 9.0
    cache_dtype: torch.dtype | None = None  # of an 8-bit KV cache
    attention: tuple[AttentionFeatures, ...] = ()  # of all layers that read the KV cache


@dataclass(frozen=True, slots=True)
class Backend:
    """One implementation of an op."""

    name: str
    target: str  # `module:function`, imported only when chosen
    # Returns the requirement that a device lacks, or None.
    needs: Callable[[DeviceCapability], str | None]
    invariant: bool = False  # whether it is batch-invariant: a row's bits depend on that row alone
    fixed: str = ""  # as `target`, one that is batch-invariant where `target` is not


@dataclass(frozen=True, slots=True)
class BackendChoice(Generic[P, R_co]):
    """The chosen backend, and why the backends before it were not chosen."""

    op: str
    call: Callable[P, R_co]
    backend: str
    refused: tuple[tuple[str, str], ...]
    invariant: bool


@dataclass(frozen=True, slots=True)
class Op(Generic[P, R_co]):
    """An operation: the torch reference that defines its result, and faster backends."""

    name: str
    reference: Callable[P, R_co]
    backends: tuple[Backend, ...]
    invariant: bool  # whether the reference is batch-invariant

    def select(
        self, device: DeviceCapability, forced: str | None = None, *, invariant: bool = False
    ) -> BackendChoice[P, R_co]:
        """The first backend, in order, that this device can run; the reference is the last.

        `invariant`: of a backend with a way that is batch-invariant, that one; a backend without
        one only if it is forced.

        Raises:
            KernelUnavailable: `forced` cannot run here; names the failed condition.
        """
        refused: list[tuple[str, str]] = []
        for backend in self.backends:
            if forced not in (None, backend.name):
                refused.append((backend.name, f"{forced} is forced"))
            elif (lacks := backend.needs(device)) is not None:
                refused.append((backend.name, lacks))
            elif invariant and forced is None and not (backend.invariant or backend.fixed):
                refused.append((backend.name, "its results depend on batch composition"))
            else:
                fixed = backend.fixed if invariant else ""
                module, _, name = (fixed or backend.target).partition(":")
                call = cast("Callable[P, R_co]", getattr(importlib.import_module(module), name))
                return BackendChoice(
                    self.name, call, backend.name, tuple(refused), backend.invariant or bool(fixed)
                )
        if forced not in (None, REFERENCE):
            reason = dict(refused).get(forced, f"{self.name} has no such backend")
            raise KernelUnavailable(f"{self.name}: backend {forced!r} cannot run here: {reason}")
        return BackendChoice(self.name, self.reference, REFERENCE, tuple(refused), self.invariant)


REGISTRY: dict[str, Op[..., object]] = {}
"""Every op by its name."""


def kernel(
    name: str, *backends: Backend, invariant: bool = False
) -> Callable[[Callable[P, R_co]], Op[P, R_co]]:
    """Make a torch function the reference of the op `name`, and register it.

    `invariant`: the reference is batch-invariant, too.
    """

    def wrap(reference: Callable[P, R_co]) -> Op[P, R_co]:
        op = Op(name, reference, backends, invariant)
        REGISTRY[name] = op
        return op

    return wrap


def table(choices: Iterable[BackendChoice[..., object]]) -> str:
    """One line an op: its name, its backend, and the backends rejected with their reasons."""
    lines: list[str] = []
    for choice in choices:
        refusals = "; ".join(f"not {name}: {reason}" for name, reason in choice.refused)
        lines.append(f"{choice.op:<22} {choice.backend:<12} {refusals}".rstrip())
    return "\n".join(lines)
