"""Dynamic RoPE of transformers' modules, made a function of the position alone.

Such a module changes its frequencies by the longest text of a call, and rotates all tokens of the
call by them. Our calls batch many texts and cache keys for later requests: here each token beyond
the trained context is rotated by a call of its own, as if it were the last of its text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

from antiphon.model_worker.model.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    Forward = Callable[..., Tensor | tuple[Tensor, ...]]


class _Rotation(Protocol):
    """The attributes of transformers' RoPE modules; `inv_freq` is what they change."""

    forward: Forward
    rope_type: object
    original_max_seq_len: int
    max_seq_len_cached: int
    original_inv_freq: Tensor
    inv_freq: Tensor


def patch_dynamic_rotary(model: PreTrainedModel) -> None:
    """Patch the dynamic RoPE modules of a model.

    Raises:
        ModelLoadError: Only some types of layers have dynamic RoPE.
    """
    for module in model.modules():
        kind: object = getattr(module, "rope_type", None)
        by_layer = cast("dict[str, object]", kind) if isinstance(kind, dict) else {}
        for name in ("dynamic", "longrope"):  # both depend on the longest text of a call
            if name in by_layer.values():
                raise ModelLoadError(f"only some types of layers have {name} RoPE")
        if kind == "dynamic":
            rotation = cast("_Rotation", module)
            rotation.forward = _by_position(rotation, rotation.forward)


def _by_position(rotation: _Rotation, forward: Forward) -> Forward:
    """Call `forward` separately for each position beyond the trained context.

    Axes: T tokens. position_ids (1, T)  ->  the result of `forward`, (1, T, ...)
    """
    trained = rotation.original_max_seq_len

    def part(x: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        rotation.max_seq_len_cached = trained
        rotation.inv_freq = rotation.original_inv_freq
        given = forward(x, positions[None])
        return (given,) if isinstance(given, Tensor) else given

    def rotated(x: Tensor, position_ids: Tensor) -> Tensor | tuple[Tensor, ...]:
        row = cast("list[int]", position_ids[0].tolist())  # pyright: ignore[reportUnknownMemberType]
        near = sorted({at for at in row if at < trained})
        far = sorted({at for at in row if at >= trained})
        pieces = [*([near] if near else []), *([at] for at in far)]
        parts = [part(x, position_ids.new_tensor(piece)) for piece in pieces]
        order = {at: place for place, at in enumerate(near + far)}
        places = position_ids.new_tensor([order[at] for at in row])
        joined = tuple(torch.cat(same, dim=1)[:, places] for same in zip(*parts, strict=True))
        return joined[0] if len(joined) == 1 else joined

    return rotated
