"""Packed linears: one copy of the weights, read at memory bandwidth for any number of rows.

`PackedWeight` has numbers, or bytes with a scale for each output; `PackedGroups` has codes of a few
bits with a scale for each group of inputs. A weight is split into panels of 32 outputs, each with
its inputs in the order in which the kernel reads them (csrc/packed.h). The sums of a row have the
same bits however many rows there are.
Axes: T rows, I inputs, O outputs, G groups of inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol, cast

import torch

from antiphon.kernels.cpu import extension
from antiphon.kernels.cpu.extension import huge_zeros

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

Format = Literal["packed", "int8", "int8_dynamic"]
"""`packed` keeps the weight's own dtype; `int8` quantizes each output's weights to 255 levels, and
on AMX each row of activations to 65,025; `int8_dynamic` quantizes these to 255 everywhere."""

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float32: "f32"}
"""The dtypes of activations, as the CPU extension names them."""
SCALE_NAMES = {torch.float16: "f16", **DTYPE_NAMES}
"""Those of scales of groups."""

LANES = 16
PANEL = 2 * LANES
PIECE_NUMBERS = 1 << 19
"""Approximate number of weights written at once: large for copying, small enough for the cache."""
INT8_MAX = 127
"""Maximum magnitude of a quantized weight or activation."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """Weights value(code) * scale + minimum: a group of inputs shares scale and minimum.

    Attributes:
        bits: Of a code, 4, 5, 6 or 8.
        group: Inputs of a group; the last group of an output may have fewer.
        scales: The dtype of scales and minimums: float16, bfloat16 or float32, where their numbers
            have so many bits; float8_e4m3fn, where another one of their tensor multiplies them.
        minimums: Whether there are minimums; without, they are zero.
        values: The value of each code, exact in bfloat16. Codes of 8 bits are their own values,
            signed, and there are none.
    """

    bits: int
    group: int
    scales: torch.dtype
    minimums: bool
    values: tuple[float, ...] = ()

    def multiplied_in(self, dtype: torch.dtype) -> Grouping:
        """The grouping in which weights meet activations of a dtype.

        Scales in float32 are rounded to float16 for activations of 16 bits, which have no more bits
        than that: of four bits in groups of 32, they would be a third of what is read. So are
        products of two scales.
        """
        factored = self.scales is torch.float8_e4m3fn
        if dtype.itemsize == torch.float16.itemsize and (factored or self.scales is torch.float32):
            return replace(self, scales=torch.float16)
        return replace(self, scales=torch.float32) if factored else self

    def fits(self, inputs: int) -> bool:
        """Whether weights with so many inputs can be packed: codes are laid out in units."""
        unit = CODE_UNITS.get(self.bits, 8)
        return self.group % unit == 0 and inputs % unit == 0

    def panel_bytes(self, inputs: int) -> int:
        """Bytes of the codes and scales of 32 outputs."""
        groups = -(-inputs // self.group)
        scales = PANEL * self.scales.itemsize * (2 if self.minimums else 1)
        return groups * scales + PANEL * inputs * self.bits // 8


CODE_UNITS = {5: 32, 6: 16}
"""Inputs whose codes are packed together, where they are not 8."""


class CompiledLinear(Protocol):
    """A linear of the CPU extension, whatever its weights were packed from."""

    def multiply(self, x: Tensor) -> Tensor:
        """(T, I)  ->  (T, O), bias added, rounded once to the dtype of x."""
        ...

    def multiply_wide(self, x: Tensor) -> Tensor:
        """(T, I)  ->  (T, O) float32, the unrounded sums."""
        ...

    def rows(self, outputs: Tensor) -> Tensor:
        """The weights of some outputs: (N,) int64  ->  (N, I), in the dtype of activations."""
        ...

    def write(self, rows: Tensor, *, panel: int, lane: int, lanes: int) -> None:
        """Write rows (P * lanes, I) to `lanes` lanes, from `lane` on, of P panels."""
        ...

    def write_groups(
        self,
        codes: Tensor,
        scales: Tensor,
        minimums: Tensor | None,
        *,
        panel: int,
        lane: int,
        lanes: int,
    ) -> None:
        """Write codes (P * lanes, I) uint8, scales and minimums (P * lanes, G) to the same."""
        ...


class CompiledHeadLinears(Protocol):
    """Linears of the CPU extension, one for each of H heads."""

    def multiply(self, x: Tensor) -> Tensor:
        """(T, H, I)  ->  (T, H, O), the bits of each head's own `multiply`."""
        ...


