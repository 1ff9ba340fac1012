"""Every example of docs/nats-client.md is a message that the other side would read."""

from __future__ import annotations

import re
from pathlib import Path

from antiphon.client.client import BATCH, CALLS_MAX, EMBED_SILENCE_S
from antiphon.client.stream import NO_RESPONDERS_TIMEOUT_S, SILENCE_S
from antiphon.wire.codec import decode
from antiphon.wire.generate import TEXTS_MAX
from antiphon.wire.routes import CLIENT_TEXT, EMBED, GATEWAY_CONTROL, GENERATE, escape

PAGE = (Path(__file__).parents[3] / "docs" / "nats-client.md").read_text(encoding="utf-8")


def test_the_examples_are_messages() -> None:
    blocks = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    examples = [one for block in blocks for one in re.split(r"\n(?=\{)", block.strip())]
    kinds = (
        *GENERATE.carries,
        *CLIENT_TEXT.carries,
        *GATEWAY_CONTROL.carries,
        *EMBED.carries,
        *EMBED.replies,
    )
    seen = {type(decode(example.encode(), kinds)) for example in examples}
    assert seen == set(kinds)


def test_the_figures_are_the_clients() -> None:
    assert f"after {SILENCE_S:g} seconds in which" in PAGE
    assert NO_RESPONDERS_TIMEOUT_S < 10, "it says a few seconds"
    assert f"At most {TEXTS_MAX}\ntexts go into a request" in PAGE
    assert (BATCH, CALLS_MAX, EMBED_SILENCE_S) == (16, 4, 60.0)
    assert f"`{escape('llama-3.1')}`" in PAGE
