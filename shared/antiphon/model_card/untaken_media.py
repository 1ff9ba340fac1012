"""Why media are not taken of models that are known to take them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_GEMMA3N: Final = "its towers, MobileNet-v5 for images and a Conformer for audio, are not supported"
_AUDIO: Final = {"audio": "its tower for audio is not supported"}
_REASONS: Final[Mapping[str, Mapping[str, str]]] = {
    "Gemma3nForConditionalGeneration": dict.fromkeys(("image", "video", "audio"), _GEMMA3N),
    "Gemma4ForConditionalGeneration": _AUDIO,
    "Phi4MultimodalForCausalLM": _AUDIO,
}
"""By architecture and kind of media."""


def untaken_reason(architecture: str, kind: str) -> str | None:
    """Why media of this kind, an image, a video or audio, are not taken; None: none is known."""
    return _REASONS.get(architecture, {}).get(kind)