def head_linears(linears: list[CompiledLinear]) -> CompiledHeadLinears:
    """Make one call of the linears of all heads, which have one shape."""
    return cast("CompiledHeadLinears", extension.load().HeadLinears(linears))


class _Panels:
    """The bias of a packed weight, and which panels and lanes its outputs have."""

    def __init__(self, outputs: int, *, bias: bool, halves: bool) -> None:
        self._outputs, self._halves = outputs, halves
        self._count = -(-outputs // 2 // LANES) if halves else -(-outputs // PANEL)
        self._bias = torch.zeros(self._count, PANEL) if bias else None

    def write_bias(self, first: int, bias: Tensor) -> None:
        assert self._bias is not None, "a linear without bias"
        for panels, lanes, part in self._places(first, len(bias)):
            into = self._bias[panels, lanes]
            into.copy_(bias[part].view(into.shape))

    def _places(self, first: int, count: int) -> Iterator[tuple[slice, slice, slice]]:
        """Panels and lanes of each output range, and that range: whole panels, or a part of one."""
        width = LANES if self._halves else PANEL
        done = 0
        while done < count:
            output = first + done
            second = self._halves and output >= self._outputs // 2
            within = output - self._outputs // 2 if second else output
            panel, lane = divmod(within, width)
            end = self._outputs // 2 if self._halves else self._outputs
            left = min(end - within, count - done)
            whole = left // width if lane == 0 else 0
            run = whole * width or min(width - lane, left)
            start = lane + (LANES if second else 0)
            lanes = slice(start, start + min(run, width))
            yield slice(panel, panel + max(whole, 1)), lanes, slice(done, done + run)
            done += run


class PackedWeight(_Panels):
    """The packed copy of a weight (O, I) and its bias (O,), zero until written.

    Written in place: `linear` always reads the same memory.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        format_: Format,
        halves: bool = False,
    ) -> None:
        super().__init__(outputs, bias=bias, halves=halves)
        library = extension.load()
        number = DTYPE_NAMES[dtype]
        kind, self._group, kept = _KINDS[number if format_ == "packed" else format_]
        self._format: Format = format_
        groups = -(-inputs // self._group)
        self._panels = huge_zeros(self._count, groups, PANEL, self._group, dtype=kept)
        self._scales = None if format_ == "packed" else torch.zeros(self._count, PANEL)
        self.linear = cast(
            "CompiledLinear",
            library.Linear(
                weights=getattr(library.Weights, kind),
                dtype=getattr(library.Dtype, number),
                halves=halves,
                inputs=inputs,
                outputs=outputs,
                panels=self._panels,
                scales=self._scales,
                bias=self._bias,
            ),
        )

    @property
    def nbytes(self) -> int:
        """Bytes that one multiplication reads."""
        kept = (self._panels, self._scales, self._bias)
        return sum(tensor.nbytes for tensor in kept if tensor is not None)

    def write(self, first: int, weight: Tensor) -> None:
        """Write the weights (N, I) of outputs `first` and on, in place, quantized if the format is.

        Weights are converted chunk by chunk where necessary, so that temporaries are small.
        """
        rows = max(PIECE_NUMBERS // weight.shape[1] // PANEL, 1) * PANEL
        if self._writable(weight):
            rows = max(len(weight), 1)
        for at in range(0, len(weight), rows):
            piece = self._converted(weight[at : at + rows])
            for panels, lanes, part in self._places(first + at, len(piece)):
                width = lanes.stop - lanes.start
                self.linear.write(piece[part], panel=panels.start, lane=lanes.start, lanes=width)

    def write_int8(self, first: int, steps: Tensor, scales: Tensor) -> None:
        """Write weights that are already quantized, in place, if the format is quantized.

        steps (N, I) int8, scales (N,) float32
        """
        assert self._format != "packed", "a format that keeps the weight's own numbers"
        rows = max(PIECE_NUMBERS // steps.shape[1] // PANEL, 1) * PANEL
        for at in range(0, len(steps), rows):
            self._put(first + at, steps[at : at + rows], scales[at : at + rows])

    def _writable(self, weight: Tensor) -> bool:
        known = DTYPE_NAMES if self._scales is not None else (self._panels.dtype,)
        whole = self._scales is not None or weight.shape[1] % self._group == 0
        return weight.dtype in known and whole and weight.is_contiguous()

    def _converted(self, weight: Tensor) -> Tensor:
        if self._writable(weight):
            return weight
        if self._scales is not None:
            return weight.to(torch.float32).contiguous()
        short = -weight.shape[1] % self._group
        return torch.nn.functional.pad(weight, (0, short)).to(self._panels.dtype).contiguous()

    def _put(self, first: int, weight: Tensor, scales: Tensor) -> None:
        if self._format == "int8_dynamic":
            # The byte dot product takes one unsigned factor.
            weight = (weight.short() + INT8_MAX + 1).byte()
        short = -weight.shape[1] % self._group
        padded = torch.nn.functional.pad(weight, (0, short)).to(self._panels.dtype).contiguous()
        # A group is copied as one word, which is several times faster than element by element.
        word = _WORDS[self._group * padded.itemsize]
        rows = padded.view(word)  # (N, groups)
        kept = self._panels.view(word)[..., 0]  # (panels, groups, lanes)
        for panels, lanes, part in self._places(first, len(weight)):
            into = kept[panels, :, lanes]
            into.copy_(rows[part].view(len(into), -1, rows.shape[1]).transpose(1, 2))
            assert self._scales is not None, "steps have scales"
            self._scales[panels, lanes] = scales[part].reshape(len(into), -1)


class PackedGroups(_Panels):
    """As `PackedWeight`, of codes in groups."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        grouping: Grouping,
        *,
        bias: bool,
        dtype: torch.dtype,
        halves: bool = False,
    ) -> None:
        super().__init__(outputs, bias=bias, halves=halves)
        library = extension.load()
        self._grouping = grouping
        size = grouping.panel_bytes(inputs)
        self._panels = huge_zeros(self._count, size, dtype=torch.uint8)
        values = torch.tensor(grouping.values, dtype=torch.bfloat16) if grouping.values else None
        self.linear = cast(
            "CompiledLinear",
            library.Linear(
                bits=grouping.bits,
                group=grouping.group,
                scale_dtype=getattr(library.ScaleDtype, SCALE_NAMES[grouping.scales]),
                minimums=grouping.minimums,
                dtype=getattr(library.Dtype, DTYPE_NAMES[dtype]),
                halves=halves,
                inputs=inputs,
                outputs=outputs,
                panels=self._panels,
                values=values,
                bias=self._bias,
            ),
        )

    @property
    def nbytes(self) -> int:
        """Bytes that one multiplication reads."""
        return self._panels.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def write(self, first: int, codes: Tensor, scales: Tensor, minimums: Tensor | None) -> None:
        """Write outputs `first` and on: codes (N, I) uint8, scales and minimums (N, G)."""
        codes, dtype = codes.contiguous(), self._grouping.scales
        numbers = [
            None if one is None else one.to(dtype).contiguous() for one in (scales, minimums)
        ]
        for panels, lanes, part in self._places(first, len(codes)):
            steep, least = (None if one is None else one[part] for one in numbers)
            assert steep is not None
            width = lanes.stop - lanes.start
            self.linear.write_groups(
                codes[part], steep, least, panel=panels.start, lane=lanes.start, lanes=width
            )


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each output's weights to multiples of a 127th of their absmax.

    weight (O, I)  ->  int8 (O, I), scales (O,) float32
    """
    wide = weight.to(torch.float32, copy=True)
    # In place and without `abs()`: fresh memory takes longer than the arithmetic.
    scales = torch.maximum(wide.amax(dim=1), -wide.amin(dim=1)).abs() / INT8_MAX
    steps = wide.div_(torch.where(scales > 0, scales, 1.0)[:, None]).round_()
    return steps.to(torch.int8), scales


_WORDS = {2: torch.int16, 4: torch.int32}
"""The integer type that contains a group, by size in bytes."""
_KINDS = {
    "bf16": ("bf16", 2, torch.bfloat16),
    "f32": ("f32", 1, torch.float32),
    "int8": ("int8", 4, torch.int8),
    "int8_dynamic": ("int8_dynamic", 4, torch.uint8),
}
"""By dtype or quantized format: the extension's name, adjacent inputs, and the stored dtype."""
